"""Which tokens keep 16 bits when a query is the newest token, by the rules of the caches themselves."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_modules.networks.caches.choosing import choose_by_gate
from lit_modules.networks.caches.moves import Turn
from lit_modules.networks.caches.selection import Schedule, kept_positions
from lit_modules.networks.caches.settings import BLOCK


@dataclass(frozen=True)
class Selection:
    """A rule by position; arguments as `lit_modules.networks.caches.selection.Schedule`'s."""

    keep: str
    window: int
    first: int = 0

    def kept(self, rows: range) -> Tensor:
        """Return bool `[Q, S]`: whether the query at `rows[i]` finds token j in 16 bits; S is the end of the rows."""
        mask = torch.zeros(len(rows), rows.stop, dtype=torch.bool)
        for row, position in enumerate(rows):
            mask[row, kept_positions(self.keep, position + 1, self.window, self.first)] = True
        return mask

    @property
    def order(self) -> tuple[str, int]:
        """What the order of release depends on: with the same one, the same tokens are released, sooner or later."""
        return self.keep, self.window if self.keep == "log_sparse" else self.first

    def packed(self, rows: range, block: int) -> tuple[Tensor, Tensor]:
        """Return what is quantized, in whole blocks; what waits for its block to fill has 16 bits.

        Returns:
            The packed tokens in the order of their release, `[n]` int64, n a multiple of the block; and bool `[Q, S]`,
            whether the query at `rows[i]` finds token j quantized.
        """
        order = Schedule(self.keep, self.window, self.first, block).advance(rows.stop).packed
        rank = np.full(rows.stop, len(order))
        rank[order] = np.arange(len(order))
        counts = [Schedule(self.keep, self.window, self.first, block, position + 1).packed for position in rows]
        return torch.from_numpy(order), torch.from_numpy(rank < np.array(counts)[:, None])


def log_sparse(reserved: int) -> Selection:
    """LogQuant: from 2 to 3 thirds of the reserved length, in the long run 5/6."""
    return Selection("log_sparse", reserved // 3)


def recent(reserved: int) -> Selection:
    """KiVi: the last tokens."""
    return Selection("recent", reserved)


def two_and_recent(reserved: int) -> Selection:
    """KiVi + sink: the first two and the last `reserved` tokens."""
    return Selection("first_and_recent", reserved, first=2)


def two_and_fewer(reserved: int) -> Selection:
    """The first two and the last tokens, in the long run as many as `log_sparse` keeps: 5/6 of the reserved length."""
    return Selection("first_and_recent", 5 * (reserved // 3) // 2 - 2, first=2)


def four_and_recent(reserved: int) -> Selection:
    """StreamingLLM: the first four tokens, and the last ones."""
    return Selection("first_and_recent", reserved - 4, first=4)


def recent_as_many(kept: Tensor, rows: range) -> Tensor:
    """Return bool `[Q, S]`: the last tokens, as many as `kept` `[Q, S]` has at that query."""
    distance = torch.tensor(rows)[:, None] - torch.arange(rows.stop)
    return (distance >= 0) & (distance < kept.sum(1, keepdim=True))


def most_attended(scores: Tensor, rows: Tensor, reserved: int) -> Tensor:
    """Return bool `[Q, S]`: half of the reserved length for the last tokens, half for those before with most attention.

    Args:
        scores: `[Q, S]` or `[S]`, the attention that each token has had: from all queries before (H2O), or from the
            prompt's last ones (SnapKV).
        rows: `[Q]`, the queries' positions.
    """
    distance = rows[:, None] - torch.arange(scores.shape[-1], device=rows.device)
    last = (distance >= 0) & (distance < reserved - reserved // 2)
    older = scores.masked_fill(last | (distance < 0), -1.0)
    return last.scatter(1, older.topk(reserved // 2, dim=1).indices, True)


def by_gate(sums: Tensor, rows: range, window: int) -> Tensor:
    """Return which tokens the gate's choice keeps when each of `rows` is the newest, bool `[G, Q, S]`.

    From `window` to `window` + BLOCK - 1 tokens are kept: a block is released at a time.

    Args:
        sums: of the log gates, `[1, G, S]`.
        rows: positions of the queries.
        window: tokens that keep 16 bits.
    """
    mask = torch.zeros(sums.shape[1], len(rows), sums.shape[2], dtype=torch.bool, device=sums.device)
    every = [max(0, (row + 1 - window) // BLOCK) for row in rows]
    for releases in sorted(set(every)):
        full = window + BLOCK * releases  # tokens at the last release
        turn = Turn(rows=[0], before=0, padding=0, real=full, length=0, releases=releases)
        positions = torch.arange(full, device=sums.device, dtype=torch.int32).expand(1, sums.shape[1], -1)
        kept = choose_by_gate((turn,), sums[:, :, :full], positions, window, BLOCK)[1][0]  # [G, window]
        for place, row in enumerate(rows):
            if every[place] == releases:
                mask[:, place].scatter_(1, kept, True)
                mask[:, place, full : row + 1] = True
    return mask


def largest(weights: Tensor, reserved: int) -> Tensor:
    """Return bool `[Q, S]`: the tokens with most attention `[Q, S]` now, which no cache can know: the upper bound."""
    return torch.zeros_like(weights, dtype=torch.bool).scatter(1, weights.topk(reserved, dim=1).indices, True)
