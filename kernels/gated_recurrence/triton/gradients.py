"""Gradients of the decayed inputs and of the gates, chunk by chunk, from the states and their gradients.

With P_ij = scale w_i . z_j for j <= i, over a chunk's tokens, S the state at its start and dS the gradient at its end:

    dx_i = sum_{j <= i} P_ij y_j exp(before_i - before_j) + scale exp(before_i) (w_i S^T)
    dy_j = sum_{i >= j} P_ij x_i exp(before_i - before_j) + exp(after_j) (z_j dS^T)

A gate g_t decays all pairs i >= t > j, the reads of the start state S by tokens i >= t, the writes of tokens j < t
to the end state, and the start state itself:

    dg_t = sum_{i >= t > j} (pairs' part) + sum_{i >= t} x_i dx_i(state's part) + sum_{j < t} y_j dy_j(state's part)
           + exp(total) sum_e S dS

The pairs' parts follow from x_i dx_i and y_j dy_j by the transposed sums of triton/decays.py.

With x, y, z, w = q, k, v and the output's gradient these are dq, dk and dlog_decay for gates on the key axis. For gates
on the value axis x, y, z, w are the output's gradient, v, k and q: dx is then the output itself, and dy is dv.

This file computes weak chunks, from the decayed x~ = scale x exp(before) and y^ = y exp(after). With the sums `middle`
and `total` of a channel's log gates, and c = before - middle,

    dx = exp(c) U,    U = scale exp(middle) w S^T + exp(middle - total) P y^
    dy = exp(-c) V,   V = exp(total - middle) z dS^T + exp(-middle) / scale P^T x~
    dg_t = sum_{i >= t} (exp(-middle) / scale x~_i U_i - exp(middle - total) y^_i V_i) + sum_j y^_j z_j dS^T + ...

so that no input of a product needs an exponential. The terms i = j, which no gate decays, cancel exactly. One
program computes one chunk of one head of y, for a slice of the decaying axis.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton.decays import CENTRED, CHUNK, FROM, in_log2, matrix, sum_matrices, weighted_sums
from kernels.gated_recurrence.triton.gradients_strong import diagonal_of, gradients_of_strong, tile_of_state, tokens_of
from kernels.gated_recurrence.triton.plan import FIELDS, RUN, Plan
from kernels.gated_recurrence.triton.scores import (
    Chunks,
    launch_options,
    padded,
    precision,
    stored_dtype,
    strides_in_units,
)
from kernels.launching import on_grid
from kernels.rounding import cdiv, next_power_of_2


def gradients(
    chunks: Chunks,
    x: Tensor | None,
    y: Tensor,
    z: Tensor,
    w: Tensor,
    log_decay: Tensor,
    states: Tensor,
    grad_states: Tensor | None,
    plan: Plan,
    scale: float,
    *,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx [B, T, Hx, D], dy [B, T, Hy, D], dlog_decay in float32; only dx without x and grad_states.

    chunks: for x and y. x: [B, T, Hx, D]. y: [B, T, Hy, D]. z: [B, T, Hy, E]. w: [B, T, Hx, E]. log_decay:
    [B, T, Hy, D]. states, grad_states: [num_chunks, Hy, D stored, E]. dx_dtype: y's when None.
    """
    batch, length, heads_y, width = y.shape
    heads_x, width_e = w.shape[2:]
    in_bfloat16 = stored_dtype(y.dtype) == torch.bfloat16
    # float32 products are unrolled: tiles of twice the width multiply the compile time.
    block = 64 if in_bfloat16 else 16
    slices = cdiv(width, block)
    parts = cdiv(width_e, 128 if in_bfloat16 else 16)
    dx = y.new_empty(batch, length, heads_x, width, dtype=dx_dtype or y.dtype)
    dy = grad_gates = None
    if x is not None:
        dy = torch.empty_like(y, memory_format=torch.contiguous_format)
        grad_gates = y.new_empty(batch, length, heads_y, width, dtype=torch.float32)
    results = dx, dy, grad_gates
    grid = slices, heads_y, plan.chunks.shape[0]
    sizes = {
        "GROUP": heads_x // heads_y,
        "WIDTH": width,
        "STORED": padded(width),
        "BLOCK": block,
        "WIDTH_E": width_e,
        "BLOCK_E": max(16, next_power_of_2(cdiv(width_e, parts))),
        "PARTS": parts,
        "IN_HALVES": in_bfloat16,
        "PRECISION": precision(y.dtype),
        "CHUNK": CHUNK,
        "FIELDS": FIELDS,
        **launch_options(y.dtype),
    }
    x_strides, y_strides, z_strides, w_strides, gate_strides = (
        (0, 0, 0, 1) if t is None else strides_in_units(t) for t in (x, y, z, w, log_decay)
    )
    inner = (*z_strides[:3], *w_strides[:3], *gate_strides[:3], length)
    units = {"Z_UNIT": z_strides[3], "W_UNIT": w_strides[3], "GATE_UNIT": gate_strides[3]}
    decayed_x = None if x is None else chunks.x
    on_grid(_gradients_of_weak, grid)(
        decayed_x, chunks.y, z, w, log_decay, chunks.total, chunks.middle, chunks.levels, states, grad_states,
        *results, sum_matrices(y.device), plan.chunks, scale, *inner, **units, **sizes,
    )  # fmt: skip
    outer = (*x_strides[:3], *y_strides[:3], *inner)
    units |= {"X_UNIT": x_strides[3], "Y_UNIT": y_strides[3]}
    # With narrow heads, launching programs without work costs more than queueing chunks in fewer programs.
    run = RUN if width <= 64 else 1
    for of_x, of_y in [(True, False)] if x is None else [(True, False), (False, True)]:
        on_grid(gradients_of_strong, (slices, heads_y, cdiv(plan.chunks.shape[0], run)))(
            x, y, z, w, log_decay, chunks.levels, states, grad_states, *results, sum_matrices(y.device), plan.chunks,
            plan.chunks.shape[0], scale, *outer, OF_X=of_x, OF_Y=of_y, RUN=run, **units, **sizes,
        )  # fmt: skip
    return dx, dy, grad_gates


