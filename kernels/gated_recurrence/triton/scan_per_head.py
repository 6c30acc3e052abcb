"""The scans with a gate per head: triton/per_head.py has the mathematics.

One program carries a tile [BLOCK_D, BLOCK_E] of a state, or backward in time of its gradient, through one segment of a
sequence, in float32. For each chunk it computes the scores and its slice of the output. Scores and outputs are sums
over the key channels: wide keys use SLICES programs, and each stores its part of the sums. In one program their tiles
would need more registers for addresses than exist, and Triton 3.6 with its ptxas then generates kernels that read wrong
addresses.
"""

import triton
import triton.language as tl

from kernels.gated_recurrence.triton.gradients_strong import tokens_of
from kernels.gated_recurrence.triton.scan import state_at_start


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "start_n", "start_h", "start_d", "start_e",
        "length", "slice_stride",
    ]
)  # fmt: skip
def scan_forward_per_head(
    x_in, y_in, z_in, before_in, out, states, end, start, segment_table, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, start_n, start_h, start_d, start_e, length, slice_stride,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, JOINED: tl.constexpr, LAST: tl.constexpr,
    NUM_STAGES: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_D: tl.constexpr, SLICES: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    part, head, segment = tl.program_id(0) // SLICES, tl.program_id(1), tl.program_id(2)
    number_of_slice = tl.program_id(0) % SLICES
    heads = tl.num_programs(1)
    line = segment_table + segment * FIELDS
    sequence, row, begin = tl.load(line), tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64)
    count, first_chunk, flags = tl.load(line + 3), tl.load(line + 4).to(tl.int64), tl.load(line + 5)
    if count < 0:
        return
    dtype = tl.float32 if x_in.dtype.element_ty == tl.float16 else x_in.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row_token, column_token = token[:, None], token[None, :]
    channel = number_of_slice * BLOCK_D + tl.arange(0, BLOCK_D)
    e = part * BLOCK_E + tl.arange(0, BLOCK_E)
    state_mask = (channel < STORED)[:, None] & (e < WIDTH_E)[None, :]
    state = state_at_start(
        start, segment, sequence, head, channel, e, state_mask, start_n, start_h, start_d, start_e, JOINED
    )
    if out is not None:
        out += number_of_slice.to(tl.int64) * slice_stride
    for number in tl.range(0, tl.cdiv(count, CHUNK), num_stages=NUM_STAGES):
        held = number * CHUNK + token < count
        first = begin + number * CHUNK
        index = (first_chunk + number) * heads + head
        before = tl.load(before_in + index * CHUNK + token)
        total = tl.load(before_in + index * CHUNK + CHUNK - 1)
        y_base = y_in + (row * y_b + first * y_t + head * y_h) * Y_UNIT
        y = tokens_of(y_base, y_t * Y_UNIT, token, held, channel, WIDTH).to(dtype)
        z_base = z_in + (row * z_b + first * z_t + head * z_h) * Z_UNIT
        z = tokens_of(z_base, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
        narrow = state.to(dtype)
        if out is not None:
            decay = tl.exp2(tl.minimum(before[:, None] - before[None, :], 0.0).to(tl.float32)) * scale
            for member in tl.static_range(GROUP):
                x_base = x_in + (row * x_b + first * x_t + (head * GROUP + member) * x_h) * X_UNIT
                x = tokens_of(x_base, x_t * X_UNIT, token, held, channel, WIDTH).to(dtype)
                scores = tl.dot(x, tl.trans(y), input_precision=PRECISION)
                scores = tl.where(row_token >= column_token, scores * decay, 0.0).to(dtype)
                result = tl.dot(x, narrow, input_precision=PRECISION)
                result = result * (tl.exp2(before.to(tl.float32)) * scale)[:, None]
                result = tl.dot(scores, z, result, input_precision=PRECISION)
                address = out + ((row * length + first + row_token) * heads + head) * (GROUP * WIDTH_E)
                address = address + member * WIDTH_E + e[None, :]
                tl.store(address, result.to(out.dtype.element_ty), mask=held[:, None] & (e < WIDTH_E)[None, :])
        if states is not None:
            address = states + index * (STORED * WIDTH_E) + channel[:, None] * WIDTH_E + e[None, :]
            tl.store(address, narrow, mask=state_mask)
        z = (z * tl.exp2((total - before).to(tl.float32))[:, None]).to(dtype)
        state = state * tl.exp2(total.to(tl.float32))
        state = tl.dot(tl.trans(y), z, state, input_precision=PRECISION)
    if end is not None:  # noqa: SIM102
        if flags & LAST:
            address = end + (sequence.to(tl.int64) * heads + head) * (STORED * WIDTH_E)
            tl.store(address + channel[:, None] * WIDTH_E + e[None, :], state, mask=state_mask)


@triton.jit(
    do_not_specialize=[
        "x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "w_b", "w_t", "w_h", "start_n", "start_h", "start_d", "start_e",
        "length", "slice_stride",
    ]
)  # fmt: skip
def scan_backward_per_head(
    x_in, y_in, w_in, before_in, dz_out, states, end, start, segment_table, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, w_b, w_t, w_h, start_n, start_h, start_d, start_e, length, slice_stride,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, W_UNIT: tl.constexpr, JOINED: tl.constexpr, FIRST: tl.constexpr,
    NUM_STAGES: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_D: tl.constexpr, SLICES: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    part, head, segment = tl.program_id(0) // SLICES, tl.program_id(1), tl.program_id(2)
    number_of_slice = tl.program_id(0) % SLICES
    heads = tl.num_programs(1)
    line = segment_table + segment * FIELDS
    sequence, row, begin = tl.load(line), tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64)
    count, first_chunk, flags = tl.load(line + 3), tl.load(line + 4).to(tl.int64), tl.load(line + 5)
    if count < 0:
        return
    dtype = tl.float32 if x_in.dtype.element_ty == tl.float16 else x_in.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row_token, column_token = token[:, None], token[None, :]
    channel = number_of_slice * BLOCK_D + tl.arange(0, BLOCK_D)
    e = part * BLOCK_E + tl.arange(0, BLOCK_E)
    state_mask = (channel < STORED)[:, None] & (e < WIDTH_E)[None, :]
    state = state_at_start(
        start, segment, sequence, head, channel, e, state_mask, start_n, start_h, start_d, start_e, JOINED
    )
    dz_out += number_of_slice.to(tl.int64) * slice_stride
    num_chunks = tl.cdiv(count, CHUNK)
    for step in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        number = num_chunks - 1 - step
        held = number * CHUNK + token < count
        first = begin + number * CHUNK
        index = (first_chunk + number) * heads + head
        before = tl.load(before_in + index * CHUNK + token)
        total = tl.load(before_in + index * CHUNK + CHUNK - 1)
        y_base = y_in + (row * y_b + first * y_t + head * y_h) * Y_UNIT
        y = tokens_of(y_base, y_t * Y_UNIT, token, held, channel, WIDTH).to(dtype)
        narrow = state.to(dtype)
        address = states + index * (STORED * WIDTH_E) + channel[:, None] * WIDTH_E + e[None, :]
        tl.store(address, narrow, mask=state_mask)
        # Computed as [j, i], not transposed: some compilers multiply a transposed accumulator wrongly.
        decay = tl.exp2(tl.minimum(before[None, :] - before[:, None], 0.0).to(tl.float32)) * scale
        weight = tl.exp2(before.to(tl.float32)) * scale
        dz = tl.dot(y, narrow, input_precision=PRECISION) * tl.exp2((total - before).to(tl.float32))[:, None]
        state = state * tl.exp2(total.to(tl.float32))
        for member in tl.static_range(GROUP):
            head_x = head * GROUP + member
            x_base = x_in + (row * x_b + first * x_t + head_x * x_h) * X_UNIT
            x = tokens_of(x_base, x_t * X_UNIT, token, held, channel, WIDTH).to(dtype)
            w_base = w_in + (row * w_b + first * w_t + head_x * w_h) * W_UNIT
            w = tokens_of(w_base, w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            scores = tl.dot(y, tl.trans(x), input_precision=PRECISION)
            scores = tl.where(row_token <= column_token, scores * decay, 0.0).to(dtype)
            dz = tl.dot(scores, w, dz, input_precision=PRECISION)
            w = (w * weight[:, None]).to(dtype)
            state = tl.dot(tl.trans(x), w, state, input_precision=PRECISION)
        address = dz_out + ((row * length + first + row_token) * heads + head) * WIDTH_E + e[None, :]
        tl.store(address, dz.to(dz_out.dtype.element_ty), mask=held[:, None] & (e < WIDTH_E)[None, :])
    if end is not None:  # noqa: SIM102
        if flags & FIRST:
            address = end + (sequence.to(tl.int64) * heads + head) * (STORED * WIDTH_E)
            tl.store(address + channel[:, None] * WIDTH_E + e[None, :], state, mask=state_mask)
