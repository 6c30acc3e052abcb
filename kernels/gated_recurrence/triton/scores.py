"""Computation within each chunk: its decayed queries and keys, and the scores between its tokens.

    before_i = sum_{t <= i} g_t,  after_i = sum_{t > i} g_t                   (triton/decays.py)
    x~_i = scale x_i exp(before_i)      reads the state at the chunk's start
    y^_j = y_j exp(after_j)             token j's contribution to the state at the chunk's end
    A_ij = scale sum_d x_id y_jd exp(before_id - before_jd),  j <= i

One program computes one chunk of one head of x. With a gate per key channel x is q and y is k; with one per value
channel x is the output's gradient and y is v. The scans that follow need no gates inside a chunk.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gated_recurrence.triton.decays import (
    AFTER,
    CENTRED,
    CHUNK,
    LARGEST_WEAK,
    LEVEL,
    LEVELS_OF_OPEN,
    LEVELS_OF_OPEN_IN_HALVES,
    MOST_LEVELS,
    UNTIL,
    bounded,
    fewest_levels,
    in_log2,
    matrix,
    neighbours,
    same_block,
    sum_matrices,
    weighted_sums,
)
from kernels.gated_recurrence.triton.plan import FIELDS, RUN, Plan
from kernels.launching import on_grid
from kernels.rounding import cdiv


@dataclass(frozen=True)
class Chunks:
    """Results of `decay_chunks`.

    x, y: decayed, [num_chunks, heads, 64, D rounded up to 16], 0 for missing tokens. scores: [num_chunks, Hx, 64, 64].
    total: [num_chunks, Hy, D rounded up] float32, log2 of the product of all gates; middle: of the gates in the first
    half. levels: [num_chunks, Hy] int32, 0 for weak chunks (triton/decays.py).

    x, y and scores are bfloat16 for bfloat16 inputs, otherwise float32. x and scores are None if not requested.
    """

    x: Tensor | None
    y: Tensor
    scores: Tensor | None
    total: Tensor
    middle: Tensor
    levels: Tensor


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory per program; without a GPU those of Ada, the smallest."""
    if device.type != "cuda":
        return 99 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def padded(size: int) -> int:
    """Return the stored width of an axis: a multiple of 16, as matrix instructions need."""
    return cdiv(size, 16) * 16


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of decayed tensors, for which float16 has too small a range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def precision(dtype: torch.dtype) -> str:
    """Return `input_precision` of float32 products: three TF32 products for float16 inputs, full for float32."""
    return "tf32x3" if dtype == torch.float16 else "ieee"