@triton.jit(
    do_not_specialize=["z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "g_b", "g_t", "g_h", "length"]
)  # fmt: skip
def _gradients_of_weak(
    x_in, y_in, z_in, w_in, gates, totals, middles, levels, states, grad_states, dx_out, dy_out, grad_gates_out,
    matrices, chunks, scale, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
    IN_HALVES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    line = chunks + chunk * FIELDS
    batch_row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    index = chunk * heads + head
    if count <= 0:
        return
    if tl.load(levels + index) > 0:
        return
    GRADIENTS: tl.constexpr = x_in is not None
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = part * BLOCK + tl.arange(0, BLOCK)
    mask = held[:, None] & (channel < WIDTH)[None, :]
    first = batch_row * length + begin
    z_base = z_in + (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    gates += (batch_row * g_b + begin * g_t + head * g_h) * GATE_UNIT
    states += index * (STORED * WIDTH_E)
    total = tl.load(totals + index * STORED + channel, mask=channel < STORED, other=0.0)
    middle = tl.load(middles + index * STORED + channel, mask=channel < STORED, other=0.0)
    g = in_log2(tokens_of(gates, g_t * GATE_UNIT, token, held, channel, WIDTH))
    centred = weighted_sums(matrix(matrices, CENTRED, row, column), g, IN_HALVES)
    y = _decayed(y_in + index * (CHUNK * STORED), row, channel, STORED, BLOCK)
    if GRADIENTS:
        grad_states += index * (STORED * WIDTH_E)
        dy = tl.zeros((CHUNK, BLOCK), tl.float32)
        between = tl.zeros((BLOCK, BLOCK), tl.float32)
        for number in tl.range(0, PARTS, num_stages=1):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            z = tokens_of(z_base, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            grad_state = tile_of_state(grad_states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
            # Diagonal of a product: elementwise, two tiles would fill the registers.
            between = tl.dot(state, tl.trans(grad_state), between, input_precision=PRECISION)
        of_channel = diagonal_of(between, BLOCK) * tl.exp2(total) + tl.sum(y * dy, 0)
        dy = dy * tl.exp2(total - middle)[None, :]
        of_token = tl.zeros((CHUNK, BLOCK), tl.float32)

    for member in tl.range(0, GROUP, num_stages=1):
        head_x = head * GROUP + member
        w_base = w_in + (batch_row * w_b + begin * w_t + head_x * w_h) * W_UNIT
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
        dx = tl.zeros((CHUNK, BLOCK), tl.float32)
        for number in tl.range(0, PARTS, num_stages=1):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            w = tokens_of(w_base, w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            z = tokens_of(z_base, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
            pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
            if GRADIENTS:
                # Not the transpose of `pairs`: some compilers multiply a transposed accumulator wrongly.
                transposed = tl.dot(z, tl.trans(w), transposed, input_precision=PRECISION)
        if GRADIENTS:
            pairs = tl.where(row >= column, pairs * scale, 0.0).to(dtype)
            near = tl.dot(pairs, y, input_precision=PRECISION)
        else:
            # i = j without rounding: it dominates for few tokens. With gradients there are too few registers for this.
            own = tl.sum(tl.where(row == column, pairs, 0.0), 1)[:, None] * scale
            pairs = tl.where(row > column, pairs * scale, 0.0).to(dtype)
            near = tl.dot(pairs, y, input_precision=PRECISION) + own * y
        dx = dx * (tl.exp2(middle) * scale)[None, :] + near * tl.exp2(middle - total)[None, :]
        if GRADIENTS:
            x = _decayed(x_in + (index * GROUP + member) * (CHUNK * STORED), row, channel, STORED, BLOCK)
            of_token += x * dx
            transposed = tl.where(row <= column, transposed * scale, 0.0).to(dtype)
            far = tl.dot(transposed, x, input_precision=PRECISION)
            dy += far * (tl.exp2(-middle) / scale)[None, :]
        dx = dx * tl.exp2(centred)
        address = dx_out + ((first + token[:, None]) * (heads * GROUP) + head_x) * WIDTH + channel[None, :]
        tl.store(address, dx.to(dx_out.dtype.element_ty), mask=mask)

    if GRADIENTS:
        of_token = of_token * (tl.exp2(-middle) / scale)[None, :] - y * dy * tl.exp2(middle - total)[None, :]
        tile = ((first + token[:, None]) * heads + head) * WIDTH + channel[None, :]
        tl.store(dy_out + tile, (dy * tl.exp2(-centred)).to(dy_out.dtype.element_ty), mask=mask)
        result = weighted_sums(matrix(matrices, FROM, row, column), of_token, IN_HALVES) + of_channel[None, :]
        tl.store(grad_gates_out + tile, result, mask=mask)


@triton.jit
def _decayed(base, row, channel, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Load [CHUNK, BLOCK] of a decayed tile from triton/scores.py."""
    address = base + row * STORED + channel[None, :]
    if STORED % BLOCK == 0:
        return tl.load(address)
    return tl.load(address, mask=(channel < STORED)[None, :], other=0.0)
