"""Tables of the tokens of each chunk and segment, built on the device and read by the kernels.

A sequence is a row of the batch or a packed document. It is cut into chunks of 64 tokens, and consecutive chunks form
segments, through which one program carries a state. The last chunk and the last segment may be short. An empty sequence
has one segment without chunks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.launching import on_grid
from kernels.rounding import cdiv

FIRST, LAST = 1, 2  # flags of a segment: the first or last of its sequence
FIELDS = 6
RUN = 4  # chunks that one program searches for strong ones
LEAST_SEGMENT = 256  # tokens, if a sequence is cut


@dataclass(frozen=True)
class Plan:
    """Tables segments, chunks [lines, 6] int32: sequence, row, first token, number of tokens, first chunk, flags.

    Unused lines have 0 as flags and -1 as number of tokens.

    offsets: [2, num_sequences + 1] int32, the first segment and the first chunk of each sequence; empty for batch rows.
    in_segments: whether a sequence may have more than one segment.
    """

    segments: Tensor
    chunks: Tensor
    offsets: Tensor
    num_sequences: int
    in_segments: bool


def make_plan(batch: int, length: int, cu_seqlens: Tensor | None, segment: int, device: torch.device) -> Plan:
    """Build the tables for batch rows of `length` tokens, or packed documents. segment: tokens, in whole chunks.

    The host does not know the documents' lengths: the tables have the largest possible number of lines.
    """
    sizes = segment, CHUNK
    if cu_seqlens is None:
        sequences = batch
        counts = [batch * max(cdiv(length, size), 1) for size in sizes]
        offsets = torch.empty(0, dtype=torch.int32, device=device)
    else:
        sequences = cu_seqlens.shape[0] - 1
        counts = [cdiv(length, size) + sequences for size in sizes]
        lengths = cu_seqlens.diff()
        pieces = torch.stack([(lengths + (size - 1)) // size for size in sizes])
        pieces[0].clamp_(min=1)
        offsets = F.pad(pieces.cumsum(1, dtype=torch.int32), (1, 0))
    tables = [torch.empty(count, FIELDS, dtype=torch.int32, device=device) for count in counts]
    block = 256
    on_grid(_fill_tables, (cdiv(max(counts), block),))(
        *tables,
        cu_seqlens,
        offsets,
        sequences,
        length,
        *counts,
        segment,
        (sequences + 1).bit_length(),
        CHUNK=CHUNK,
        FIRST=FIRST,
        LAST=LAST,
        FIELDS=FIELDS,
        BLOCK=block,
    )
    return Plan(*tables, offsets, sequences, segment < length)


@triton.jit
def _last_at_or_before(index, offsets, num_sequences, num_steps):
    """Return the last sequence whose offset is at most index; num_sequences beyond the end."""
    low = tl.zeros_like(index)
    high = tl.full(index.shape, 0, tl.int32) + num_sequences + 1
    for _ in range(num_steps):
        middle = (low + high) // 2
        below = tl.load(offsets + tl.minimum(middle, num_sequences)) <= index
        low = tl.where(below & (middle <= num_sequences), middle, low)
        high = tl.where(below & (middle <= num_sequences), high, middle)
    return low


@triton.jit(do_not_specialize=["num_sequences", "length", "num_segments", "num_chunks", "segment", "num_steps"])
def _fill_tables(
    segments, chunks, cu_seqlens, offsets, num_sequences, length, num_segments, num_chunks, segment, num_steps,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_chunks = offsets + num_sequences + 1
    _fill_table(
        segments, index, num_segments, segment, cu_seqlens, of_chunks, offsets,
        num_sequences, length, num_steps, CHUNK, FIRST, LAST, FIELDS,
    )  # fmt: skip
    _fill_table(
        chunks, index, num_chunks, CHUNK, cu_seqlens, of_chunks, of_chunks,
        num_sequences, length, num_steps, CHUNK, FIRST, LAST, FIELDS,
    )  # fmt: skip


@triton.jit
def _fill_table(
    table, index, num_lines, size, cu_seqlens, chunk_offsets, piece_offsets, num_sequences, length, num_steps,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write one line for each piece of `size` tokens."""
    if cu_seqlens is None:
        per_row = tl.maximum(tl.cdiv(length, size), 1)
        sequence = index // per_row
        row = sequence
        number = index % per_row
        begin = number * size
        rest = length - begin
        first_chunk = sequence * tl.cdiv(length, CHUNK) + begin // CHUNK
        held = index < num_lines
    else:
        sequence = _last_at_or_before(index, piece_offsets, num_sequences, num_steps)
        held = (sequence < num_sequences) & (index < num_lines)
        sequence = tl.where(held, sequence, 0)
        row = tl.zeros_like(index)
        number = index - tl.load(piece_offsets + sequence)
        begin = tl.load(cu_seqlens + sequence) + number * size
        rest = tl.load(cu_seqlens + sequence + 1) - begin
        first_chunk = tl.load(chunk_offsets + sequence) + number * (size // CHUNK)
    flags = tl.where(number == 0, FIRST, 0) + tl.where(rest <= size, LAST, 0)
    line = table + index * FIELDS
    mask = index < num_lines
    tl.store(line, sequence, mask=mask)
    tl.store(line + 1, row, mask=mask)
    tl.store(line + 2, begin, mask=mask)
    tl.store(line + 3, tl.where(held, tl.minimum(rest, size), -1), mask=mask)
    tl.store(line + 4, first_chunk, mask=mask)
    tl.store(line + 5, tl.where(held, flags, 0), mask=mask)