def launch_options(dtype: torch.dtype) -> dict[str, int]:
    """Return num_warps, and num_stages for loops without their own: the scans' over a group, unrolled for bfloat16.

    float32 products are unrolled into single multiplications, and compile time grows with their number: with twice the
    threads, full float32 needs half the code per thread.
    """
    return {"num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 3 if dtype == torch.bfloat16 else 1}


def strides_in_units(x: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of batch, time and heads in units of 16 bytes if possible, and the elements per unit.

    Hence the compiler knows the alignment without specializing on the strides.
    """
    unit = 16 // x.element_size()
    strides = x.stride()[:3]
    if any(stride % unit for stride in strides) or x.data_ptr() % 16:
        unit = 1
    return *(stride // unit for stride in strides), unit


def tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles [1, 1, rows, columns] of x [N, heads, any rows, D]; elements outside read as 0."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def decay_chunks(x: Tensor | None, y: Tensor, log_decay: Tensor, plan: Plan, scale: float) -> Chunks:
    """Compute decayed x and y and their scores for every chunk.

    x: [B, T, Hx, D], or None if only y and the totals are needed. y: [B, T, Hy, D]. log_decay: [B, T, Hy, D] float32.
    """
    heads_y, width = y.shape[2], padded(y.shape[3])
    heads_x = heads_y if x is None else x.shape[2]
    dtype = stored_dtype(y.dtype)
    chunks = Chunks(
        None if x is None else y.new_empty(plan.chunks.shape[0], heads_x, CHUNK, width, dtype=dtype),
        y.new_empty(plan.chunks.shape[0], heads_y, CHUNK, width, dtype=dtype),
        None if x is None else y.new_empty(plan.chunks.shape[0], heads_x, CHUNK, CHUNK, dtype=dtype),
        y.new_empty(plan.chunks.shape[0], heads_y, width, dtype=torch.float32),
        y.new_empty(plan.chunks.shape[0], heads_y, width, dtype=torch.float32),
        y.new_empty(plan.chunks.shape[0], heads_y, dtype=torch.int32),
    )
    x_strides = (0, 0, 0, 1) if x is None else strides_in_units(x)
    y_strides, gate_strides = strides_in_units(y), strides_in_units(log_decay)
    in_bfloat16 = dtype == torch.bfloat16
    # Slices of 64 channels fit into the registers of four warps, the warps that 64 rows of a product occupy. float32
    # products are unrolled: narrow slices keep compilation to seconds.
    block = 64 if in_bfloat16 else 16
    slices = cdiv(width, block)
    # Separate kernels for weak and strong chunks: a common one would need the registers of both.
    for strong in (False, True):
        on_grid(_decay_chunks, (heads_x, cdiv(plan.chunks.shape[0], RUN if strong else 1)))(
            x, y, log_decay, chunks.x, chunks.y, chunks.scores, chunks.total, chunks.middle, chunks.levels,
            sum_matrices(y.device), plan.chunks, plan.chunks.shape[0], scale, heads_x // heads_y, *x_strides[:3],
            *y_strides[:3], *gate_strides[:3],
            X_UNIT=x_strides[3], Y_UNIT=y_strides[3], GATE_UNIT=gate_strides[3], WIDTH=y.shape[3], STORED=width,
            BLOCK=block, SLICES=slices, STRONG=strong, IN_HALVES=in_bfloat16, PRECISION=precision(y.dtype), CHUNK=CHUNK,
            MOST_LEVELS=MOST_LEVELS, LEVELS_OF_OPEN=LEVELS_OF_OPEN_IN_HALVES if in_bfloat16 else LEVELS_OF_OPEN,
            FIELDS=FIELDS, RUN=RUN,
            NUM_STAGES=3 if in_bfloat16 and not strong and shared_memory(y.device) >= 2**17 else 1,
            **launch_options(y.dtype),
        )  # fmt: skip
    return chunks


@triton.jit(
    do_not_specialize=[
        "num_chunks", "group", "x_stride_b", "x_stride_t", "x_stride_h", "y_stride_b", "y_stride_t", "y_stride_h",
        "g_stride_b", "g_stride_t", "g_stride_h",
    ]
)  # fmt: skip
def _decay_chunks(
    x_in, y_in, gates, x_out, y_out, scores_out, total_out, middle_out, levels_out, matrices, chunks,
    num_chunks, scale, group,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h, g_stride_b, g_stride_t, g_stride_h,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
    STRONG: tl.constexpr, IN_HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, MOST_LEVELS: tl.constexpr, LEVELS_OF_OPEN: tl.constexpr, FIELDS: tl.constexpr,
    RUN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    heads_x = tl.num_programs(0)
    head_y, heads_y = head // group, heads_x // group
    leads = head % group == 0
    if STRONG:
        # Strong chunks are rare: few programs search for them, each in a run of chunks.
        first_chunk = tl.program_id(1).to(tl.int64) * RUN
        of_run = first_chunk + tl.arange(0, RUN)
        found = tl.load(levels_out + of_run * heads_y + head_y, mask=of_run < num_chunks, other=0)
        if tl.max(found, 0) == 0:
            return
        last_chunk = tl.minimum(first_chunk + RUN, num_chunks)
    else:
        first_chunk = tl.program_id(1).to(tl.int64)
        last_chunk = first_chunk + 1
    for chunk in range(first_chunk, last_chunk):
        line = chunks + chunk * FIELDS
        row, begin = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64)
        count = tl.load(line + 3)
        index_x, index_y = chunk * heads_x + head, chunk * heads_y + head_y
        wanted = count > 0
        if STRONG:
            wanted = wanted & (tl.load(levels_out + index_y) > 0)
        if wanted:
            x_base = x_in
            if x_in is not None:
                x_base = x_in + (row * x_stride_b + begin * x_stride_t + head * x_stride_h) * X_UNIT
            y_base = y_in + (row * y_stride_b + begin * y_stride_t + head_y * y_stride_h) * Y_UNIT
            gate_base = gates + (row * g_stride_b + begin * g_stride_t + head_y * g_stride_h) * GATE_UNIT
            decay_chunk: tl.constexpr = _decay_strong_chunk if STRONG else _decay_chunk
            decay_chunk(
                x_base, y_base, gate_base, x_out, y_out, scores_out, total_out, middle_out, levels_out, matrices,
                scale, leads, count, index_x, index_y, x_stride_t * X_UNIT, y_stride_t * Y_UNIT, g_stride_t * GATE_UNIT,
                WIDTH, STORED, BLOCK, SLICES, STRONG, IN_HALVES, PRECISION, CHUNK, MOST_LEVELS, LEVELS_OF_OPEN,
                NUM_STAGES,
            )  # fmt: skip


@triton.jit(noinline=True)
def _decay_strong_chunk(
    x_in, y_in, gates, x_out, y_out, scores_out, total_out, middle_out, levels_out, matrices, scale, leads,
    count, index_x, index_y, x_stride, y_stride, g_stride,
    WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
    STRONG: tl.constexpr, IN_HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, MOST_LEVELS: tl.constexpr, LEVELS_OF_OPEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Run `_decay_chunk` as a call: inlined into the loop, addresses would occupy registers between chunks."""
    _decay_chunk(
        x_in, y_in, gates, x_out, y_out, scores_out, total_out, middle_out, levels_out, matrices, scale,
        leads, count, index_x, index_y, x_stride, y_stride, g_stride, WIDTH, STORED, BLOCK, SLICES,
        STRONG, IN_HALVES, PRECISION, CHUNK, MOST_LEVELS, LEVELS_OF_OPEN, NUM_STAGES,
    )  # fmt: skip


@triton.jit
def _decay_chunk(
    x_in, y_in, gates, x_out, y_out, scores_out, total_out, middle_out, levels_out, matrices, scale, leads,
    count, index_x, index_y, x_stride, y_stride, g_stride,
    WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
    STRONG: tl.constexpr, IN_HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, MOST_LEVELS: tl.constexpr, LEVELS_OF_OPEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and its number of levels. The weak kernel stores only that and sums for a strong chunk."""
    token = tl.arange(0, CHUNK)
    levels = 0
    held = token < count
    row, column = token[:, None], token[None, :]
    stored_dtype = y_out.dtype.element_ty
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for number in tl.range(0, SLICES, num_stages=NUM_STAGES):
        channel = number * BLOCK + tl.arange(0, BLOCK)
        mask = held[:, None] & (channel < WIDTH)[None, :]
        y = tl.load(y_in + token[:, None] * y_stride + channel[None, :], mask=mask, other=0.0)
        if x_in is not None:
            x = tl.load(x_in + token[:, None] * x_stride + channel[None, :], mask=mask, other=0.0)
        g = in_log2(tl.load(gates + token[:, None] * g_stride + channel[None, :], mask=mask, other=0.0))
        total = tl.sum(g, 0)
        if STRONG:
            faint = bounded(g, IN_HALVES)
            needed = fewest_levels(matrices, faint, row, column, IN_HALVES, MOST_LEVELS, LEVELS_OF_OPEN)
            levels = tl.maximum(levels, needed)
            exp_before = tl.exp2(weighted_sums(matrix(matrices, UNTIL, row, column), g, IN_HALVES))
            exp_after = tl.exp2(weighted_sums(matrix(matrices, AFTER, row, column), g, IN_HALVES))
            centred = weighted_sums(matrix(matrices, CENTRED + needed, row, column), faint, IN_HALVES)
            grow, shrink = tl.exp2(centred), tl.exp2(-centred)
        else:
            centred = weighted_sums(matrix(matrices, CENTRED, row, column), g, IN_HALVES)
            middle = tl.sum(tl.where(row < CHUNK // 2, g, 0.0), 0)
            # The limit shrinks with the tokens: one strong gate among few would lose its gradient in the others' sums.
            a_token = LARGEST_WEAK / (CHUNK // 2)
            first, second = tl.minimum(count, CHUNK // 2), tl.maximum(count - CHUNK // 2, 0)
            excess = tl.maximum(-middle - a_token * first, middle - total - a_token * second)
            levels = tl.maximum(levels, (tl.max(excess, 0) > 0).to(tl.int32))
            grow, shrink = tl.exp2(centred), tl.exp2(-centred)
            exp_before, exp_after = grow * tl.exp2(middle)[None, :], shrink * tl.exp2(total - middle)[None, :]
            if leads:
                tl.store(middle_out + index_y * STORED + channel, middle, mask=channel < STORED)
        if leads:
            tl.store(total_out + index_y * STORED + channel, total, mask=channel < STORED)
        if x_in is not None:
            inside = row >= column
            if STRONG:
                inside = inside & same_block(row, column, CHUNK >> needed)
                for level in tl.range(0, needed, num_stages=1):
                    size = (CHUNK // 2) >> level
                    decay = tl.exp2(weighted_sums(matrix(matrices, LEVEL + level, row, column), faint, IN_HALVES))
                    level_scores = tl.dot(
                        (x * decay).to(stored_dtype),
                        tl.trans((y * decay).to(stored_dtype)),
                        input_precision=PRECISION,
                    )
                    scores += tl.where((row > column) & neighbours(row, column, size), level_scores, 0.0)
            block_scores = tl.dot(
                (x * grow).to(stored_dtype), tl.trans((y * shrink).to(stored_dtype)), input_precision=PRECISION
            )
            scores += tl.where(inside, block_scores, 0.0)
        stored = (channel < STORED)[None, :]
        if not STRONG:
            stored = stored & (levels == 0)  # another launch stores strong chunks
        tile = token[:, None] * STORED + channel[None, :]
        if leads:
            tl.store(y_out + index_y * (CHUNK * STORED) + tile, (y * exp_after).to(stored_dtype), mask=stored)
        if x_in is not None:
            decayed = (x * (exp_before * scale)).to(stored_dtype)
            tl.store(x_out + index_x * (CHUNK * STORED) + tile, decayed, mask=stored)
    if leads:
        tl.store(levels_out + index_y, levels)
    if x_in is not None:
        tile = index_x * (CHUNK * CHUNK) + row * CHUNK + column
        if STRONG:
            tl.store(scores_out + tile, (scores * scale).to(stored_dtype))
        else:
            tl.store(scores_out + tile, (scores * scale).to(stored_dtype), mask=(row < CHUNK) & (levels == 0))
