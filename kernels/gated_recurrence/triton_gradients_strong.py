"""Gradients of what decays, and of the gates, for strong chunks and for gates per head.

triton_gradients.py has the mathematics. Strong chunks are taken level by level, as triton_decays.py cuts them; with a
gate per head the decays between tokens are one matrix. Here x and y are as they came: of the decayed ones, strong gates
have left nothing.
"""

import triton
import triton.language as tl

from kernels.gated_recurrence.triton_decays import (
    CLOSED,
    between_neighbours,
    centred_sums,
    in_log2,
    level_sums,
    ones,
    weighted_sums,
)


@triton.jit
def tokens_of(base, stride, position, held, column, width: tl.constexpr):
    """[CHUNK, BLOCK] of a tensor whose tokens are `stride` apart."""
    address = base + position[:, None] * stride + column[None, :]
    return tl.load(address, mask=held[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def tile_of_state(
    base, channel, e, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """[BLOCK, BLOCK_E] of a state [STORED, WIDTH_E]."""
    address = base + channel[:, None] * WIDTH_E + e[None, :]
    if STORED % BLOCK == 0 and WIDTH_E % BLOCK_E == 0:
        return tl.load(address)
    else:
        return tl.load(address, mask=(channel < STORED)[:, None] & (e < WIDTH_E)[None, :], other=0.0)


@triton.jit
def diagonal_of(square, SIZE: tl.constexpr):
    """[SIZE] of a [SIZE, SIZE], by columns."""
    index = tl.arange(0, SIZE)
    return tl.sum(tl.where(index[:, None] == index[None, :], square, 0.0), 0)


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "g_b", "g_t", "g_h",
        "length",
    ]
)  # fmt: skip
def gradients_of_strong(
    x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out, chunks, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PER_HEAD: tl.constexpr, IN_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    line = chunks + chunk * FIELDS
    batch_row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    index = chunk * heads + head
    if count <= 0:
        return
    if not PER_HEAD:
        levels = tl.load(levels_in + index)
        if levels == 0:
            return
    GRADIENTS: tl.constexpr = x_in is not None
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = part * BLOCK + tl.arange(0, BLOCK)
    mask = held[:, None] & (channel < WIDTH)[None, :]
    first = batch_row * length + begin
    y_base = y_in + (batch_row * y_b + begin * y_t + head * y_h) * Y_UNIT
    z_base = z_in + (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    gates += (batch_row * g_b + begin * g_t + head * g_h) * GATE_UNIT
    states += index * (STORED * WIDTH_E)
    after, before = row > column, row < column
    if PER_HEAD:
        g = in_log2(tl.load(gates + token * (g_t * GATE_UNIT), mask=held, other=0.0))
        sums = tl.cumsum(g, 0)
        exp_before = tl.exp2(sums)[:, None]
        exp_after = tl.exp2(tl.cumsum(g, 0, reverse=True) - g)[:, None]
    else:
        g = in_log2(tokens_of(gates, g_t * GATE_UNIT, token, held, channel, WIDTH))
        size = CHUNK >> levels
        same = row // size == column // size
        after, before = after & same, before & same
        centred = weighted_sums(centred_sums(row, column, size), g, IN_HALVES)
        exp_before = tl.exp2(weighted_sums(ones(column <= row), g, IN_HALVES))
        exp_after = tl.exp2(weighted_sums(ones(column > row), g, IN_HALVES))
    if GRADIENTS:
        grad_states += index * (STORED * WIDTH_E)
        dy = tl.zeros((CHUNK, BLOCK), tl.float32)
        between = tl.zeros((BLOCK, BLOCK), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            z = tokens_of(z_base, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            grad_state = tile_of_state(grad_states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
            between = tl.dot(state, tl.trans(grad_state), between, input_precision=PRECISION)
        dy = dy * exp_after
        kept = dy * tokens_of(y_base, y_t * Y_UNIT, token, held, channel, WIDTH)
        # What reads the state gives to the gates before it; pairs, to those between them.
        read = tl.zeros((CHUNK, BLOCK), tl.float32)
        within = tl.zeros((CHUNK, BLOCK), tl.float32)
        crossing = tl.zeros((CHUNK, BLOCK), tl.float32)

    for member in tl.static_range(GROUP):
        head_x = head * GROUP + member
        w_base = w_in + (batch_row * w_b + begin * w_t + head_x * w_h) * W_UNIT
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
        dx = tl.zeros((CHUNK, BLOCK), tl.float32)
        for number in tl.static_range(PARTS):
            e = number * BLOCK_E + tl.arange(0, BLOCK_E)
            w = tokens_of(w_base, w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            z = tokens_of(z_base, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
            pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
            if GRADIENTS:
                # Not the transpose of `pairs`: some compilers make a wrong product of a transposed accumulator.
                transposed = tl.dot(z, tl.trans(w), transposed, input_precision=PRECISION)
        pairs = pairs * scale
        transposed = transposed * scale
        diagonal = tl.sum(tl.where(row == column, pairs, 0.0), 1)[:, None]
        dx = dx * (exp_before * scale)
        y = tokens_of(y_base, y_t * Y_UNIT, token, held, channel, WIDTH)
        if GRADIENTS:
            x_base = x_in + (batch_row * x_b + begin * x_t + head_x * x_h) * X_UNIT
            x = tokens_of(x_base, x_t * X_UNIT, token, held, channel, WIDTH)
            read += x * dx
        if PER_HEAD:
            decay = tl.where(after, tl.exp2(sums[:, None] - sums[None, :]), 0.0)
            part_x = tl.dot((pairs * decay).to(dtype), y.to(dtype), input_precision=PRECISION)
        else:
            pairs, transposed = pairs.to(dtype), transposed.to(dtype)
            nothing = tl.zeros((CHUNK, CHUNK), dtype)
            shrunk = (y * tl.exp2(-centred)).to(dtype)
            part_x = tl.dot(tl.where(after, pairs, nothing), shrunk, input_precision=PRECISION) * tl.exp2(centred)
        dx += part_x + diagonal * y
        if GRADIENTS:
            if PER_HEAD:
                decay = tl.where(before, tl.exp2(sums[None, :] - sums[:, None]), 0.0)
                part_y = tl.dot((transposed * decay).to(dtype), x.to(dtype), input_precision=PRECISION)
            else:
                grown = (x * tl.exp2(centred)).to(dtype)
                part_y = tl.dot(tl.where(before, transposed, nothing), grown, input_precision=PRECISION)
                part_y = part_y * tl.exp2(-centred)
            dy += part_y + diagonal * x
            within += x * part_x - y * part_y
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
                    crossing += weighted_sums(level_sums(column, row, block), of_level, IN_HALVES)
        address = dx_out + ((first + token[:, None]) * (heads * GROUP) + head_x) * WIDTH + channel[None, :]
        tl.store(address, dx.to(dx_out.dtype.element_ty), mask=mask)

    if GRADIENTS:
        tile = ((first + token[:, None]) * heads + head) * WIDTH + channel[None, :]
        tl.store(dy_out + tile, dy.to(dy_out.dtype.element_ty), mask=mask)
        edge = diagonal_of(between, BLOCK) * tl.exp2(tl.sum(g, 0))
        if PER_HEAD:
            kept_of_token = tl.sum(kept, 1)
            result = tl.cumsum(tl.sum(read + within, 1), 0, reverse=True) + tl.sum(edge, 0)
            result += tl.cumsum(kept_of_token, 0) - kept_of_token
            address = grad_gates_out + ((first + token) * heads + head) * tl.num_programs(0) + part
            tl.store(address, tl.where(g > CLOSED, result, 0.0), mask=held)
        else:
            result = crossing + weighted_sums(ones(row <= column), read, IN_HALVES)
            result += weighted_sums(ones(column < row), kept, IN_HALVES)
            result += weighted_sums(centred_sums(column, row, size), within, IN_HALVES)
            result = tl.where(g > CLOSED, result + edge[None, :], 0.0)
            tl.store(grad_gates_out + tile, result, mask=mask)
