"""What lies beside each cached key: sums of log gates, positions, and what a choice by content reads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.settings import SettingError
from lit_modules.networks.caches.attention import REBASE_EVERY
from lit_modules.networks.caches.books import Books
from lit_modules.networks.caches.choosing import choose_by_attention, choose_by_gate
from lit_modules.networks.caches.held import HeldNumbers, HeldStates
from lit_modules.networks.caches.moves import Array, Move, Turn


class Beside:
    """The numbers beside the keys of one layer, in the keys' slots.

    `held` has them by name: `sums`, of the log gates up to each token, `[B, Hq, ...]`; `rotary`, positions of keys that
    are rotated when they are read, `[B, 1, ...]`; `positions` in the row and `scores`, the attention received so far or
    from the prompt's last queries, `[B, G, ...]` for groups of heads that choose together. Packed tokens need the first
    two.

    Args:
        books: what the cache's layers share.
        keys: the keys, whose storage sizes are taken.
        groups: groups of heads, G.
    """

    def __init__(self, books: Books, keys: HeldStates, groups: int):
        self.books, self.keys, self.groups = books, keys, groups
        self.held: dict[str, HeldNumbers] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew with sums of gates; storage keeps its address."""
        self._last_sum: Tensor | None = None  # float64 [B, Hq]
        self._since_rebase = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""
        return sum(each.nbytes + each.packed_nbytes for each in self.held.values())

    def write(self, move: Move, keys: Tensor, log_forget: Tensor | None, rotary: Tensor | None) -> dict[str, Tensor]:
        """Write the new tokens' numbers, and return by name the layouts that attention sees; see `Held.write`.

        Args:
            move: of the keys.
            keys: the new keys `[B, Hk, T, D]`.
            log_forget: log forget gates `[B, T, Hq]`, or None.
            rotary: rotary positions `[B, T]` of keys that are rotated when they are read, or None.

        Raises:
            SettingError: the policy needs gates, and there are none.
        """
        ledger = self.books.keys
        new: dict[str, Tensor] = {}
        if log_forget is not None:
            new["sums"] = self._summed(log_forget.detach())
        if rotary is not None:
            new["rotary"] = rotary.int()[:, None]
        if ledger.keep == "forget_gate" and log_forget is None:
            fix = "choose another policy"
            raise SettingError("cache.keys.keep", ledger.keep, fix, "needs a model with forget gates")
        # The prompt votes for its own tokens alone: a step writes nothing, and what it left out is known at the roll.
        is_voted_step = ledger.keep == "prompt_attention" and move.tokens == 1
        if ledger.reads_content and not (is_voted_step and "scores" in self.held):
            # Keys that are mapped when they are read have one position for all heads.
            new["positions"] = self._new_positions(move.tokens, 1 if rotary is not None else self.groups, keys.device)
            if ledger.keep != "forget_gate":
                new["scores"] = torch.zeros_like(new["positions"], dtype=torch.float32)
            self._complete(move.turns, [turn.before for turn in move.turns])
        return {name: self._of(name, numbers).write(numbers, move) for name, numbers in new.items()}

    def _complete(self, turns: tuple[Turn, ...], stops: Sequence[int]) -> None:
        """Write positions, and scores of 0, of tokens that came one by one, up to the slots `stops`."""
        if self.books.keys.keep != "prompt_attention" or "scores" not in self.held:
            return
        scores, positions = (self.held[name].dense for name in ("scores", "positions"))
        assert scores is not None
        assert positions is not None
        for turn, stop in zip(turns, stops, strict=True):
            if stop > turn.since:
                # A slice where it is all rows: a list of them would be copied to the device.
                rows = turn.rows if len(turn.rows) < len(scores) else slice(None)
                scores[rows, :, turn.since : stop] = 0.0
                positions[rows, :, turn.since : stop] = self._places(turn, stop, rows)[:, None]

    def _places(self, turn: Turn, stop: int, rows: list[int] | slice) -> Tensor:
        """Return the positions `[n or 1, s]` of the tokens in the slots from `turn.since` to `stop`, which came last.

        Packed tokens are all tokens that are in no slot: their number on the device is right in a replayed roll too.
        """
        ledger = self.books.keys
        assert ledger.blocks is not None
        slots = torch.arange(turn.since, stop, dtype=torch.int32, device=ledger.blocks.device)
        if ledger.packs:
            return ledger.blocks[rows, None] * ledger.block + slots
        return (slots + (turn.length - turn.before))[None]

    def choose(self, turns: tuple[Turn, ...], layouts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the slots to release and to keep, `[B, G, n]` and `[B, G, m]`."""
        ledger = self.books.keys
        if ledger.keep != "forget_gate":
            if "scores" not in layouts:
                self._complete(turns, [turn.before + turn.real for turn in turns])
            scores = layouts.get("scores", self.held["scores"].dense)
            assert scores is not None
            return choose_by_attention(turns, scores, ledger.window, ledger.block)
        positions = layouts["positions"]
        sums = layouts["sums"].unflatten(1, (positions.shape[1], -1)).mean(2)
        return choose_by_gate(turns, sums, positions, ledger.window, ledger.block)

    def rebase(self) -> None:
        """Bring the origin of the sums near the newest token, because a float32 near -10000 is too coarse."""
        if self._since_rebase < REBASE_EVERY or self._last_sum is None:
            return
        held, origin = self.held["sums"], self._last_sum
        for each in (held.dense, *held.packed):
            if each is not None:
                each -= origin.to(each.dtype).view(*origin.shape, *(1,) * (each.ndim - 2))
        self._last_sum, self._since_rebase = torch.zeros_like(origin), 0

    def keep_slots(self, rows: Sequence[Array]) -> None:
        """Keep these slots of each row alone, after tokens were taken back."""
        for held in self.held.values():
            held.compact(rows)
        if self._last_sum is not None:
            sums = self.held["sums"].dense
            assert sums is not None
            # The newest token that is left lies in the last slot.
            last = torch.tensor([max(len(slots) - 1, 0) for slots in rows], device=sums.device)
            self._last_sum = sums.gather(2, last[:, None, None].expand(-1, sums.shape[1], 1))[..., 0].double()

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `move` makes of it."""
        for held in self.held.values():
            held.map(move)
        if self._last_sum is not None:
            self._last_sum = move(self._last_sum)

    def _of(self, name: str, like: Tensor) -> HeldNumbers:
        """Return the storage of this name."""
        held = self.held.get(name)
        if held is None:
            held = self.held[name] = HeldNumbers(
                self.books.keys.block,
                self.keys.least_slots,
                self.keys.least_blocks,
                is_fixed=self.keys.is_fixed,
                outlives=name in ("sums", "rotary"),
            )
            if held.is_fixed:
                held.allocate(like)
        return held

    def _new_positions(self, tokens: int, groups: int, device: torch.device) -> Tensor:
        """Return the positions of the new tokens in their rows, int32 `[B, G, T]`; padding has negative ones."""
        ledger = self.books.keys
        assert ledger.starts is not None
        starts = torch.tensor([max(start, 0) for start in ledger.starts], device=device, dtype=torch.int32)
        new = torch.arange(ledger.length - tokens, ledger.length, device=device, dtype=torch.int32)
        return (new - starts[:, None])[:, None].expand(-1, groups, -1).contiguous()

    def _summed(self, log_forget: Tensor) -> Tensor:
        """Return the sums of log gates up to each new token, `[B, Hq, T]`, for `[B, T, Hq]`."""
        sums = log_forget.double().cumsum(1)
        if self._last_sum is not None:
            sums = sums + self._last_sum[:, None]
        self._last_sum = sums[:, -1]
        self._since_rebase += sums.shape[1]
        return sums.mT.to(log_forget.dtype).contiguous()
