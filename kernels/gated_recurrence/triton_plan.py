"""Which tokens each chunk and each segment holds: tables that the kernels read, made on the device.

A sequence is a row of the batch or a packed document. It is cut into chunks of 64 tokens and into segments of whole
chunks; the last of each may be short. A sequence without tokens has one segment of no chunks, for its state.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
FIRST, LAST = 1, 2  # flags of a segment: of its sequence's segments
CHUNK_FIELDS, SEGMENT_FIELDS = 3, 6


@dataclass(frozen=True)
class Plan:
    """chunks [num_chunks, 3] int32: row, first token, number of tokens; 0 tokens where there is no such chunk.

    segments [num_segments, 6] int32: sequence, row, first token, number of tokens, first chunk, flags; flags are 0 and
    the number of tokens is -1 where there is no such segment.
    offsets: [2, num_sequences + 1] int32, the first chunk and the first segment of each sequence.
    in_segments: whether any sequence may have more than one segment.
    """

    chunks: Tensor
    segments: Tensor
    offsets: Tensor
    num_sequences: int
    in_segments: bool

    @property
    def num_chunks(self) -> int:
        return self.chunks.shape[0]

    @property
    def num_segments(self) -> int:
        return self.segments.shape[0]


def make_plan(batch: int, length: int, cu_seqlens: Tensor | None, segment: int, device: torch.device) -> Plan:
    """The tables for batch rows of `length` tokens, or documents packed in one row. segment: tokens, whole chunks.

    Documents' numbers are not known to the host: tables have as many lines as there can be.
    """
    if cu_seqlens is None:
        sequences = batch
        chunks, segments = (batch * triton.cdiv(length, size) for size in (CHUNK, segment))
        segments = max(segments, batch)
        offsets = torch.empty(0, dtype=torch.int32, device=device)
    else:
        sequences = cu_seqlens.shape[0] - 1
        chunks, segments = (triton.cdiv(length, size) + sequences for size in (CHUNK, segment))
        lengths = cu_seqlens.diff()
        per_sequence = torch.stack(
            [(lengths + (CHUNK - 1)) // CHUNK, ((lengths + (segment - 1)) // segment).clamp(min=1)]
        )
        offsets = F.pad(per_sequence.cumsum(1, dtype=torch.int32), (1, 0))
    chunk_table = torch.empty(chunks, CHUNK_FIELDS, dtype=torch.int32, device=device)
    segment_table = torch.empty(segments, SEGMENT_FIELDS, dtype=torch.int32, device=device)
    block = 256
    _fill_tables[(triton.cdiv(max(chunks, segments), block),)](
        chunk_table,
        segment_table,
        cu_seqlens,
        offsets,
        sequences,
        length,
        chunks,
        segments,
        segment,
        (sequences + 1).bit_length(),
        CHUNK=CHUNK,
        FIRST=FIRST,
        LAST=LAST,
        CHUNK_FIELDS=CHUNK_FIELDS,
        SEGMENT_FIELDS=SEGMENT_FIELDS,
        BLOCK=block,
    )
    return Plan(chunk_table, segment_table, offsets, sequences, segment < length)


@triton.jit
def _last_at_or_before(index, offsets, num_sequences, num_steps):
    """The last sequence whose offset is at most index; num_sequences beyond the end."""
    low = tl.zeros_like(index)
    high = tl.full(index.shape, 0, tl.int32) + num_sequences + 1
    for _ in range(num_steps):
        middle = (low + high) // 2
        below = tl.load(offsets + tl.minimum(middle, num_sequences)) <= index
        low = tl.where(below & (middle <= num_sequences), middle, low)
        high = tl.where(below & (middle <= num_sequences), high, middle)
    return low


@triton.jit(do_not_specialize=["num_sequences", "length", "num_chunks", "num_segments", "segment", "num_steps"])
def _fill_tables(
    chunk_table, segment_table, cu_seqlens, offsets,
    num_sequences, length, num_chunks, num_segments, segment, num_steps,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr, SEGMENT_FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if cu_seqlens is None:
        per_row = tl.maximum(tl.cdiv(length, CHUNK), 1)
        row = index // per_row
        begin = (index % per_row) * CHUNK
        count = tl.minimum(length - begin, CHUNK)
    else:
        row = tl.zeros_like(index)
        sequence = _last_at_or_before(index, offsets, num_sequences, num_steps)
        held = (sequence < num_sequences) & (index < num_chunks)
        sequence = tl.where(held, sequence, 0)
        number = index - tl.load(offsets + sequence)
        start = tl.load(cu_seqlens + sequence)
        begin = start + number * CHUNK
        count = tl.where(held, tl.minimum(tl.load(cu_seqlens + sequence + 1) - begin, CHUNK), 0)
        begin = tl.where(held, begin, 0)
    line = chunk_table + index * CHUNK_FIELDS
    mask = index < num_chunks
    tl.store(line, row, mask=mask)
    tl.store(line + 1, begin, mask=mask)
    tl.store(line + 2, count, mask=mask)

    if cu_seqlens is None:
        per_row = tl.maximum(tl.cdiv(length, segment), 1)
        sequence = index // per_row
        row = sequence
        number = index % per_row
        begin = number * segment
        rest = length - begin
        first_chunk = sequence * tl.cdiv(length, CHUNK) + begin // CHUNK
        held = index < num_segments
    else:
        segment_offsets = offsets + num_sequences + 1
        sequence = _last_at_or_before(index, segment_offsets, num_sequences, num_steps)
        held = (sequence < num_sequences) & (index < num_segments)
        sequence = tl.where(held, sequence, 0)
        row = tl.zeros_like(index)
        number = index - tl.load(segment_offsets + sequence)
        begin = tl.load(cu_seqlens + sequence) + number * segment
        rest = tl.load(cu_seqlens + sequence + 1) - begin
        first_chunk = tl.load(offsets + sequence) + number * (segment // CHUNK)
    flags = tl.where(number == 0, FIRST, 0) + tl.where(rest <= segment, LAST, 0)
    line = segment_table + index * SEGMENT_FIELDS
    mask = index < num_segments
    tl.store(line, sequence, mask=mask)
    tl.store(line + 1, row, mask=mask)
    tl.store(line + 2, begin, mask=mask)
    tl.store(line + 3, tl.where(held, tl.minimum(rest, segment), -1), mask=mask)
    tl.store(line + 4, first_chunk, mask=mask)
    tl.store(line + 5, tl.where(held, flags, 0), mask=mask)
