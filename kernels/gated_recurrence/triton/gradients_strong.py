"""Gradients of the decayed inputs and the gates in strong chunks: triton/gradients.py has the mathematics.

They are computed level by level, as triton/decays.py divides the chunk. x and y are read without decay: strong gates
would round the decayed ones to 0. x and y have separate launches, because one kernel for both does not fit into the
registers; the second launch adds to the first one's gradient of the gates.
"""

import triton
import triton.language as tl

from kernels.gated_recurrence.triton.decays import (
    AFTER,
    BEFORE,
    CENTRED,
    CENTRED_TRANSPOSED,
    CLOSED,
    FROM,
    LEVEL,
    LEVEL_TRANSPOSED,
    UNTIL,
    bounded,
    in_log2,
    left_out,
    matrix,
    neighbours,
    same_block,
    weighted_sums,
)


@triton.jit
def tokens_of(base, stride, position, held, column, width: tl.constexpr):
    """Load [CHUNK, BLOCK] of a tensor whose tokens are `stride` apart."""
    address = base + position[:, None] * stride + column[None, :]
    return tl.load(address, mask=held[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def tile_of_state(
    base, channel, e, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Load [BLOCK, BLOCK_E] of a state [STORED, WIDTH_E]."""
    address = base + channel[:, None] * WIDTH_E + e[None, :]
    if STORED % BLOCK == 0 and WIDTH_E % BLOCK_E == 0:
        return tl.load(address)
    return tl.load(address, mask=(channel < STORED)[:, None] & (e < WIDTH_E)[None, :], other=0.0)


@triton.jit
def diagonal_of(square, SIZE: tl.constexpr):
    """Return the diagonal [SIZE] of a matrix [SIZE, SIZE], indexed by column."""
    index = tl.arange(0, SIZE)
    return tl.sum(tl.where(index[:, None] == index[None, :], square, 0.0), 0)


@triton.jit
def rough_sums(weights, x, dtype: tl.constexpr):
    """Return weighted sums of x in the precision of dtype."""
    return tl.dot(weights.to(dtype), x.to(dtype), input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "g_b", "g_t", "g_h",
        "length", "num_chunks",
    ]
)  # fmt: skip
def gradients_of_strong(
    x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out, matrices, chunks,
    num_chunks, scale, x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, OF_X: tl.constexpr, OF_Y: tl.constexpr,
    IN_HALVES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    head, first_chunk = tl.program_id(1), tl.program_id(2).to(tl.int64) * RUN
    heads = tl.num_programs(1)
    # Strong chunks are rare: one load decides for the whole run. Levels of unused lines may hold anything.
    of_run = first_chunk + tl.arange(0, RUN)
    found = tl.load(levels_in + of_run * heads + head, mask=of_run < num_chunks, other=0)
    counts = tl.load(chunks + of_run * FIELDS + 3, mask=of_run < num_chunks, other=0)
    if tl.max(tl.where(counts > 0, found, 0), 0) <= 0:
        return
    if RUN == 1:
        chunk = first_chunk
        _of_chunk(
            x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out,
            matrices, chunks, scale, chunk, head, heads,
            x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
            X_UNIT, Y_UNIT, Z_UNIT, W_UNIT, GATE_UNIT, GROUP, WIDTH, STORED, BLOCK, WIDTH_E, BLOCK_E, PARTS,
            OF_X, OF_Y, IN_HALVES, PRECISION, CHUNK, FIELDS,
        )  # fmt: skip
    else:
        for chunk in range(first_chunk, tl.minimum(first_chunk + RUN, num_chunks)):
            is_strong = tl.load(levels_in + chunk * heads + head) > 0
            if is_strong & (tl.load(chunks + chunk * FIELDS + 3) > 0):
                _of_chunk_called(
                    x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out,
                    matrices, chunks, scale, chunk, head, heads,
                    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
                    X_UNIT, Y_UNIT, Z_UNIT, W_UNIT, GATE_UNIT, GROUP, WIDTH, STORED, BLOCK, WIDTH_E, BLOCK_E, PARTS,
                    OF_X, OF_Y, IN_HALVES, PRECISION, CHUNK, FIELDS,
                )  # fmt: skip


@triton.jit(noinline=True)
def _of_chunk_called(
    x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out, matrices, chunks,
    scale, chunk, head, heads, x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, OF_X: tl.constexpr, OF_Y: tl.constexpr,
    IN_HALVES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Run `_of_chunk` as a call: inlined into the loop, hoisted addresses would exceed the registers."""
    _of_chunk(
        x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out,
        matrices, chunks, scale, chunk, head, heads,
        x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
        X_UNIT, Y_UNIT, Z_UNIT, W_UNIT, GATE_UNIT, GROUP, WIDTH, STORED, BLOCK, WIDTH_E, BLOCK_E, PARTS,
        OF_X, OF_Y, IN_HALVES, PRECISION, CHUNK, FIELDS,
    )  # fmt: skip


@triton.jit
def _of_chunk(
    x_in, y_in, z_in, w_in, gates, levels_in, states, grad_states, dx_out, dy_out, grad_gates_out, matrices, chunks,
    scale, chunk, head, heads, x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, g_b, g_t, g_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, OF_X: tl.constexpr, OF_Y: tl.constexpr,
    IN_HALVES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute one chunk of one head of y, for a slice of the decaying axis."""
    index = chunk * heads + head
    levels = tl.load(levels_in + index)
    line = chunks + chunk * FIELDS
    batch_row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    if x_in is not None:
        x_in += (batch_row * x_b + begin * x_t + head * GROUP * x_h) * X_UNIT
    y_in += (batch_row * y_b + begin * y_t + head * y_h) * Y_UNIT
    z_in += (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    w_in += (batch_row * w_b + begin * w_t + head * GROUP * w_h) * W_UNIT
    gates += (batch_row * g_b + begin * g_t + head * g_h) * GATE_UNIT
    states += index * (STORED * WIDTH_E)
    if grad_states is not None:
        grad_states += index * (STORED * WIDTH_E)
    first = batch_row * length + begin
    GRADIENTS: tl.constexpr = x_in is not None
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = held[:, None] & (channel < WIDTH)[None, :]
    after, before = row > column, row < column
    g = in_log2(tokens_of(gates, g_t * GATE_UNIT, token, held, channel, WIDTH))
    size = CHUNK >> levels
    same = same_block(row, column, size)
    after, before = after & same, before & same
    faint = bounded(g, IN_HALVES)
    centred = weighted_sums(matrix(matrices, CENTRED + levels, row, column), faint, IN_HALVES)
    if GRADIENTS:
        dy = tl.zeros((CHUNK, BLOCK), tl.float32)
        # Reads contribute to the gates before them, writes to the gates after them, pairs to the gates between.
        of_gate = tl.zeros((CHUNK, BLOCK), tl.float32)
        of_pairs = tl.zeros((CHUNK, BLOCK), tl.float32)

    for member in tl.range(0, GROUP, num_stages=1):
        head_x = head * GROUP + member
        if OF_X:
            pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
            dx = tl.zeros((CHUNK, BLOCK), tl.float32)
            for number in tl.range(0, PARTS, num_stages=1):
                e = number * BLOCK_E + tl.arange(0, BLOCK_E)
                w = tokens_of(w_in + member * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
                z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
                state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
                dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
                pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
            pairs = pairs * scale
            diagonal = tl.sum(tl.where(row == column, pairs, 0.0), 1)[:, None]
            y = tokens_of(y_in, y_t * Y_UNIT, token, held, channel, WIDTH)
            if GRADIENTS:
                x = tokens_of(x_in + member * (x_h * X_UNIT), x_t * X_UNIT, token, held, channel, WIDTH)
            dx = dx * (tl.exp2(weighted_sums(matrix(matrices, UNTIL, row, column), g, IN_HALVES)) * scale)
            if GRADIENTS:
                of_gate += rough_sums(matrix(matrices, FROM, row, column), x * dx, dtype)
            pairs = pairs.to(dtype)
            chosen = tl.where(after, pairs, tl.zeros_like(pairs))
            shrunk = (y * tl.exp2(-centred)).to(dtype)
            part = tl.dot(chosen, shrunk, input_precision=PRECISION) * tl.exp2(centred)
            dx += part
            if GRADIENTS:
                of_pairs += rough_sums(matrix(matrices, CENTRED_TRANSPOSED + levels, row, column), x * part, dtype)
            for level in tl.range(0, levels, num_stages=1):
                decay = tl.exp2(weighted_sums(matrix(matrices, LEVEL + level, row, column), faint, IN_HALVES))
                chosen = (row > column) & neighbours(row, column, (CHUNK // 2) >> level)
                chosen = tl.where(chosen, pairs, tl.zeros_like(pairs))
                part = tl.dot(chosen, (y * decay).to(dtype), input_precision=PRECISION) * decay
                dx += part
                if GRADIENTS:
                    of_pairs += rough_sums(matrix(matrices, LEVEL_TRANSPOSED + level, row, column), x * part, dtype)
            dx += diagonal * y
            address = dx_out + ((first + token[:, None]) * (heads * GROUP) + head_x) * WIDTH + channel[None, :]
            tl.store(address, dx.to(dx_out.dtype.element_ty), mask=mask)

        if OF_Y:
            # Not the transpose of `pairs`: some compilers multiply a transposed accumulator wrongly.
            transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
            between = tl.zeros((BLOCK, BLOCK), tl.float32)
            for number in tl.range(0, PARTS, num_stages=1):
                e = number * BLOCK_E + tl.arange(0, BLOCK_E)
                w = tokens_of(w_in + member * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
                z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
                transposed = tl.dot(z, tl.trans(w), transposed, input_precision=PRECISION)
                if member == 0:
                    state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
                    grad_state = tile_of_state(grad_states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
                    dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
                    # Diagonal of a product: elementwise, two tiles would fill the registers.
                    between = tl.dot(state, tl.trans(grad_state), between, input_precision=PRECISION)
            transposed = transposed * scale
            diagonal = tl.sum(tl.where(row == column, transposed, 0.0), 1)[:, None]
            y = tokens_of(y_in, y_t * Y_UNIT, token, held, channel, WIDTH)
            x = tokens_of(x_in + member * (x_h * X_UNIT), x_t * X_UNIT, token, held, channel, WIDTH)
            if member == 0:
                dy = dy * tl.exp2(weighted_sums(matrix(matrices, AFTER, row, column), g, IN_HALVES))
                of_gate += rough_sums(matrix(matrices, BEFORE, row, column), y * dy, dtype)
                of_gate += (diagonal_of(between, BLOCK) * tl.exp2(tl.sum(g, 0)))[None, :]
            transposed = transposed.to(dtype)
            chosen = tl.where(before, transposed, tl.zeros_like(transposed))
            grown = (x * tl.exp2(centred)).to(dtype)
            part = tl.dot(chosen, grown, input_precision=PRECISION) * tl.exp2(-centred)
            dy += part
            of_pairs -= rough_sums(matrix(matrices, CENTRED_TRANSPOSED + levels, row, column), y * part, dtype)
            for level in tl.range(0, levels, num_stages=1):
                decay = tl.exp2(weighted_sums(matrix(matrices, LEVEL + level, row, column), faint, IN_HALVES))
                chosen = (row < column) & neighbours(row, column, (CHUNK // 2) >> level)
                chosen = tl.where(chosen, transposed, tl.zeros_like(transposed))
                part = tl.dot(chosen, (x * decay).to(dtype), input_precision=PRECISION) * decay
                dy += part
                of_pairs += rough_sums(matrix(matrices, LEVEL_TRANSPOSED + level, row, column), y * part, dtype)
            dy += diagonal * x

    if GRADIENTS:
        tile = ((first + token[:, None]) * heads + head) * WIDTH + channel[None, :]
        if OF_Y:
            tl.store(dy_out + tile, dy.to(dy_out.dtype.element_ty), mask=mask)
        of_gate += of_pairs * left_out(g, IN_HALVES)
        if not OF_X:
            of_gate += tl.load(grad_gates_out + tile, mask=mask, other=0.0)
        tl.store(grad_gates_out + tile, tl.where(g > CLOSED, of_gate, 0.0), mask=mask)
