"""Plan of the chunked form: segments, their blocks of queries, and the keys that each block reads.

A segment is a run of queries and the keys they can see: a packed document, or a batch row between kv_start and kv_end.
Short rows with equal bounds are batched along the head axis. The queries are the segment's last positions, so every
query sees at least its own key, and padding and documents need no mask. Within a segment a block of queries at
[first, last) reads the keys [keys_from, last): later keys are in the future; earlier keys are, in every head, outside
the window, before a closed gate, or under the pruning threshold.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kernels.forgetting_attention.reference import CLOSED_GATE

# Most keys of a group of batched rows: batching copies the keys, which pays only while they are few.
KEYS_TOGETHER = 2048
# Largest decay within a block for which a float32 bias relative to the block's middle is accurate to 4e-6.
STEEP_DECAY = 128.0


@dataclass(frozen=True)
class Segment:
    """Queries [query_from, query_to) and keys [key_from, key_to) of the batch rows `rows`, their ends aligned."""

    rows: slice
    query_from: int
    query_to: int
    key_from: int
    key_to: int

    @property
    def num_keys(self) -> int:
        return self.key_to - self.key_from

    @property
    def offset(self) -> int:
        """Position of the first query among the segment's keys."""
        return self.num_keys - (self.query_to - self.query_from)


def segments(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    chunk_area: int,
) -> Iterator[Segment]:
    """Yield all segments that have a query. A query in none of them sees no key.

    Args:
        chunk_area: bound on queries x keys x rows of batched rows; keys x rows is bounded by KEYS_TOGETHER.
    """
    batch, num_queries = q.shape[:2]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        for begin, end in pairwise(bounds):
            if begin < end:
                yield Segment(slice(0, 1), begin, end, begin, end)
        return
    starts = [0] * batch if kv_start is None else kv_start.tolist()
    ends = [k.shape[1]] * batch if kv_end is None else kv_end.tolist()
    row = 0
    for (start, end), alike in groupby(zip(starts, ends, strict=True)):
        last_row = row + len(list(alike))
        query_from = max(0, num_queries - (end - start))
        if query_from < num_queries:
            together = max(1, min(chunk_area // (num_queries - query_from), KEYS_TOGETHER) // (end - start))
            for first_row in range(row, last_row, together):
                rows = slice(first_row, min(last_row, first_row + together))
                yield Segment(rows, query_from, num_queries, start, end)
        row = last_row


@dataclass(frozen=True)
class Decay:
    """Decay along one segment, for each head and key; H is Hq times the segment's rows.

    Attributes:
        total: [H, n] float64, the sum of the log gates up to each key, without closed gates; the bias of a score is
            `total_i - total_j`. float64 because sums grow with the length and their differences are small.
        first: [H, n] int64, the first key that the query at each position sees; None if no gate is closed.
    """

    total: Tensor
    first: Tensor | None

    @classmethod
    def of(cls, segment: Segment, log_forget: Tensor, cumulative: bool) -> "Decay":
        gates = log_forget[segment.rows, segment.key_from : segment.key_to].mT.flatten(0, 1).double().contiguous()
        if cumulative:
            return cls(gates, None)
        closed = gates < CLOSED_GATE
        if not closed.any():
            return cls(gates.cumsum(-1), None)
        position = torch.arange(segment.num_keys, device=gates.device)
        first = torch.where(closed, position, 0).cummax(-1).values
        return cls(gates.masked_fill(closed, 0.0).cumsum(-1), first)

    def gradient_of_gates(self, grad_total: Tensor) -> Tensor:
        """Return the reverse cumulative sum of the gradient of `total` [H, n], within the segment.

        Exactly 0 for a closed gate (f dL/df at f = 0) and for the segment's first gate, which decays no token.
        """
        grad_gates = grad_total.double().flip(-1).cumsum(-1).flip(-1)
        grad_gates[:, 0] = 0.0
        if self.first is not None:
            closed = self.first == torch.arange(self.first.shape[-1], device=self.first.device)
            grad_gates.masked_fill_(closed, 0.0)
        return grad_gates


@dataclass(frozen=True)
class Block:
    """Queries at positions [first, last) of a segment's keys, reading the keys [keys_from, last).

    Attributes:
        masked_until: keys before it are hidden from some query in some head.
        steep: the decay within the block is too strong for one float32 reference for all rows.
    """

    first: int
    last: int
    keys_from: int
    masked_until: int
    steep: bool


def blocks(
    segment: Segment, query_chunk: int, window: int | None, decay: Decay | None, prune_threshold: Tensor | None
) -> list[Block]:
    """Return blocks of nearly equal size, at most `query_chunk`, that cover the segment's queries.

    Args:
        prune_threshold: [H] float64, `log eps - 2 U`. A key is skipped if in every head its largest bias over the block
            is under that minus log(number of keys) (arXiv 2504.06949).
    """
    num_queries = segment.num_keys - segment.offset
    count = -(-num_queries // query_chunk)
    bounds = [segment.offset + index * num_queries // count for index in range(count + 1)]
    firsts, lasts = bounds[:-1], bounds[1:]
    keys_from = [0] * count if window is None else [max(0, first - window + 1) for first in firsts]
    masked_until = [0] * count if window is None else [last - window for last in lasts]
    steep = [False] * count
    if decay is not None:
        at_first, at_last = decay.total[:, firsts], decay.total[:, [last - 1 for last in lasts]]
        steep = ((at_first - at_last) > STEEP_DECAY).any(0).tolist()
        if decay.first is not None:
            keys_from = list(map(max, keys_from, decay.first[:, firsts].amin(0).tolist()))
            masked_until = list(map(max, masked_until, decay.first[:, [last - 1 for last in lasts]].amax(0).tolist()))
        if prune_threshold is not None:
            # The bias is largest for the block's first query and rises with the key, so the skipped keys are a prefix.
            smallest_kept = prune_threshold[:, None] - math.log(segment.num_keys) - at_first
            skipped = torch.searchsorted(-decay.total, smallest_kept)
            keys_from = list(map(max, keys_from, skipped.amin(0).tolist()))
    return [Block(*block) for block in zip(firsts, lasts, keys_from, masked_until, steep, strict=True)]
