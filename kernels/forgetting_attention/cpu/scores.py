"""The scores of one segment, block by block.

Scores are kept in base 2: on CPUs exp2 is several times faster than exp, and does not slow down on -inf or on nearly
zero results.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.forgetting_attention.cpu.blocks import Block, Decay, Segment, blocks

QUERY_CHUNK = 128
KEY_CHUNK = 512
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def stack(x: Tensor, heads: int) -> Tensor:
    """View x [H, rows, n] as [heads, H / heads * rows, n]: heads that share a key head become rows of one matrix."""
    return x.view(heads, -1, x.shape[-1])


class SegmentScores:
    """One segment's q, k, v (views), its decay, and the arithmetic on its blocks, in `dtype`.

    A segment of several batch rows batches them along the head axis: H, Hk, Hv here are heads times rows.
    """

    def __init__(
        self,
        segment: Segment,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_forget: Tensor | None,
        scale: float,
        window: int | None,
        cumulative: bool,
    ):
        self.segment, self.scale, self.window = segment, scale, window
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        num_rows = segment.rows.stop - segment.rows.start
        self.num_heads, self.key_heads, self.value_heads = (num_rows * x.shape[2] for x in (q, k, v))
        self.q = q[segment.rows]
        self.k, self.v = (x[segment.rows, segment.key_from : segment.key_to] for x in (k, v))
        self.decay = None if log_forget is None else Decay.of(segment, log_forget, cumulative)

    def blocks(self, prune_threshold: Tensor | None) -> list[Block]:
        if prune_threshold is not None:
            prune_threshold = prune_threshold.repeat(self.num_heads // prune_threshold.shape[0])
        return blocks(self.segment, QUERY_CHUNK, self.window, self.decay, prune_threshold)

    def rows(self, block: Block) -> slice:
        """Return the block's rows of q."""
        begin = self.segment.query_from - self.segment.offset
        return slice(begin + block.first, begin + block.last)

    def key_chunks(self, block: Block) -> Iterator[slice]:
        """Yield chunks of keys from the diagonal backwards; the first covers the whole diagonal.

        Few queries (decoding) get long chunks.
        """
        size = max(KEY_CHUNK, QUERY_CHUNK * KEY_CHUNK // (block.last - block.first))
        for end in range(block.last, block.keys_from, -size):
            yield slice(max(block.keys_from, end - size), end)

    def heads_first(self, x: Tensor) -> Tensor:
        """Return x [batch rows, n, heads, D] as [H, n, D] in `dtype`, a view if possible."""
        return x.transpose(1, 2).flatten(0, 1).to(self.dtype)

    def heads_last(self, x: Tensor) -> Tensor:
        """Invert `heads_first`; returns a view."""
        return x.unflatten(0, (self.q.shape[0], -1)).transpose(1, 2)

    def queries(self, block: Block) -> Tensor:
        """Return the block's queries [Hk, H / Hk * n, Dk], times scale and log2 e."""
        queries = self.heads_first(self.q[:, self.rows(block)]).contiguous()
        return stack(queries * (self.scale * LOG2_E), self.key_heads)

    def keys(self, keys: slice) -> Tensor:
        return self.heads_first(self.k[:, keys])

    def values(self, keys: slice) -> Tensor:
        return self.heads_first(self.v[:, keys])

    def weighted_values(self, weights: Tensor, keys: slice) -> Tensor:
        """Return weights [H, rows, n] times values, [H, rows, Dv]."""
        return torch.bmm(stack(weights, self.value_heads), self.values(keys)).view(*weights.shape[:2], -1)

    def grad_weights(self, grad_rows: Tensor, keys: slice) -> Tensor:
        """Return dP = dO V^T, [H, rows, n]."""
        return torch.bmm(stack(grad_rows, self.value_heads), self.values(keys).mT).view(*grad_rows.shape[:2], -1)

    def _reference(self, block: Block) -> Tensor:
        """Return the middle of the block's decay, [H, 1] float64, so that float32 suffices at both ends."""
        total = self.decay.total
        return (total[:, block.first : block.first + 1] + total[:, block.last - 1 : block.last]) / 2

    def logits(self, queries: Tensor, block: Block, keys: slice) -> Tensor:
        """Return the logits [H, rows, n] in base 2, -inf where a query may not see a key."""
        num_rows = block.last - block.first
        logits = torch.bmm(queries, self.keys(keys).mT).view(self.num_heads, num_rows, -1)
        if self.decay is not None:
            total = self.decay.total
            if block.steep:
                bias = total[:, block.first : block.last, None] - total[:, None, keys]
            else:
                bias = (self._reference(block) - total[:, keys])[:, None]
            logits += (bias * LOG2_E).to(self.dtype)
        return self._hide(logits, block, keys)

    def natural(self, lse: Tensor, block: Block) -> Tensor:
        """Convert lse [H, rows], the log2 of the sums of exp2 of `logits`, to the natural log-sum-exp of the scores."""
        lse = lse * LN_2
        if self.decay is None or block.steep:
            return lse
        return lse + (self.decay.total[:, block.first : block.last] - self._reference(block)).to(self.dtype)

    def _hide(self, logits: Tensor, block: Block, keys: slice) -> Tensor:
        if (begin := max(keys.start, block.first + 1)) < keys.stop:
            row = torch.arange(block.first, block.last, device=logits.device)[:, None]
            future = torch.arange(begin, keys.stop, device=logits.device) > row
            logits[..., begin - keys.start :].masked_fill_(future, -torch.inf)
        if (end := min(keys.stop, block.masked_until)) > keys.start:
            key = torch.arange(keys.start, end, device=logits.device)
            logits[..., : end - keys.start].masked_fill_(key < self._first_seen(block)[..., None], -torch.inf)
        return logits

    def _first_seen(self, block: Block) -> Tensor:
        """Return the first key inside the window and not before the last closed gate, [1 or H, rows]."""
        first = torch.zeros(1, block.last - block.first, dtype=torch.int64, device=self.q.device)
        if self.window is not None:
            first = torch.arange(block.first, block.last, device=self.q.device)[None] - (self.window - 1)
        if self.decay is not None and self.decay.first is not None:
            first = torch.maximum(first, self.decay.first[:, block.first : block.last])
        return first
