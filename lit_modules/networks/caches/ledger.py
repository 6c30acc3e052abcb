"""Where each token of a compressed cache lies, known on the host; one ledger serves all layers of a cache.

A row's tokens with 16 bits lie in slots 0 to `count - 1`, older ones packed in blocks. `Ledger.advance` says for some
new tokens which slots they take, and which leave afterwards: a `Move` with index tensors that every layer applies.
Rows whose left padding differs have schedules of their own, and padding never takes a slot that stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lit_modules.networks.caches.moves import Array, Filing, Move, Order, Roll, Turn
from lit_modules.networks.caches.selection import Schedule, kept_positions, release_order, released_count
from lit_modules.networks.caches.settings import BY_CONTENT

OPEN = -1
"""The start of a row that has only had padding so far."""


@dataclass
class Group:
    """The rows whose first token is at `start`.

    Attributes:
        length: real tokens so far.
        count: slots in use.
        blocks: packed blocks.
        known: positions by slot, up to the last change; after them come all later tokens in order.
        until: the first position after the last change.
        since: slots in use after the last tokens that came several at once, or after the last release if that is later.
    """

    start: int
    length: int = 0
    count: int = 0
    blocks: int = 0
    known: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    until: int = 0
    since: int = 0

    def order(self) -> Array:
        """Return the positions by slot."""
        return np.concatenate((self.known, np.arange(self.until, self.length)))

    def reorder(self, order: Array) -> None:
        """Set the positions by slot."""
        self.known, self.until, self.count = order, self.length, len(order)
        self.since = min(self.since, self.count)


class Ledger:
    """The bookkeeping of one partition of the tokens; keys and values share it unless they keep different tokens.

    Args:
        keep: a policy of `TensorSettings`, or `all`.
        window: tokens of the policy.
        first: first tokens that the policy keeps.
        block: tokens that are packed together.
        packs: whether released tokens are packed; else they are evicted.
        tracks: whether each move says which positions lie where.
    """

    def __init__(self, keep: str, window: int, first: int, block: int, packs: bool, tracks: bool = False):
        self.keep, self.window, self.first, self.block, self.packs = keep, window, first, block, packs
        self.tracks = tracks
        self.end: Tensor | None = None  # int32 [B], slots in use; its address stays, and so does that of `blocks`
        self.blocks: Tensor | None = None  # int32 [B], packed blocks
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0  # tokens, padding included
        self.starts: list[int] | None = None  # padding of each row, OPEN while it has no token
        self.groups: dict[int, Group] = {}
        self._is_stale = True

    @property
    def reads_content(self) -> bool:
        """Whether layers choose the tokens that leave."""
        return self.keep in BY_CONTENT

    @property
    def bound(self) -> int | None:
        """The most slots that decoding uses; None without a limit."""
        if self.keep == "all":
            return None
        most = 3 * self.window if self.keep == "log_sparse" else self.window + self.first
        return most + self.block

    def most_blocks(self, tokens: int) -> int:
        """Return the most packed blocks of a row with so many tokens."""
        kept = 2 * self.window if self.keep == "log_sparse" else self.window + self.first
        return max(0, tokens - kept) // self.block

    def batch(self) -> int:
        """Return the number of rows, 0 before the first tokens."""
        return 0 if self.starts is None else len(self.starts)

    def counts(self) -> list[int]:
        """Return the slots in use in each row."""
        return [self.groups[start].count for start in self.starts or ()]

    def packed_blocks(self) -> list[int]:
        """Return the packed blocks of each row."""
        return [self.groups[start].blocks for start in self.starts or ()]

    def advance(
        self, batch: int, tokens: int, device: torch.device, padding: Callable[[], Sequence[int]] | None = None
    ) -> Move:
        """Append `tokens` tokens to each of `batch` rows.

        Args:
            padding: returns the padding on the left of each row, of all tokens with the new ones; None if there is no
                mask. Called only where it may say something new.

        Raises:
            ValueError: the batch is another than before, or padding is not where it was.
        """
        self._find_starts(batch, tokens, padding)
        self._refresh(device)
        assert self.starts is not None
        assert self.end is not None
        assert self.blocks is not None
        before, past = self.counts(), any(self.packed_blocks())
        packed = [group.blocks * self.block for group in self.groups.values()]
        held = [group.order() for group in self.groups.values()] if self.tracks else []
        turns = tuple(self._turn(group, tokens) for group in self.groups.values())
        changes = [
            self._advance_group(self.groups[start], turn) for start, turn in zip(self.groups, turns, strict=True)
        ]
        is_padded = any(turn.padding for turn in turns)
        leaves = any(released.size for released, _ in changes) or any(turn.releases for turn in turns)
        self.length += tokens
        self.end.add_(tokens)
        start = None
        if is_padded:
            by_row = {row: turn.padding for turn in turns for row in turn.rows}
            start = torch.tensor([by_row[row] for row in range(batch)], dtype=torch.int32, device=device)
        # Without a change all stays where it is; padding takes slots that it has to give back.
        roll = self._roll(turns, changes, device) if leaves or is_padded else None
        self._is_stale = roll is not None
        return Move(
            tokens=tokens,
            used=max(before),
            slots=max(before) + tokens,
            end=self.end,
            start=start,
            blocks=self.blocks,
            past=past,
            is_level=min(before) == max(before),
            roll=roll,
            is_padded=is_padded,
            orders=tuple(map(self._order, turns, packed, held)),
            turns=turns if self.reads_content else (),
        )

    def positions(self, row: int) -> list[int]:
        """Return the positions in a row, after its padding, that keep 16 bits by the policy, ascending."""
        assert self.starts is not None
        length = self.groups[self.starts[row]].length
        if self.keep == "all":
            return list(range(length))
        kept: list[int] = kept_positions(self.keep, length, self.window, self.first).tolist()
        return kept

    def select(self, rows: Callable[[], list[int]], count: int) -> None:
        """Replace the rows by `count` rows with these indices; the indices are read only where rows differ."""
        if self.starts is None:
            return
        if len(set(self.starts)) == 1:
            self.starts = self.starts[:1] * count
        else:
            self.starts = [self.starts[row] for row in rows()]
            self.groups = {start: group for start, group in self.groups.items() if start in self.starts}
        self._is_stale = True

    def rewind(self, length: int) -> list[Array]:
        """Take back tokens until `length` are left, padding included.

        Returns:
            For each row the slots that stay.

        Raises:
            ValueError: a token that has left its slot since would be needed.
        """
        assert self.starts is not None
        left = {start: 0 if start == OPEN else max(0, length - start) for start in self.groups}
        for start, group in self.groups.items():
            self._check_rewind(group, left[start])
        stays = {}
        for start, group in self.groups.items():
            order = np.arange(group.count) if self.reads_content else group.order()
            stays[start] = np.flatnonzero(order < left[start])
            group.length = left[start]
            group.reorder(order[stays[start]])
        self.length = length
        self._is_stale = True
        return [stays[start] for start in self.starts]

    def _check_rewind(self, group: Group, length: int) -> None:
        if length >= group.length or self.keep == "all" or group.count == group.length:
            return
        if self.reads_content:
            raise ValueError(
                f"{group.length} tokens cannot be cut to {length}: the tokens to take back had a part in choosing "
                "which others keep 16 bits; begin anew"
            )
        Schedule(self.keep, self.window, self.first, self.block, group.length).rewind(length)

    def _find_starts(self, batch: int, tokens: int, padding: Callable[[], Sequence[int]] | None) -> None:
        if self.starts is not None and len(self.starts) != batch:
            raise ValueError(
                f"the cache holds {len(self.starts)} rows, and the new tokens have {batch}: call its "
                "batch_select_indices or batch_repeat_interleave, or begin with a new cache"
            )
        is_open = self.starts is None or OPEN in self.starts
        if not is_open and (tokens == 1 or padding is None):
            return
        stop = self.length + tokens
        found = [0] * batch if padding is None else [int(p) for p in padding()]
        starts = [OPEN if start >= stop else start for start in found]
        if self.starts is not None:
            for row, (known, now) in enumerate(zip(self.starts, starts, strict=True)):
                if known not in (OPEN, now):
                    raise ValueError(
                        f"attention_mask: row {row} had {known} tokens of padding, and now {now}: its zeros have to "
                        "stay"
                    )
        self.starts = starts
        for start in starts:
            self.groups.setdefault(start, Group(start))
        self.groups = {start: group for start, group in self.groups.items() if start in starts}
        self._is_stale = True

    def _turn(self, group: Group, tokens: int) -> Turn:
        assert self.starts is not None
        real = 0 if group.start == OPEN else min(tokens, self.length + tokens - group.start)
        rows = [row for row, start in enumerate(self.starts) if start == group.start]
        releases = 0
        if self.reads_content and group.count + real >= self.window + self.block:
            releases = (group.count + real - self.window) // self.block
        return Turn(rows, group.count, tokens - real, real, group.length, releases, group.since)

    def _advance_group(self, group: Group, turn: Turn) -> tuple[Array, Array]:
        """Append a turn's tokens; return the slots that are released, in order, and those that stay."""
        assert turn.padding == 0 or turn.before == 0
        group.length += turn.real
        group.count += turn.real - turn.releases * self.block
        group.blocks += turn.releases if self.packs else 0
        if turn.padding + turn.real > 1 or turn.releases:
            group.since = group.count
        leaving = self._leaving(turn.length, group.length)
        if not leaving.size:
            return leaving, turn.slots()
        held, slots = group.order(), turn.slots()
        stays = ~np.isin(held, leaving)
        group.reorder(held[stays])
        group.blocks += len(leaving) // self.block if self.packs else 0
        by_position = np.argsort(held)
        return slots[by_position[np.searchsorted(held, leaving, sorter=by_position)]], slots[stays]

    def _order(self, turn: Turn, packed: int, held: Array) -> Order:
        old = np.zeros(0, np.int64)
        if packed:
            old = release_order(self.keep, 0, packed, self.window, self.first)
        return Order(turn.rows, old, turn.slots(), np.concatenate((held, turn.length + np.arange(turn.real))))

    def _leaving(self, before: int, length: int) -> Array:
        """Return the positions that whole blocks release between two lengths, in order."""
        if self.keep == "all" or self.reads_content:
            return np.zeros(0, np.int64)
        released = (released_count(self.keep, n, self.window, self.first) for n in (before, length))
        start, stop = (count // self.block * self.block for count in released)
        return release_order(self.keep, start, stop, self.window, self.first) if stop > start else np.zeros(0, np.int64)

    def _roll(self, turns: tuple[Turn, ...], changes: list[tuple[Array, Array]], device: torch.device) -> Roll:
        if self.reads_content:
            filing = self._filing([turn.releases for turn in turns], turns, device) if self.packs else None
            return Roll(None, None, filing)
        kept = _by_row([kept for _, kept in changes], turns, device)
        if not self.packs:
            return Roll(kept, None, None)
        released = _by_row([leaving for leaving, _ in changes], turns, device)
        filing = self._filing([len(leaving) // self.block for leaving, _ in changes], turns, device)
        return Roll(kept, released if filing is not None else None, filing)

    def _filing(self, new: list[int], turns: tuple[Turn, ...], device: torch.device) -> Filing | None:
        if not any(new):
            return None
        groups = list(self.groups.values())
        needed = max(group.blocks for group in groups)
        cells = [
            (row, source, group.blocks - count + source)
            for count, group, turn in zip(new, groups, turns, strict=True)
            for row in turn.rows
            for source in range(count)
        ]
        agree = len({(count, group.blocks) for count, group in zip(new, groups, strict=True)}) == 1
        table = torch.tensor(cells, dtype=torch.int64).T.contiguous().to(device)
        return Filing(needed, table, first=needed - new[0] if agree else None)

    def _refresh(self, device: torch.device) -> None:
        """Write the counts to the device where the host has changed them; tensors keep their addresses."""
        if not self._is_stale:
            return
        for name, values in (("end", self.counts()), ("blocks", self.packed_blocks())):
            new = torch.tensor(values, dtype=torch.int32, device=device)
            held = getattr(self, name)
            if held is None or held.shape != new.shape or held.device != device:
                setattr(self, name, new)
            else:
                held.copy_(new)
        self._is_stale = False


def _by_row(slots: list[Array], turns: tuple[Turn, ...], device: torch.device) -> Tensor:
    """Return the slots of each group as int64 `[B, 1, most]`, filled up with 0; `[1, 1, n]` for one group."""
    if len(slots) == 1:
        return torch.from_numpy(slots[0]).to(device)[None, None]
    most = max(map(len, slots))
    table = np.zeros((sum(len(turn.rows) for turn in turns), 1, most), np.int64)
    for group, turn in zip(slots, turns, strict=True):
        table[turn.rows, 0, : len(group)] = group
    return torch.from_numpy(table).to(device)
