"""Gradients of what decays, and of the gates, with a gate per head: triton_gradients.py has the mathematics.

The decays between the tokens of a chunk are one matrix D_ij = exp(before_i - before_j), j <= i, whose exponents are not
above 0 whatever the gates, and

    dx = scale exp(before) (.) (w S^T) + (P (.) D) y,    dy = exp(after) (.) (z dS^T) + (P (.) D)^T x
    dg_t = sum_{i >= t} (scale exp(before_i) x_i . (w_i S^T) + pairs' x_i . dx_i - pairs' y_i . dy_i)
           + sum_{j < t} exp(after_j) y_j . (z_j dS^T) + exp(total) sum S dS

where pairs leave out i = j, which no gate lies between: one by one, so that small terms do not drown in large ones that
cancel. One program computes one chunk of one head of y, for a slice of the channels, whose sums are added up
outside.
"""

import triton
import triton.language as tl

from kernels.gated_recurrence.triton_decays import CLOSED, in_log2, sums_until
from kernels.gated_recurrence.triton_gradients_strong import diagonal_of, tile_of_state, tokens_of


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "g_b", "g_t", "g_h",
        "length",
    ]
)  # fmt: skip
def gradients_per_head(
    x_in, y_in, z_in, w_in, gates, states, grad_states, dx_out, dy_out, grad_gates_out, chunks, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, IN_HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    line = chunks + chunk * FIELDS
    batch_row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    if count <= 0:
        return
    x_in += (batch_row * x_b + begin * x_t + head * GROUP * x_h) * X_UNIT
    y_in += (batch_row * y_b + begin * y_t + head * y_h) * Y_UNIT
    z_in += (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    w_in += (batch_row * w_b + begin * w_t + head * GROUP * w_h) * W_UNIT
    gates += (batch_row * g_b + begin * g_t + head * g_h) * GATE_UNIT
    states += (chunk * heads + head) * (STORED * WIDTH_E)
    grad_states += (chunk * heads + head) * (STORED * WIDTH_E)
    first = batch_row * length + begin
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = held[:, None] & (channel < WIDTH)[None, :]

    g = in_log2(tl.load(gates + token * (g_t * GATE_UNIT), mask=held, other=0.0))
    before = sums_until(g, IN_HALVES)
    after = tl.cumsum(g, 0, reverse=True) - g
    dy = tl.zeros((CHUNK, BLOCK), tl.float32)
    between = tl.zeros((BLOCK, BLOCK), tl.float32)
    for number in tl.static_range(PARTS):
        e = number * BLOCK_E + tl.arange(0, BLOCK_E)
        z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
        state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
        grad_state = tile_of_state(grad_states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
        dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
        # As a product, of which the diagonal is wanted: elementwise, two tiles would fill the registers.
        between = tl.dot(state, tl.trans(grad_state), between, input_precision=PRECISION)
    y = tokens_of(y_in, y_t * Y_UNIT, token, held, channel, WIDTH)
    dy = dy * tl.exp2(after)[:, None]
    kept = tl.sum(tl.where(column < row, tl.sum(y * dy, 1)[None, :], 0.0), 1)
    kept += tl.sum(diagonal_of(between, BLOCK), 0) * tl.exp2(tl.sum(g, 0))
    of_token = tl.zeros((CHUNK,), tl.float32)

    for member in tl.static_range(GROUP):
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        dx = tl.zeros((CHUNK, BLOCK), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            w = tokens_of(w_in + member * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
            pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
        pairs = pairs * scale
        diagonal = tl.sum(tl.where(row == column, pairs, 0.0), 1)[:, None]
        decay = tl.exp2(tl.minimum(before[:, None] - before[None, :], 0.0).to(tl.float32))
        pairs = tl.where(row > column, pairs * decay, 0.0).to(dtype)
        dx = dx * (tl.exp2(before.to(tl.float32)) * scale)[:, None]
        dx = tl.dot(pairs, y.to(dtype), dx, input_precision=PRECISION)
        x = tokens_of(x_in + member * (x_h * X_UNIT), x_t * X_UNIT, token, held, channel, WIDTH)
        of_token += tl.sum(x * dx, 1)
        dx += diagonal * y
        head_x = head * GROUP + member
        address = dx_out + ((first + token[:, None]) * (heads * GROUP) + head_x) * WIDTH + channel[None, :]
        tl.store(address, dx.to(dx_out.dtype.element_ty), mask=mask)
        # Not the transpose of `pairs`: some compilers make a wrong product of a transposed accumulator.
        transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            w = tokens_of(w_in + member * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            transposed = tl.dot(z, tl.trans(w), transposed, input_precision=PRECISION)
        decay = tl.exp2(tl.minimum(before[None, :] - before[:, None], 0.0).to(tl.float32)) * scale
        transposed = tl.where(row < column, transposed * decay, 0.0).to(dtype)
        part = tl.dot(transposed, x.to(dtype), input_precision=PRECISION)
        of_token -= tl.sum(y * part, 1)
        dy += part + diagonal * x

    address = dy_out + ((first + token[:, None]) * heads + head) * WIDTH + channel[None, :]
    tl.store(address, dy.to(dy_out.dtype.element_ty), mask=mask)
    result = tl.cumsum(of_token, 0, reverse=True) + kept
    address = grad_gates_out + ((first + token) * heads + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(address, tl.where(g > CLOSED, result, 0.0), mask=held)
