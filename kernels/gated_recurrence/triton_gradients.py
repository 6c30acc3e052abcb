"""Gradients of what decays, and of the gates, chunk by chunk from the states and their gradients.

With P_ij = scale w_i . z_j for j <= i, over a chunk's tokens, S the state at its start and dS the gradient at its end:

    dx_i = sum_{j <= i} P_ij y_j exp(before_i - before_j) + scale exp(before_i) (w_i S^T)
    dy_j = sum_{i >= j} P_ij x_i exp(before_i - before_j) + exp(after_j) (z_j dS^T)

A gate g_t lies between all pairs i >= t > j, the tokens i >= t and the state before, the tokens j < t and the state
after, and the two states:

    dg_t = sum_{i >= t > j} (pairs' part) + sum_{i >= t} x_i dx_i(state's part) + sum_{j < t} y_j dy_j(state's part)
           + exp(total) sum_e S dS

Pairs' parts follow from x_i dx_i and y_j dy_j by the transposes of the sums of triton_decays.py. i = j has no gate
between, and is left out of them.

With x, y, z, w = q, k, v and the output's gradient these are dq, dk and dlog_decay for gates on the key axis. For gates
on the value axis x, y, z, w are the output's gradient, v, k and q: dx is then the output itself, and dy is dv.

One program computes one chunk of one head of y, for a slice of the decaying axis.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton_decays import (
    CLOSED,
    between_neighbours,
    centred_sums,
    count_levels,
    in_log2,
    level_sums,
    ones,
    weighted_sums,
)
from kernels.gated_recurrence.triton_plan import CHUNK, CHUNK_FIELDS, Plan
from kernels.gated_recurrence.triton_scores import padded, stored_dtype, strides_in_units


def gradients(
    x: Tensor | None,
    y: Tensor,
    z: Tensor,
    w: Tensor,
    log_decay: Tensor,
    states: Tensor,
    grad_states: Tensor | None,
    plan: Plan,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [B, T, Hx, D], dy [B, T, Hy, D] and the gradient of log_decay, float32; dx alone without x and grad_states.

    x: [B, T, Hx, D]. y: [B, T, Hy, D]. z: [B, T, Hy, E]. w: [B, T, Hx, E]. log_decay: [B, T, Hy, D] or [B, T, Hy].
    states, grad_states: [num_chunks, Hy, D stored, E].
    """
    batch, length, heads_y, width = y.shape
    heads_x, width_e = w.shape[2:]
    per_head = log_decay.ndim == 3
    block, num_warps = _tile(width, y.dtype)
    slices = triton.cdiv(width, block)
    dx = y.new_empty(batch, length, heads_x, width)
    dy = grad_gates = None
    if x is not None:
        dy = torch.empty_like(y, memory_format=torch.contiguous_format)
        grad_gates = y.new_empty(batch, length, heads_y, slices if per_head else width, dtype=torch.float32)
    gates = log_decay[..., None] if per_head else log_decay
    parts = triton.cdiv(width_e, 128 if y.dtype == torch.bfloat16 else 32)
    strides = [strides_in_units(t) if t is not None else (0, 0, 0, 1) for t in (x, y, z, w, gates)]
    _gradients[(slices, heads_y, plan.num_chunks)](
        x,
        y,
        z,
        w,
        gates,
        states,
        grad_states,
        dx,
        dy,
        grad_gates,
        plan.chunks,
        scale,
        *(stride for four in strides for stride in four[:3]),
        length,
        X_UNIT=strides[0][3],
        Y_UNIT=strides[1][3],
        Z_UNIT=strides[2][3],
        W_UNIT=strides[3][3],
        GATE_UNIT=strides[4][3],
        GROUP=heads_x // heads_y,
        WIDTH=width,
        STORED=padded(width),
        BLOCK=block,
        WIDTH_E=width_e,
        BLOCK_E=max(16, triton.next_power_of_2(triton.cdiv(width_e, parts))),
        PARTS=parts,
        PER_HEAD=per_head,
        IN_HALVES=stored_dtype(y.dtype) == torch.bfloat16,
        PRECISION="tf32" if y.dtype == torch.float16 else "ieee",
        CHUNK=CHUNK,
        HALVINGS=CHUNK.bit_length() - 1,
        CHUNK_FIELDS=CHUNK_FIELDS,
        num_warps=num_warps,
        num_stages=1,
    )
    if per_head and grad_gates is not None:
        grad_gates = grad_gates.sum(3)
    return dx, dy, grad_gates


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Channels of a slice, and warps. float32 is there for tests."""
    largest = max(16, triton.next_power_of_2(width))
    return min(largest, 64 if dtype == torch.bfloat16 else 32), 4


@triton.jit
def _tokens(base, stride, held, column, width: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, BLOCK] of a tensor whose tokens are `stride` units apart."""
    address = base + tl.arange(0, CHUNK)[:, None] * (stride * UNIT) + column[None, :]
    return tl.load(address, mask=held[:, None] & (column < width)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "g_b", "g_t", "g_h",
        "length",
    ]
)  # fmt: skip
def _gradients(
    x_in, y_in, z_in, w_in, gates, states, grad_states, dx_out, dy_out, grad_gates_out, chunk_table, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PER_HEAD: tl.constexpr, IN_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, HALVINGS: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    batch_row = tl.load(chunk_table + chunk * CHUNK_FIELDS).to(tl.int64)
    begin = tl.load(chunk_table + chunk * CHUNK_FIELDS + 1).to(tl.int64)
    count = tl.load(chunk_table + chunk * CHUNK_FIELDS + 2)
    if count <= 0:
        return
    GRADIENTS: tl.constexpr = x_in is not None
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = part * BLOCK + tl.arange(0, BLOCK)
    state_base = (chunk * heads + head) * (STORED * WIDTH_E)
    first = batch_row * length + begin

    y = _tokens(y_in + (batch_row * y_b + begin * y_t + head * y_h) * Y_UNIT, y_t, held, channel, WIDTH, Y_UNIT, CHUNK)
    y = y.to(tl.float32)
    gate_base = gates + (batch_row * g_b + begin * g_t + head * g_h) * GATE_UNIT
    levels = 0
    if PER_HEAD:
        g = in_log2(tl.load(gate_base + token * (g_t * GATE_UNIT), mask=held, other=0.0))
        before = tl.cumsum(g, 0)
        exp_before = tl.exp2(before)[:, None]
        exp_after = tl.exp2(tl.cumsum(g, 0, reverse=True) - g)[:, None]
        exp_total = tl.exp2(tl.sum(g, 0))
    else:
        g = in_log2(_tokens(gate_base, g_t, held, channel, WIDTH, GATE_UNIT, CHUNK))
        centred = weighted_sums(centred_sums(row, column, CHUNK), g, IN_HALVES)
        levels = count_levels(centred, g, CHUNK, HALVINGS)
        total = tl.sum(g, 0)
        middle = tl.sum(tl.where(row < CHUNK // 2, g, 0.0), 0)
        before_sums = centred + middle[None, :]
        after_sums = (total - middle)[None, :] - centred
        if levels > 0:
            before_sums = weighted_sums(ones(column <= row), g, IN_HALVES)
            after_sums = weighted_sums(ones(column > row), g, IN_HALVES)
            centred = weighted_sums(centred_sums(row, column, CHUNK >> levels), g, IN_HALVES)
        exp_before = tl.exp2(before_sums)
        exp_after = tl.exp2(after_sums)
        exp_total = tl.exp2(total)
        grow = tl.exp2(centred)
        shrink = tl.exp2(-centred)
        y_shrunk = (y * shrink).to(dtype)
    size = CHUNK >> levels
    inside = (row > column) & (row // size == column // size)
    inside_transposed = (row < column) & (row // size == column // size)

    z_base = z_in + (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    if GRADIENTS:
        dy = tl.zeros((CHUNK, BLOCK), tl.float32)
        edge = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            mask = (channel < STORED)[:, None] & (e < WIDTH_E)[None, :]
            tile = state_base + channel[:, None] * WIDTH_E + e[None, :]
            grad_state = tl.load(grad_states + tile, mask=mask, other=0.0)
            state = tl.load(states + tile, mask=mask, other=0.0)
            z = _tokens(z_base, z_t, held, e, WIDTH_E, Z_UNIT, CHUNK).to(dtype)
            dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
            edge += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        dy = dy * exp_after
        edge = edge * exp_total
        kept = y * dy
        read = tl.zeros((CHUNK, BLOCK), tl.float32)
        pairs_gates = tl.zeros((CHUNK, BLOCK), tl.float32)
        level_gates = tl.zeros((CHUNK, BLOCK), tl.float32)

    for member in tl.static_range(GROUP):
        head_x = head * GROUP + member
        w_base = w_in + (batch_row * w_b + begin * w_t + head_x * w_h) * W_UNIT
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
        dx = tl.zeros((CHUNK, BLOCK), tl.float32)
        diagonal = tl.zeros((CHUNK,), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            w = _tokens(w_base, w_t, held, e, WIDTH_E, W_UNIT, CHUNK).to(dtype)
            z = _tokens(z_base, z_t, held, e, WIDTH_E, Z_UNIT, CHUNK).to(dtype)
            mask = (channel < STORED)[:, None] & (e < WIDTH_E)[None, :]
            state = tl.load(states + state_base + channel[:, None] * WIDTH_E + e[None, :], mask=mask, other=0.0)
            dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
            pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
            if GRADIENTS:
                # Not the transpose of `pairs`: some compilers make a wrong product of a transposed accumulator.
                transposed = tl.dot(z, tl.trans(w), transposed, input_precision=PRECISION)
            diagonal += tl.sum(w.to(tl.float32) * z.to(tl.float32), 1)
        dx = dx * (exp_before * scale)
        diagonal = diagonal * scale
        if GRADIENTS:
            x_base = x_in + (batch_row * x_b + begin * x_t + head_x * x_h) * X_UNIT
            x = _tokens(x_base, x_t, held, channel, WIDTH, X_UNIT, CHUNK).to(tl.float32)
            read += x * dx
        if PER_HEAD:
            decay = tl.where(inside, tl.exp2(before[:, None] - before[None, :]) * scale, 0.0)
            part_x = tl.dot((pairs * decay).to(dtype), y.to(dtype), input_precision=PRECISION)
        else:
            pairs = (pairs * scale).to(dtype)
            nothing = tl.zeros_like(pairs)
            part_x = tl.dot(tl.where(inside, pairs, nothing), y_shrunk, input_precision=PRECISION) * grow
        dx += part_x
        if GRADIENTS:
            if PER_HEAD:
                decay = tl.where(inside_transposed, tl.exp2(before[None, :] - before[:, None]) * scale, 0.0)
                part_y = tl.dot((transposed * decay).to(dtype), x.to(dtype), input_precision=PRECISION)
            else:
                transposed = (transposed * scale).to(dtype)
                x_grown = (x * grow).to(dtype)
                part_y = tl.dot(tl.where(inside_transposed, transposed, nothing), x_grown, input_precision=PRECISION)
                part_y = part_y * shrink
            dy += part_y
            pairs_gates += x * part_x - y * part_y
        if not PER_HEAD:
            for level in range(levels):
                block = (CHUNK // 2) >> level
                decay = tl.exp2(weighted_sums(level_sums(row, column, block), g, IN_HALVES))
                chosen = tl.where(between_neighbours(row, column, block), pairs, nothing)
                part_x = tl.dot(chosen, (y * decay).to(dtype), input_precision=PRECISION) * decay
                dx += part_x
                if GRADIENTS:
                    chosen = tl.where(between_neighbours(column, row, block), transposed, nothing)
                    part_y = tl.dot(chosen, (x * decay).to(dtype), input_precision=PRECISION) * decay
                    dy += part_y
                    of_level = x * part_x + y * part_y
                    level_gates += weighted_sums(level_sums(column, row, block), of_level, IN_HALVES)
        dx += diagonal[:, None] * y
        address = dx_out + ((first + token[:, None]) * (heads * GROUP) + head_x) * WIDTH + channel[None, :]
        inner = held[:, None] & (channel < WIDTH)[None, :]
        tl.store(address, dx.to(dx_out.dtype.element_ty), mask=inner)
        if GRADIENTS:
            dy += diagonal[:, None] * x

    if GRADIENTS:
        inner = held[:, None] & (channel < WIDTH)[None, :]
        tile = ((first + token[:, None]) * heads + head) * WIDTH + channel[None, :]
        tl.store(dy_out + tile, dy.to(dy_out.dtype.element_ty), mask=inner)
        if PER_HEAD:
            of_token = tl.sum(read + pairs_gates, 1)
            kept_of_token = tl.sum(kept, 1)
            result = tl.cumsum(of_token, 0, reverse=True) + tl.cumsum(kept_of_token, 0) - kept_of_token
            result = tl.where(g > CLOSED, result + tl.sum(edge, 0), 0.0)
            address = grad_gates_out + ((first + token) * heads + head) * tl.num_programs(0) + part
            tl.store(address, result, mask=held)
        else:
            if levels > 0:
                result = level_gates + weighted_sums(ones(row <= column), read, IN_HALVES)
                result += weighted_sums(ones(column < row), kept, IN_HALVES)
                result += weighted_sums(centred_sums(column, row, size), pairs_gates, IN_HALVES)
            else:
                result = weighted_sums(ones(row <= column), read + pairs_gates - kept, IN_HALVES)
                result += tl.sum(kept, 0)[None, :]
            result = tl.where(g > CLOSED, result + edge[None, :], 0.0)
            tl.store(grad_gates_out + tile, result, mask=inner)
