"""Scan of the states over chunks, forward and backward in time, including the outputs that read them.

With the decayed x~, y^ and scores A of triton/scores.py, and z on the axis without decay, over a sequence's chunks:

    forward   S_end = exp(total) (.) S_start + y^^T z           out_i = x~_i S_start + sum_{j <= i} A_ij z_j
    backward  dS_start = exp(total) (.) dS_end + x~^T w         dz_j = y^_j dS_end + sum_{i >= j} A_ij w_i

with w the gradient of out. States are [D, E], D the axis that decays. One program carries a state's slice [D, BLOCK]
through one segment of a sequence, in float32. If sequences are cut into several segments, a first pass computes each
segment's contribution to the state, and `_join` the state at each segment's start.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.plan import FIELDS, FIRST, LAST, Plan
from kernels.gated_recurrence.triton.scores import Chunks, launch_options, precision, shared_memory, strides_in_units
from kernels.launching import on_grid
from kernels.rounding import cdiv, next_power_of_2

STRIDES = ["z_stride_b", "z_stride_t", "z_stride_h"]
OUT_STRIDES = ["out_stride_b", "out_stride_t", "out_stride_h"]
STATE_STRIDES = ["start_n", "start_h", "start_d", "start_e", "end_n", "end_h", "end_d", "end_e"]


def scan(
    chunks: Chunks,
    z: Tensor,
    plan: Plan,
    start: Tensor | None,
    *,
    backward: bool = False,
    heads: int,
    out: bool = True,
    states: bool = True,
    end: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run one scan, forward or backward in time.

    z: [B, T, Hy, E], backward [B, T, Hx, E]. start: the initial state, [N, Hy, D, E] float32 or None for zeros;
    backward, the gradient of the final state. heads: Hy. out, states, end: which results to compute.

    Returns:
        out [B, T, Hx, E] in z's dtype (backward: dz [B, T, Hy, E]); states [num_chunks, Hy, D stored, E] at each
        chunk's start (backward: gradients at each chunk's end); the state after the last chunk [N, Hy, D, E] float32,
        D as stored. None for results that are not requested.
    """
    batch, length, heads_z, width_e = z.shape
    num_chunks, _, _, width = chunks.y.shape
    heads_x = heads_z if backward else (chunks.x.shape[1] if chunks.x is not None else heads)
    results = (
        z.new_empty(batch, length, heads if backward else heads_x, width_e) if out else None,
        chunks.y.new_empty(num_chunks, heads, width, width_e) if states else None,
        z.new_empty(plan.num_sequences, heads, width, width_e, dtype=torch.float32) if end else None,
    )
    # Matrix instructions have 64 rows; with fewer, Triton 3.6 generates kernels that read out of bounds.
    block_d = max(64 if z.dtype == torch.bfloat16 else 16, next_power_of_2(width))
    block_e, num_stages = _tile(block_d, width_e, heads_x // heads, z)
    z_strides = strides_in_units(z)
    kernel = _scan_backward if backward else _scan_forward
    slices = cdiv(width_e, block_e)

    def launch(out, states, start, end, start_strides, end_strides, totals, LOCAL):
        on_grid(kernel, (slices, heads, plan.segments.shape[0]))(
            chunks.x, chunks.y, chunks.scores, chunks.total, z, out, states, start, end, totals, plan.segments,
            *z_strides[:3], *((0, 0, 0) if out is None else out.stride()[:3]), *start_strides, *end_strides,
            Z_UNIT=z_strides[3], GROUP=heads_x // heads, WIDTH=width, WIDTH_E=width_e, BLOCK_D=block_d, BLOCK_E=block_e,
            JOINED=plan.in_segments, LOCAL=LOCAL, PRECISION=precision(z.dtype), CHUNK=CHUNK, FIELDS=FIELDS, FIRST=FIRST,
            LAST=LAST, NUM_STAGES=num_stages, **launch_options(z.dtype),
        )  # fmt: skip

    start_strides, end_strides = strides_of_state(start), strides_of_state(results[2])
    if plan.in_segments:
        joined = z.new_empty(plan.segments.shape[0], heads, width, width_e, dtype=torch.float32)
        totals = torch.empty(plan.segments.shape[0], heads, chunks.total.shape[2], dtype=torch.float32, device=z.device)
        launch(None, None, None, joined, strides_of_state(None), joined.stride(), totals, LOCAL=True)
        join(joined, totals, start, plan, backward=backward)
        start, start_strides = joined, joined.stride()
    launch(results[0], results[1], start, results[2], start_strides, end_strides, None, LOCAL=False)
    return results


def strides_of_state(state: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a state [N, heads, D, E]; zeros for None."""
    return (0, 0, 0, 0) if state is None else state.stride()


def join(joined: Tensor, totals: Tensor, start: Tensor | None, plan: Plan, *, backward: bool) -> None:
    """Replace each segment's contribution in `joined` by the state at the segment's start, in place.

    joined: [segments, heads, D stored, E] float32. totals: [segments, heads, D stored or 1], the sums of log gates.
    start: as in `scan`.
    """
    _, heads, width, width_e = joined.shape
    block = 1024
    on_grid(_join, (cdiv(width * width_e, block), heads, plan.num_sequences))(
        joined,
        totals,
        start,
        plan.offsets if plan.offsets.numel() else None,
        plan.segments.shape[0] // plan.num_sequences,
        *strides_of_state(start),
        WIDTH=width,
        WIDTH_E=width_e,
        PER_HEAD=totals.shape[2] == 1,
        BACKWARD=backward,
        BLOCK=block,
    )


def _tile(block_d: int, width_e: int, group: int, x: Tensor) -> tuple[int, int]:
    """Return BLOCK_E and the number of stages, up to 3, that fit into shared memory. float32 serves tests only."""
    largest_e = max(16, next_power_of_2(width_e))
    if x.dtype != torch.bfloat16:
        return min(32 if block_d <= 128 else 16, largest_e), 1
    block_e = min(64 if block_d <= 128 else 32, largest_e)
    stage = 2 * CHUNK * ((1 + group) * block_d + group * CHUNK + group * block_e)
    own = 2 * (block_d + CHUNK) * block_e
    return block_e, min(max((shared_memory(x.device) - own) // stage, 1), 3)


@triton.jit
def _rows(base, channel, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Load [CHUNK, BLOCK] of a stored tile [CHUNK, WIDTH]."""
    address = base + tl.arange(0, CHUNK)[:, None] * WIDTH + channel[None, :]
    if WIDTH == BLOCK:
        return tl.load(address)
    return tl.load(address, mask=(channel < WIDTH)[None, :], other=0.0)


@triton.jit
def _total(total, index, channel, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the sum of a chunk's log gates, [BLOCK]."""
    if WIDTH == BLOCK:
        sums = tl.load(total + index * WIDTH + channel)
    else:
        sums = tl.load(total + index * WIDTH + channel, mask=channel < WIDTH, other=0.0)
    return sums


@triton.jit
def state_at_start(start, segment, sequence, head, channel, e, mask, n, h, d, stride_e, JOINED: tl.constexpr):
    """Load the state at a scan's start: zeros, the initial state, or the result of `_join` for the segment."""
    state = tl.zeros(mask.shape, tl.float32)
    if start is not None:
        index = (segment if JOINED else sequence).to(tl.int64)
        address = start + index * n + head * h + channel[:, None] * d + e[None, :] * stride_e
        state = tl.load(address, mask=mask, other=0.0)
    return state


@triton.jit(do_not_specialize=[*STRIDES, *OUT_STRIDES, *STATE_STRIDES])
def _scan_forward(
    x, y, scores, total, z, out, states, start, end, totals_out, segment_table,
    z_stride_b, z_stride_t, z_stride_h, out_stride_b, out_stride_t, out_stride_h,
    start_n, start_h, start_d, start_e, end_n, end_h, end_d, end_e,
    Z_UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, JOINED: tl.constexpr,
    LOCAL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    line = segment_table + segment * FIELDS
    sequence, row, begin = tl.load(line), tl.load(line + 1).to(tl.int64), tl.load(line + 2)
    count, first_chunk, flags = tl.load(line + 3), tl.load(line + 4).to(tl.int64), tl.load(line + 5)
    if count < 0:
        return
    if LOCAL:  # noqa: SIM102  (a constant, and a number of the device)
        if flags & LAST:
            return
    dtype = y.dtype.element_ty
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_D)
    e = part * BLOCK_E + tl.arange(0, BLOCK_E)
    held_e = e < WIDTH_E
    state_mask = (channel < WIDTH)[:, None] & held_e[None, :]
    if LOCAL:
        state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
        totals = tl.zeros((BLOCK_D,), tl.float32)
    else:
        state = state_at_start(
            start, segment, sequence, head, channel, e, state_mask, start_n, start_h, start_d, start_e, JOINED
        )
    z_base = z + (row * z_stride_b + head * z_stride_h) * Z_UNIT
    for number in tl.range(0, tl.cdiv(count, CHUNK), num_stages=NUM_STAGES):
        slot = (first_chunk + number) * heads + head
        position = begin + number * CHUNK + token
        held = number * CHUNK + token < count
        z_address = z_base + position[:, None].to(tl.int64) * (z_stride_t * Z_UNIT) + e[None, :]
        values = tl.load(z_address, mask=held[:, None] & held_e[None, :], other=0.0).to(dtype)
        added = _rows(y + slot * (CHUNK * WIDTH), channel, WIDTH, BLOCK_D, CHUNK)
        decay = _total(total, slot, channel, WIDTH, BLOCK_D)
        if states is not None or out is not None:
            narrow = state.to(dtype)
        if out is not None:
            for member in (tl.static_range if dtype == tl.bfloat16 else tl.range)(GROUP):
                slot_x = slot * GROUP + member
                read = _rows(x + slot_x * (CHUNK * WIDTH), channel, WIDTH, BLOCK_D, CHUNK)
                inner = _rows(scores + slot_x * (CHUNK * CHUNK), token, CHUNK, CHUNK, CHUNK)
                result = tl.dot(read, narrow, input_precision=PRECISION)
                result = tl.dot(inner, values, result, input_precision=PRECISION)
                address = out + row * out_stride_b + (head * GROUP + member) * out_stride_h
                address = address + position[:, None].to(tl.int64) * out_stride_t + e[None, :]
                tl.store(address, result.to(out.dtype.element_ty), mask=held[:, None] & held_e[None, :])
        if states is not None:
            address = states + slot * (WIDTH * WIDTH_E) + channel[:, None] * WIDTH_E + e[None, :]
            tl.store(address, narrow, mask=state_mask)
        state = tl.dot(tl.trans(added), values, state * tl.exp2(decay)[:, None], input_precision=PRECISION)
        if LOCAL:
            totals += decay
    if LOCAL:
        address = end + segment.to(tl.int64) * end_n + head * end_h + channel[:, None] * end_d + e[None, :] * end_e
        tl.store(address, state, mask=state_mask)
        address = totals_out + (segment * heads + head) * WIDTH + channel
        tl.store(address, totals, mask=(channel < WIDTH) & (part == 0))
    elif end is not None:  # noqa: SIM102
        if flags & LAST:
            address = end + sequence.to(tl.int64) * end_n + head * end_h + channel[:, None] * end_d + e[None, :] * end_e
            tl.store(address, state, mask=state_mask)


@triton.jit(do_not_specialize=[*STRIDES, *OUT_STRIDES, *STATE_STRIDES])
def _scan_backward(
    x, y, scores, total, z, out, states, start, end, totals_out, segment_table,
    z_stride_b, z_stride_t, z_stride_h, out_stride_b, out_stride_t, out_stride_h,
    start_n, start_h, start_d, start_e, end_n, end_h, end_d, end_e,
    Z_UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, JOINED: tl.constexpr,
    LOCAL: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    line = segment_table + segment * FIELDS
    sequence, row, begin = tl.load(line), tl.load(line + 1).to(tl.int64), tl.load(line + 2)
    count, first_chunk, flags = tl.load(line + 3), tl.load(line + 4).to(tl.int64), tl.load(line + 5)
    if count < 0:
        return
    if LOCAL:  # noqa: SIM102  (a constant, and a number of the device)
        if flags & FIRST:
            return
    dtype = y.dtype.element_ty
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_D)
    e = part * BLOCK_E + tl.arange(0, BLOCK_E)
    held_e = e < WIDTH_E
    state_mask = (channel < WIDTH)[:, None] & held_e[None, :]
    if LOCAL:
        state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
        totals = tl.zeros((BLOCK_D,), tl.float32)
    else:
        state = state_at_start(
            start, segment, sequence, head, channel, e, state_mask, start_n, start_h, start_d, start_e, JOINED
        )
    num_chunks = tl.cdiv(count, CHUNK)
    for step in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        number = num_chunks - 1 - step
        slot = (first_chunk + number) * heads + head
        position = begin + number * CHUNK + token
        held = number * CHUNK + token < count
        decay = _total(total, slot, channel, WIDTH, BLOCK_D)
        if states is not None or out is not None:
            narrow = state.to(dtype)
        if states is not None:
            address = states + slot * (WIDTH * WIDTH_E) + channel[:, None] * WIDTH_E + e[None, :]
            tl.store(address, narrow, mask=state_mask)
        if out is not None:
            added = _rows(y + slot * (CHUNK * WIDTH), channel, WIDTH, BLOCK_D, CHUNK)
            result = tl.dot(added, narrow, input_precision=PRECISION)
        state = state * tl.exp2(decay)[:, None]
        for member in (tl.static_range if dtype == tl.bfloat16 else tl.range)(GROUP):
            slot_x = slot * GROUP + member
            z_base = z + (row * z_stride_b + (head * GROUP + member) * z_stride_h) * Z_UNIT
            z_address = z_base + position[:, None].to(tl.int64) * (z_stride_t * Z_UNIT) + e[None, :]
            values = tl.load(z_address, mask=held[:, None] & held_e[None, :], other=0.0).to(dtype)
            read = _rows(x + slot_x * (CHUNK * WIDTH), channel, WIDTH, BLOCK_D, CHUNK)
            if out is not None:
                inner = _rows(scores + slot_x * (CHUNK * CHUNK), token, CHUNK, CHUNK, CHUNK)
                result = tl.dot(tl.trans(inner), values, result, input_precision=PRECISION)
            state = tl.dot(tl.trans(read), values, state, input_precision=PRECISION)
        if out is not None:
            address = out + row * out_stride_b + head * out_stride_h
            address = address + position[:, None].to(tl.int64) * out_stride_t + e[None, :]
            tl.store(address, result.to(out.dtype.element_ty), mask=held[:, None] & held_e[None, :])
        if LOCAL:
            totals += decay
    if LOCAL:
        address = end + segment.to(tl.int64) * end_n + head * end_h + channel[:, None] * end_d + e[None, :] * end_e
        tl.store(address, state, mask=state_mask)
        address = totals_out + (segment * heads + head) * WIDTH + channel
        tl.store(address, totals, mask=(channel < WIDTH) & (part == 0))
    elif end is not None:  # noqa: SIM102
        if flags & FIRST:
            address = end + sequence.to(tl.int64) * end_n + head * end_h + channel[:, None] * end_d + e[None, :] * end_e
            tl.store(address, state, mask=state_mask)


@triton.jit(do_not_specialize=["per_sequence", "start_n", "start_h", "start_d", "start_e"])
def _join(
    joined, totals, start, offsets, per_sequence, start_n, start_h, start_d, start_e,
    WIDTH: tl.constexpr, WIDTH_E: tl.constexpr, PER_HEAD: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Run `join` for a block of a state's elements."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < WIDTH * WIDTH_E
    channel, e = index // WIDTH_E, index % WIDTH_E
    if offsets is None:
        first, last = sequence * per_sequence, (sequence + 1) * per_sequence
    else:
        first, last = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    state = tl.zeros((BLOCK,), tl.float32)
    if start is not None:
        address = start + sequence.to(tl.int64) * start_n + head * start_h + channel * start_d + e * start_e
        state = tl.load(address, mask=mask, other=0.0)
    for step in range(last - first):
        segment = last - 1 - step if BACKWARD else first + step
        plane = segment.to(tl.int64) * heads + head
        address = joined + plane * (WIDTH * WIDTH_E) + index
        if step < last - first - 1:
            added = tl.load(address, mask=mask, other=0.0)
            if PER_HEAD:
                decay = tl.load(totals + plane)
            else:
                decay = tl.load(totals + plane * WIDTH + channel, mask=mask, other=0.0)
            tl.store(address, state, mask=mask)
            state = state * tl.exp2(decay) + added
        else:
            tl.store(address, state, mask=mask)
