"""The memory of one tensor of a compressed layer: slots in the tensor's own dtype, and packed blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.packed_kv import Format, Packed, can_pack, pack, pack_slots, write_tokens
from lit_modules.networks.caches.moves import Array, Filing, Move
from lit_modules.networks.caches.rotations import Transform

GROWTH = 16
"""Storage that is full grows by one part in so many: allocated bytes count, and the copies stay below 17 a token."""


class Held:
    """One tensor `[B, H, slots, ...]` of a layer, and what was packed of it.

    Args:
        block: tokens of a block.
        slots: slots to allocate at once; None: as needed.
        blocks: packed blocks to allocate at once; None: as needed.
        is_fixed: whether the storage keeps its address.
    """

    def __init__(self, block: int, slots: int | None = None, blocks: int | None = None, *, is_fixed: bool = False):
        self.block, self.least_slots, self.least_blocks, self.is_fixed = block, slots, blocks, is_fixed
        self.dense: Tensor | None = None  # [B, H, slots, ...]
        self.packed: list[Tensor] = []  # [B, H, blocks, ...] each

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return 0 if self.dense is None else self.dense.nbytes

    def write(self, new: Tensor, move: Move) -> Tensor:
        """Put new tokens `[B, H, T, ...]` where they belong.

        Returns:
            The layout `[B, H, slots, ...]` that attention sees: the slots, or a copy with the new tokens behind them
            where so many tokens come at once that most of them will leave.
        """
        if (move.tokens > 1 or move.is_padded) and move.roll is not None:
            return self._joined(new, move)
        if self.is_fixed and move.tokens == 1:
            # A replayed step knows the place of its token from the device alone.
            assert self.dense is not None
            _write_rows(self.dense, new, move.end)
            return self.dense
        dense = self.fit(new, move.slots)
        if move.is_level and not self.is_fixed:
            dense[:, :, move.used : move.slots] = new
        else:
            _write_rows(dense, new, move.end)
        return dense

    def fit(self, like: Tensor, slots: int) -> Tensor:
        """Return the slots, at least so many, in heads, width and dtype like `[B, H, T, ...]`."""
        held = 0 if self.dense is None else self.dense.shape[2]
        if self.dense is None or slots > held:
            least = self.least_slots or 0 if self.dense is None else held + held // GROWTH + 1
            size = max(slots, least)
            # Zeros: what lies in unused slots is read, and only then masked.
            grown = like.new_zeros(*like.shape[:2], size, *like.shape[3:])
            if self.dense is not None:
                grown[:, :, :held] = self.dense
            self.dense = grown
        return self.dense

    def allocate(self, like: Tensor) -> None:
        """Allocate the slots and blocks at once, for tokens like `[B, H, T, ...]`."""
        self.fit(like, 1)
        if self.least_blocks:
            self._reserve(self._pack(self._blank(like)), self.least_blocks)

    def compact(self, rows: Sequence[Array]) -> None:
        """Move these slots of each row to the front."""
        assert self.dense is not None
        table = np.zeros((len(rows), 1, max(map(len, rows))), np.int64)
        for row, slots in enumerate(rows):
            table[row, 0, : len(slots)] = slots
        stay = _take(self.dense, torch.from_numpy(table).to(self.dense.device))
        self.dense[:, :, : stay.shape[2]] = stay

    def roll(self, layout: Tensor, kept: Tensor, released: Tensor | None, filing: Filing | None) -> None:
        """Pack the slots `released` of a layout, and move the slots `kept` to the front; see `Roll`."""
        if released is not None and filing is not None:
            self._pack_slots(layout, released, filing)
        stay = _take(layout, kept)
        self.fit(layout, stay.shape[2])[:, :, : stay.shape[2]] = stay

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `move` makes of it."""
        if self.dense is not None:
            self.dense = move(self.dense)
        self.packed = [move(each) for each in self.packed]

    def _blank(self, like: Tensor) -> Tensor:
        """Return one block of zeros like `[B, H, T, ...]`."""
        return like.new_zeros(*like.shape[:2], self.block, *like.shape[3:])

    def _pack(self, x: Tensor) -> list[Tensor]:
        """Return what is stored of whole blocks of `x` `[B, H, n, ...]`: tensors `[B, H, blocks, ...]`."""
        raise NotImplementedError

    def _pack_slots(self, layout: Tensor, slots: Tensor, filing: Filing) -> None:
        """Pack slots of a layout, and put the blocks where they belong."""
        self._file(self._pack(_take(layout, slots)), filing)

    def _file(self, new: list[Tensor], filing: Filing) -> None:
        self._reserve(new, filing.needed)
        row, source, target = filing.cells
        for storage, x in zip(self.packed, new, strict=True):
            if filing.first is not None:
                storage[:, :, filing.first : filing.needed] = x
            else:
                storage[row, :, target] = x[row, :, source]

    def _reserve(self, like: list[Tensor], blocks: int) -> None:
        """Make room for so many blocks `like` these, `[B, H, n, ...]`."""
        if not self.packed:
            size = max(blocks, self.least_blocks or 0)
            self.packed = [x.new_zeros(*x.shape[:2], size, *x.shape[3:]) for x in like]
        held = self.packed[0].shape[2]
        if blocks > held:
            size = max(blocks, held + held // GROWTH + 1)
            self.packed = [_longer(x, size) for x in self.packed]

    def _joined(self, new: Tensor, move: Move) -> Tensor:
        if move.used == 0:
            return new
        assert self.dense is not None
        if move.is_level:
            return torch.cat((self.dense[:, :, : move.used], new), 2)
        joined = new.new_zeros(*new.shape[:2], move.slots, *new.shape[3:])
        joined[:, :, : move.used] = self.dense[:, :, : move.used]
        _write_rows(joined, new, move.end)
        return joined


class HeldStates(Held):
    """Keys or values.

    Args:
        format: how they are quantized; None: they are not.
        block: tokens of a block.
        by_channel: the layout of values.
        transform: what is done to them before they are quantized, or None. Slots lack its mean too, so that all tokens
            are alike.
        sorts: rotate by a permutation, which the first block decides.
        slots, blocks, is_fixed: as in `Held`.
    """

    def __init__(
        self,
        format: Format | None,
        block: int,
        *,
        by_channel: bool,
        transform: Transform | None = None,
        sorts: bool = False,
        slots: int | None = None,
        blocks: int | None = None,
        is_fixed: bool = False,
    ):
        super().__init__(block, slots, blocks, is_fixed=is_fixed)
        self.format, self.by_channel = format, by_channel
        self.rotation = None if transform is None else transform.matrix
        self.inverse = None if transform is None else transform.inverse
        self.mean = None if transform is None or transform.mean is None else transform.mean[:, None]  # [H, 1, D]
        self.side: Packed | None = None
        self.sorts = sorts

    def allocate(self, like: Tensor) -> None:
        """Allocate the slots and blocks at once, for tokens like `[B, H, T, D]`."""
        sorts, self.sorts = self.sorts, False
        if sorts:
            self.rotation = self.inverse = torch.eye(like.shape[3], device=like.device)
        super().allocate(like)
        self.sorts = sorts

    def _sort(self, x: Tensor) -> None:
        """Set the permutation by the channels' ranges in `x` `[B, H, n, D]`, the mean over rows and heads."""
        self.sorts = False
        ranges = (x.amax(2) - x.amin(2)).float().mean((0, 1))
        permutation = torch.eye(len(ranges), device=x.device)[:, ranges.argsort(descending=True, stable=True)]
        if self.rotation is None:
            self.rotation = self.inverse = permutation
        else:
            self.rotation.copy_(permutation)

    def _pack_slots(self, layout: Tensor, slots: Tensor, filing: Filing) -> None:
        assert self.format is not None
        if self.sorts or not self.packed or not can_pack(layout):
            super()._pack_slots(layout, slots, filing)
            return
        self._reserve(self.packed, filing.needed)
        if self.rotation is not None:
            layout = self._rotated(_take(layout, slots))
            slots = torch.arange(layout.shape[2], device=layout.device)[None, None]
        pack_slots(layout, slots, self.as_packed(), filing.cells)

    def _rotated(self, x: Tensor) -> Tensor:
        assert self.rotation is not None
        # Not back to the dtype of x: a float16 of 6e4 may leave its range when it is rotated.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x @ self.rotation.to(x)

    def _pack(self, x: Tensor) -> list[Tensor]:
        assert self.format is not None
        if self.sorts:
            self._sort(x[:, :, : self.block])
        if self.rotation is not None:
            x = self._rotated(x)
        packed = pack(x, self.format, self.block, by_channel=self.by_channel)
        if self.side is None:
            self.side = packed.map(lambda each: each.new_empty(0))
        return list(packed.tensors())

    def centred(self, new: Tensor) -> Tensor:
        """Return new tokens `[B, H, T, D]` as they are held: less the mean of each head."""
        return new if self.mean is None else new - self.mean

    def restored(self, out: Tensor) -> Tensor:
        """Return outputs of attention `[B, Hq, T, D]` to values without their mean as they are with it."""
        if self.mean is None:
            return out
        return (out.unflatten(1, (len(self.mean), -1)) + self.mean[:, None]).flatten(1, 2).to(out.dtype)

    def as_packed(self) -> Packed:
        """Return the packed blocks; there has to be one."""
        assert self.side is not None
        low, *high, metadata = self.packed
        return replace(self.side, low=low, high=high[0] if high else None, metadata=metadata)

    @property
    def packed_nbytes(self) -> tuple[int, int]:
        """Bytes of codes and of metadata."""
        sizes = [x.nbytes for x in self.packed]
        return (sum(sizes[:-1]), sizes[-1]) if sizes else (0, 0)


class HeldNumbers(Held):
    """One number a token and head, such as the sum of log gates; blocks of it are stored as they are.

    Args:
        block, slots, blocks, is_fixed: as in `Held`.
        outlives: whether the numbers of packed tokens are needed.
    """

    def __init__(
        self,
        block: int,
        slots: int | None = None,
        blocks: int | None = None,
        *,
        is_fixed: bool = False,
        outlives: bool = True,
    ):
        super().__init__(block, slots, blocks if outlives else None, is_fixed=is_fixed)
        self.outlives = outlives

    def _pack_slots(self, layout: Tensor, slots: Tensor, filing: Filing) -> None:
        if self.outlives:
            super()._pack_slots(layout, slots, filing)

    def _pack(self, x: Tensor) -> list[Tensor]:
        return [x.unflatten(2, (-1, self.block))]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of packed tokens' numbers."""
        return sum(x.nbytes for x in self.packed)


def _take(layout: Tensor, slots: Tensor) -> Tensor:
    """Return the slots `[B or 1, G or 1, n]` of a layout `[B, H, S, ...]`; a group of heads shares its slots."""
    if slots.shape[:2] == (1, 1):
        return layout.index_select(2, slots[0, 0])
    # Not repeat_interleave, which takes several launches even where there is nothing to repeat.
    slots = slots[:, :, None].expand(-1, -1, layout.shape[1] // slots.shape[1], -1).flatten(1, 2)
    slots = slots.reshape(*slots.shape, *(1,) * (layout.ndim - 3))
    return layout.gather(2, slots.expand(layout.shape[0], -1, -1, *layout.shape[3:]))


def _write_rows(storage: Tensor, new: Tensor, end: Tensor) -> None:
    """Write `[B, H, T, ...]` into the slots of each row that end at `end` `[B]`."""
    wide = storage.ndim == 4
    write_tokens(storage if wide else storage[..., None], new if wide else new[..., None], end)


def _longer(x: Tensor, size: int) -> Tensor:
    longer = x.new_zeros(*x.shape[:2], size, *x.shape[3:])
    longer[:, :, : x.shape[2]] = x
    return longer
