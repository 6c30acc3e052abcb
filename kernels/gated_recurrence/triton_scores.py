"""What each chunk does by itself: its decayed queries and keys, and the scores between its tokens.

    before_i = sum_{t <= i} g_t,  after_i = sum_{t > i} g_t                   (triton_decays.py)
    x~_i = scale x_i exp(before_i)      reads the state at the chunk's start
    y^_j = y_j exp(after_j)             is what token j adds to the state at the chunk's end
    A_ij = scale sum_d x_id y_jd exp(before_id - before_jd),  j <= i

One program computes one chunk of one head of x. With a gate per key channel x is q and y is k; with one per value
channel x is the output's gradient and y is v. The scans that follow then know nothing of gates inside a chunk.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton_decays import (
    between_neighbours,
    centred_sums,
    count_levels,
    in_log2,
    level_sums,
    ones,
    weighted_sums,
)
from kernels.gated_recurrence.triton_plan import CHUNK, CHUNK_FIELDS, Plan


@dataclass(frozen=True)
class Chunks:
    """x and y: decayed, [num_chunks, heads, 64, D rounded up to 16], 0 where there is no token; scores
    [num_chunks, Hx, 64, 64]; total [num_chunks, Hy, D rounded up, or 1] float32, the sum of all gates in log 2.

    x, y and scores are bfloat16 for bfloat16 inputs, otherwise float32. x and scores are None where not asked for.
    """

    x: Tensor | None
    y: Tensor
    scores: Tensor | None
    total: Tensor


def padded(size: int) -> int:
    """Width of an axis as it is stored: in whole 16s, which matrix instructions need."""
    return triton.cdiv(size, 16) * 16


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of decayed tensors. float16 has not the range for them."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def strides_in_units(x: Tensor) -> tuple[int, int, int, int]:
    """The strides of batch, time and heads in units of 16 bytes where that is possible, and how many elements a unit
    has: so the compiler knows the alignment without knowing the strides."""
    unit = 16 // x.element_size()
    strides = x.stride()[:3]
    if any(stride % unit for stride in strides) or x.data_ptr() % 16:
        unit = 1
    return *(stride // unit for stride in strides), unit


def decay_chunks(x: Tensor | None, y: Tensor, log_decay: Tensor, plan: Plan, scale: float) -> Chunks:
    """Decayed x and y and their scores, for every chunk.

    x: [B, T, Hx, D], or None where y and the totals are all that is wanted. y: [B, T, Hy, D]. log_decay: [B, T, Hy, D]
    or [B, T, Hy] float32.
    """
    heads_y, width = y.shape[2], padded(y.shape[3])
    heads_x = heads_y if x is None else x.shape[2]
    per_head = log_decay.ndim == 3
    dtype = stored_dtype(y.dtype)
    chunks = Chunks(
        None if x is None else y.new_empty(plan.num_chunks, heads_x, CHUNK, width, dtype=dtype),
        y.new_empty(plan.num_chunks, heads_y, CHUNK, width, dtype=dtype),
        None if x is None else y.new_empty(plan.num_chunks, heads_x, CHUNK, CHUNK, dtype=dtype),
        y.new_empty(plan.num_chunks, heads_y, 1 if per_head else width, dtype=torch.float32),
    )
    gates = log_decay[..., None] if per_head else log_decay
    x_strides = (0, 0, 0, 1) if x is None else strides_in_units(x)
    y_strides, gate_strides = strides_in_units(y), strides_in_units(gates)
    slices = triton.cdiv(width, 128)
    block = triton.next_power_of_2(triton.cdiv(width, slices))
    _decay_chunks[(heads_x, plan.num_chunks)](
        x,
        y,
        gates,
        chunks.x,
        chunks.y,
        chunks.scores,
        chunks.total,
        plan.chunks,
        scale,
        heads_x // heads_y,
        *x_strides[:3],
        *y_strides[:3],
        *gate_strides[:3],
        X_UNIT=x_strides[3],
        Y_UNIT=y_strides[3],
        GATE_UNIT=gate_strides[3],
        WIDTH=y.shape[3],
        STORED=width,
        BLOCK=block,
        SLICES=slices,
        PER_HEAD=per_head,
        IN_HALVES=dtype == torch.bfloat16,
        PRECISION="tf32" if y.dtype == torch.float16 else "ieee",
        CHUNK=CHUNK,
        HALVINGS=CHUNK.bit_length() - 1,
        CHUNK_FIELDS=CHUNK_FIELDS,
        num_warps=8 if block >= 128 else 4,
    )
    return chunks


@triton.jit(
    do_not_specialize=[
        "group", "x_stride_b", "x_stride_t", "x_stride_h", "y_stride_b", "y_stride_t", "y_stride_h",
        "g_stride_b", "g_stride_t", "g_stride_h",
    ]
)  # fmt: skip
def _decay_chunks(
    x_in, y_in, gates, x_out, y_out, scores_out, total_out, chunk_table, scale, group,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h, g_stride_b, g_stride_t, g_stride_h,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
    PER_HEAD: tl.constexpr, IN_HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, HALVINGS: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads_x = tl.num_programs(0)
    head_y, heads_y = head // group, heads_x // group
    leads = head % group == 0
    row = tl.load(chunk_table + chunk * CHUNK_FIELDS).to(tl.int64)
    begin = tl.load(chunk_table + chunk * CHUNK_FIELDS + 1).to(tl.int64)
    count = tl.load(chunk_table + chunk * CHUNK_FIELDS + 2)
    if count <= 0:
        return
    token = tl.arange(0, CHUNK)
    held = token < count
    row_index, column_index = token[:, None], token[None, :]
    stored_dtype = y_out.dtype.element_ty
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    y_base = y_in + ((row * y_stride_b + begin * y_stride_t) + head_y * y_stride_h) * Y_UNIT
    gate_base = gates + ((row * g_stride_b + begin * g_stride_t) + head_y * g_stride_h) * GATE_UNIT
    if x_out is not None:
        x_base = x_in + ((row * x_stride_b + begin * x_stride_t) + head * x_stride_h) * X_UNIT
    if PER_HEAD:
        g = in_log2(tl.load(gate_base + token * g_stride_t * GATE_UNIT, mask=held, other=0.0))
        before = tl.cumsum(g, 0)
        after = tl.cumsum(g, 0, reverse=True) - g
        if leads:
            tl.store(total_out + chunk * heads_y + head_y, tl.sum(g, 0))
    for number in tl.static_range(SLICES):
        channel = number * BLOCK + tl.arange(0, BLOCK)
        mask = held[:, None] & (channel < WIDTH)[None, :]
        y = tl.load(y_base + token[:, None] * (y_stride_t * Y_UNIT) + channel[None, :], mask=mask, other=0.0)
        y = y.to(tl.float32)
        if x_out is not None:
            x = tl.load(x_base + token[:, None] * (x_stride_t * X_UNIT) + channel[None, :], mask=mask, other=0.0)
            x = x.to(tl.float32) * scale
        if PER_HEAD:
            exp_before = tl.exp2(before)[:, None]
            exp_after = tl.exp2(after)[:, None]
            if x_out is not None:
                scores += tl.dot(
                    x.to(stored_dtype), tl.trans(y.to(stored_dtype)), input_precision=PRECISION
                )
        else:
            g = tl.load(gate_base + token[:, None] * (g_stride_t * GATE_UNIT) + channel[None, :], mask=mask, other=0.0)
            g = in_log2(g)
            centred = weighted_sums(centred_sums(row_index, column_index, CHUNK), g, IN_HALVES)
            levels = count_levels(centred, g, CHUNK, HALVINGS)
            total = tl.sum(g, 0)
            middle = tl.sum(tl.where(row_index < CHUNK // 2, g, 0.0), 0)
            before_sums = centred + middle[None, :]
            after_sums = (total - middle)[None, :] - centred
            if leads:
                address = total_out + (chunk * heads_y + head_y) * STORED + channel
                tl.store(address, total, mask=channel < STORED)
            if levels > 0:
                before_sums = weighted_sums(ones(column_index <= row_index), g, IN_HALVES)
                after_sums = weighted_sums(ones(column_index > row_index), g, IN_HALVES)
                centred = weighted_sums(centred_sums(row_index, column_index, CHUNK >> levels), g, IN_HALVES)
            if x_out is not None:
                for level in range(levels):
                    size = (CHUNK // 2) >> level
                    decay = tl.exp2(weighted_sums(level_sums(row_index, column_index, size), g, IN_HALVES))
                    level_scores = tl.dot(
                        (x * decay).to(stored_dtype), tl.trans((y * decay).to(stored_dtype)), input_precision=PRECISION
                    )
                    scores += tl.where(between_neighbours(row_index, column_index, size), level_scores, 0.0)
                inside = row_index // (CHUNK >> levels) == column_index // (CHUNK >> levels)
                block_scores = tl.dot(
                    (x * tl.exp2(centred)).to(stored_dtype),
                    tl.trans((y * tl.exp2(-centred)).to(stored_dtype)),
                    input_precision=PRECISION,
                )
                scores += tl.where(inside & (row_index >= column_index), block_scores, 0.0)
            exp_before = tl.exp2(before_sums)
            exp_after = tl.exp2(after_sums)
        stored = (channel < STORED)[None, :]
        tile = token[:, None] * STORED + channel[None, :]
        if leads:
            address = y_out + (chunk * heads_y + head_y) * (CHUNK * STORED)
            tl.store(address + tile, (y * exp_after).to(stored_dtype), mask=stored)
        if x_out is not None:
            address = x_out + (chunk * heads_x + head) * (CHUNK * STORED)
            tl.store(address + tile, (x * exp_before).to(stored_dtype), mask=stored)
    if x_out is not None:
        if PER_HEAD:
            decay = tl.exp2(before[:, None] - before[None, :])
            scores = tl.where(row_index >= column_index, scores * decay, 0.0)
        address = scores_out + (chunk * heads_x + head) * (CHUNK * CHUNK)
        tl.store(address + row_index * CHUNK + column_index, scores.to(stored_dtype))
