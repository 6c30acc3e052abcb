"""Division of tokens into chunks: rows of a batch, or packed documents, cut into chunks that run in parallel.

Chunks are sorted by their number within a row, and rows by their number of chunks, most first. Hence the chunks of one
step of the recurrence over chunks are contiguous, and so are the states of their rows. The last chunk of a row is
padded with zero tokens, which change nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
# Cost of a chunk's state, in tokens.
STATE_COST = 16
# Elements of each input per slab: few enough for the cache, enough to hide Python's overhead.
SLAB_ELEMENTS = 2**18


@dataclass(frozen=True)
class Slab:
    """Chunks of consecutive steps; N is their number times heads.

    steps: for each step or part of a step, its rows in the layout's order and its chunks in the slab.
    index: [chunks, Hk, C] int64, the position of a token's head in [B * T * Hk]; padding: [chunks, Hk, C] bool or None.
    """

    steps: list[tuple[slice, slice]]
    index: Tensor
    padding: Tensor | None

    def take(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather [B * T * Hk, n] into [N, C, n] in dtype, with 0 for padding."""
        taken = rows.index_select(0, self.index.flatten()).to(dtype).unflatten(0, (-1, self.index.shape[2]))
        if self.padding is not None:
            taken.masked_fill_(self.padding.flatten(0, 1)[..., None], 0.0)
        return taken

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Scatter [N, C, n] into [B * T * Hk, n], the inverse of `take`."""
        index, values = self.index.flatten(), values.reshape(-1, rows.shape[1]).to(rows.dtype)
        if self.padding is not None:
            real = ~self.padding.flatten()
            index, values = index[real], values[real]
        rows.index_copy_(0, index, values)


@dataclass(frozen=True)
class Layout:
    """Division into chunks of `size` tokens; `order` [R]: rows (batch rows or documents) by number of chunks."""

    size: int
    order: Tensor
    widths: list[int]
    begins: Tensor
    counts: Tensor

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> "Layout":
        bounds = torch.arange(batch + 1) * length if cu_seqlens is None else cu_seqlens.cpu().long()
        starts, lengths = bounds[:-1], bounds.diff()
        chunks = {size: (lengths + size - 1) // size for size in CHUNKS}
        size = min(CHUNKS, key=lambda size: int(chunks[size].sum()) * (size + STATE_COST))
        chunks, order = chunks[size].sort(descending=True, stable=True)
        steps = torch.arange(int(chunks[0]) if len(chunks) else 0)
        widths = len(chunks) - torch.searchsorted(chunks.flip(0), steps, right=True)
        step = steps.repeat_interleave(widths)
        row = order[torch.arange(len(step)) - (widths.cumsum(0) - widths)[step]]
        begins, counts = starts[row] + step * size, (lengths[row] - step * size).clamp(max=size)
        return cls(size, order.to(device), widths.tolist(), begins.to(device), counts.to(device))

    def slabs(self, heads: int, channels: int) -> list[Slab]:
        """Group the chunks into slabs of at most SLAB_ELEMENTS, with `channels` per head, or of a single chunk."""
        most = max(1, SLAB_ELEMENTS // (heads * channels * self.size))
        slabs, first, count, steps = [], 0, 0, []
        for width in self.widths:
            begin = 0
            while begin < width:
                end = min(width, begin + most - count)
                steps.append((slice(begin, end), slice(count, count + end - begin)))
                begin, count = end, count + end - begin
                if count == most:
                    slabs.append(self._slab(slice(first, first + count), steps, heads))
                    first, count, steps = first + count, 0, []
        if steps:
            slabs.append(self._slab(slice(first, first + count), steps, heads))
        return slabs

    def _slab(self, chunks: slice, steps: list[tuple[slice, slice]], heads: int) -> Slab:
        position = torch.arange(self.size, device=self.begins.device)
        padding = position >= self.counts[chunks, None]
        token = (self.begins[chunks, None] + position).masked_fill_(padding, 0)
        index = token[:, None] * heads + torch.arange(heads, device=token.device)[:, None]
        padded = bool(padding.any())
        return Slab(steps, index, padding[:, None].expand(index.shape) if padded else None)
