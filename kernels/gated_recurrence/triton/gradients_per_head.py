"""Gradients of q and k, and of the gates, with a gate per head: triton/gradients.py has the mathematics.

The decays between the tokens of a chunk are one matrix D_ij = exp(before_i - before_j), j <= i. Its exponents are never
above 0, for any gates, and

    dx = scale exp(before) (.) (w S^T) + (P (.) D) y,    dy = exp(after) (.) (z dS^T) + (P (.) D)^T x
    dg_t = sum_{i >= t > j} P_ij D_ij x_i . y_j + scale sum_{i >= t} exp(before_i) x_i . (w_i S^T)
           + sum_{j < t} exp(after_j) y_j . (z_j dS^T) + exp(total) sum S dS

No terms of these sums cancel. sum_{i >= t} (x_i . dx_i - y_i . dy_i) equals the pairs' part too, but contains each
pair of tokens after t twice, with opposite signs: for similar tokens the rounding errors agree at every t and add up.

One program computes dx of one chunk and head of x, or dy of one head of y, for a slice of the channels: separately they
need half the registers, and when run together they share inputs in the cache. `_gate_gradients` adds up the gates'
parts of all slices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.triton.decays import CHUNK, CLOSED, in_log2
from kernels.gated_recurrence.triton.gradients_strong import tile_of_state, tokens_of
from kernels.gated_recurrence.triton.plan import FIELDS, Plan
from kernels.gated_recurrence.triton.scores import padded, precision, stored_dtype, strides_in_units
from kernels.rounding import cdiv


def gradients_per_head(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    w: Tensor,
    log_decay: Tensor,
    before: Tensor,
    states: Tensor,
    grad_states: Tensor,
    plan: Plan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [B, T, Hx, D], dy [B, T, Hy, D] and dlog_decay [B, T, Hy] float32.

    x: [B, T, Hx, D]. y: [B, T, Hy, D]. z: [B, T, Hy, E]. w: [B, T, Hx, E]. before: the sums of log gates
    [num_chunks, Hy, 64]. states, grad_states: [num_chunks, Hy, D stored, E].
    """
    batch, length, heads, width = y.shape
    width_e = z.shape[3]
    group = x.shape[2] // heads
    in_bfloat16 = stored_dtype(y.dtype) == torch.bfloat16  # float32 serves tests only: tiles that fit
    block = 64 if in_bfloat16 else min(padded(width), 32)
    block_e = 64 if in_bfloat16 else min(padded(width_e), 32)
    slices = cdiv(width, block)
    dx, dy = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y))
    # Per token, head and slice: dx's part from the state and from pairs; dy's part from the state.
    of_later, of_pairs = torch.empty(2, batch, length, heads, group * slices, dtype=torch.float32, device=x.device)
    of_earlier = torch.empty(batch, length, heads, slices, dtype=torch.float32, device=x.device)
    of_states = torch.empty(before.shape[0], heads, slices, dtype=torch.float32, device=x.device)
    strides = [strides_in_units(t) for t in (x, y, z, w)]
    _gradients[((group + 1) * slices, heads, before.shape[0])](
        x,
        y,
        z,
        w,
        before,
        states,
        grad_states,
        dx,
        dy,
        of_later,
        of_pairs,
        of_earlier,
        of_states,
        plan.chunks,
        scale,
        *(stride for found in strides for stride in found[:3]),
        length,
        X_UNIT=strides[0][3],
        Y_UNIT=strides[1][3],
        Z_UNIT=strides[2][3],
        W_UNIT=strides[3][3],
        GROUP=group,
        WIDTH=width,
        STORED=padded(width),
        BLOCK=block,
        SLICES=slices,
        WIDTH_E=width_e,
        BLOCK_E=block_e,
        PARTS=cdiv(width_e, block_e),
        PRECISION=precision(y.dtype),
        CHUNK=CHUNK,
        FIELDS=FIELDS,
        NUM_STAGES=2 if in_bfloat16 else 1,
        num_warps=4,
        # Three programs per multiprocessor are worth the few spilled registers.
        **({"maxnreg": 168} if x.is_cuda else {}),
    )
    return dx, dy, gate_gradients(of_later, of_pairs, of_earlier, of_states, log_decay, plan)


def gate_gradients(
    of_later: Tensor, of_pairs: Tensor | None, of_earlier: Tensor, of_states: Tensor, log_decay: Tensor, plan: Plan
) -> Tensor:
    """Return dlog_decay [B, T, H] float32, from the partial sums computed with the gradients of q and k.

    of_later, of_earlier: [B, T, H, parts], a token's contribution to the gates before it and after it in its chunk.
    of_pairs: [B, T, H, parts], contribution of the pairs of tokens around a gate; None if of_later includes it.
    of_states: [num_chunks, H, parts], contribution to all gates of a chunk.
    """
    _, length, heads, _ = of_later.shape
    grad_gates = torch.empty(of_later.shape[:3], dtype=torch.float32, device=of_later.device)
    block = 8
    _gate_gradients[(of_states.shape[0], cdiv(heads, block))](
        of_later, of_pairs, of_earlier, of_states, log_decay, grad_gates, plan.chunks, heads, *log_decay.stride(),
        length,
        OF_LATER=of_later.shape[3], OF_PAIRS=0 if of_pairs is None else of_pairs.shape[3],
        OF_EARLIER=of_earlier.shape[3], OF_STATES=of_states.shape[2], CHUNK=CHUNK, FIELDS=FIELDS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return grad_gates


@triton.jit(
    do_not_specialize=["x_b", "x_t", "x_h", "y_b", "y_t", "y_h", "z_b", "z_t", "z_h", "w_b", "w_t", "w_h", "length"]
)
def _gradients(
    x_in, y_in, z_in, w_in, before_in, states, grad_states, dx_out, dy_out, of_later, of_pairs, of_earlier, of_states,
    chunks, scale, x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, w_b, w_t, w_h, length,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, Z_UNIT: tl.constexpr, W_UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
    WIDTH_E: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    line = chunks + chunk * FIELDS
    batch_row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    if count <= 0:
        return
    index = chunk * heads + head
    member, number = part // SLICES, part % SLICES
    x_in += (batch_row * x_b + begin * x_t + head * GROUP * x_h) * X_UNIT
    y_in += (batch_row * y_b + begin * y_t + head * y_h) * Y_UNIT
    z_in += (batch_row * z_b + begin * z_t + head * z_h) * Z_UNIT
    w_in += (batch_row * w_b + begin * w_t + head * GROUP * w_h) * W_UNIT
    states += index * (STORED * WIDTH_E)
    grad_states += index * (STORED * WIDTH_E)
    dtype = states.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row, column = token[:, None], token[None, :]
    held = token < count
    channel = number * BLOCK + tl.arange(0, BLOCK)
    mask = held[:, None] & (channel < WIDTH)[None, :]
    before = tl.load(before_in + index * CHUNK + token)
    total = tl.load(before_in + index * CHUNK + CHUNK - 1)
    position = (batch_row * length + begin + token) * heads + head  # of a token and a head of y
    y = tokens_of(y_in, y_t * Y_UNIT, token, held, channel, WIDTH)

    if member < GROUP:  # dx
        x = tokens_of(x_in + member * (x_h * X_UNIT), x_t * X_UNIT, token, held, channel, WIDTH)
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        dx = tl.zeros((CHUNK, BLOCK), tl.float32)
        for step in tl.range(0, PARTS, num_stages=NUM_STAGES):
            e = step * BLOCK_E + tl.arange(0, BLOCK_E)
            w = tokens_of(w_in + member * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
            z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
            state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
            pairs = tl.dot(w, tl.trans(z), pairs, input_precision=PRECISION)
            dx = tl.dot(w, tl.trans(state), dx, input_precision=PRECISION)
        diagonal = tl.sum(tl.where(row == column, pairs, 0.0), 1) * scale
        decay = tl.exp2(tl.minimum(before[:, None] - before[None, :], 0.0).to(tl.float32)) * scale
        decayed = tl.where(row > column, pairs * decay, 0.0)
        dx = dx * (tl.exp2(before.to(tl.float32)) * scale)[:, None]
        tl.store(of_later + position * (GROUP * SLICES) + part, tl.sum(x * dx, 1), mask=held)
        pairs = decayed.to(dtype)
        dx = tl.dot(pairs, y.to(dtype), dx, input_precision=PRECISION)
        decayed = decayed * tl.dot(x.to(dtype), tl.trans(y.to(dtype)), input_precision=PRECISION)
        around = tl.where(row > column, tl.cumsum(decayed, 0, reverse=True), 0.0)
        tl.store(of_pairs + position * (GROUP * SLICES) + part, tl.sum(around, 1), mask=held)
        dx += diagonal[:, None] * y
        address = dx_out + (position * GROUP + member)[:, None] * WIDTH + channel[None, :]
        tl.store(address, dx.to(dx_out.dtype.element_ty), mask=mask)
    else:
        dy = tl.zeros((CHUNK, BLOCK), tl.float32)
        in_state = tl.zeros((CHUNK,), tl.float32)
        between = tl.zeros((BLOCK,), tl.float32)
        for other in tl.static_range(GROUP):
            x = tokens_of(x_in + other * (x_h * X_UNIT), x_t * X_UNIT, token, held, channel, WIDTH)
            # Not the transpose of dx's pairs: some compilers multiply a transposed accumulator wrongly.
            pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
            for step in tl.range(0, PARTS, num_stages=NUM_STAGES):
                e = step * BLOCK_E + tl.arange(0, BLOCK_E)
                w = tokens_of(w_in + other * (w_h * W_UNIT), w_t * W_UNIT, token, held, e, WIDTH_E).to(dtype)
                z = tokens_of(z_in, z_t * Z_UNIT, token, held, e, WIDTH_E).to(dtype)
                pairs = tl.dot(z, tl.trans(w), pairs, input_precision=PRECISION)
                if other == 0:
                    state = tile_of_state(states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
                    grad_state = tile_of_state(grad_states, channel, e, STORED, BLOCK, WIDTH_E, BLOCK_E)
                    dy = tl.dot(z, tl.trans(grad_state), dy, input_precision=PRECISION)
                    between += tl.sum(state.to(tl.float32) * grad_state, 1)
            if other == 0:
                dy = dy * tl.exp2((total - before).to(tl.float32))[:, None]
                in_state = tl.sum(y * dy, 1)
            diagonal = tl.sum(tl.where(row == column, pairs, 0.0), 1) * scale
            decay = tl.exp2(tl.minimum(before[None, :] - before[:, None], 0.0).to(tl.float32)) * scale
            pairs = tl.where(row < column, pairs * decay, 0.0).to(dtype)
            dy = tl.dot(pairs, x.to(dtype), dy, input_precision=PRECISION) + diagonal[:, None] * x
        address = dy_out + position[:, None] * WIDTH + channel[None, :]
        tl.store(address, dy.to(dy_out.dtype.element_ty), mask=mask)
        tl.store(of_earlier + position * SLICES + number, in_state, mask=held)
        between = tl.sum(between, 0) * tl.exp2(total.to(tl.float32))
        tl.store(of_states + index * SLICES + number, between)


@triton.jit(do_not_specialize=["heads", "g_b", "g_t", "g_h", "length"])
def _gate_gradients(
    of_later, of_pairs, of_earlier, of_states, gates, grad_gates, chunks, heads, g_b, g_t, g_h, length,
    OF_LATER: tl.constexpr, OF_PAIRS: tl.constexpr, OF_EARLIER: tl.constexpr, OF_STATES: tl.constexpr,
    CHUNK: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk's tokens, for a block of heads."""
    chunk = tl.program_id(0).to(tl.int64)
    line = chunks + chunk * FIELDS
    row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    if count <= 0:
        return
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = tl.arange(0, CHUNK)[:, None]
    mask = (token < count) & (head < heads)
    position = (row * length + begin + token) * heads + head
    later = tl.zeros((CHUNK, BLOCK), tl.float32)
    earlier = tl.zeros((CHUNK, BLOCK), tl.float32)
    kept = tl.zeros((1, BLOCK), tl.float32)
    for number in tl.static_range(OF_LATER):
        later += tl.load(of_later + position * OF_LATER + number, mask=mask, other=0.0)
    for number in tl.static_range(OF_EARLIER):
        # Load the previous token: subtracting a much larger own part from the sum would lose precision.
        before = of_earlier + (position - heads) * OF_EARLIER + number
        earlier += tl.load(before, mask=mask & (token > 0), other=0.0)
    for number in tl.static_range(OF_STATES):
        kept += tl.load(of_states + (chunk * heads + head) * OF_STATES + number, mask=head < heads, other=0.0)
    result = tl.cumsum(later, 0, reverse=True) + tl.cumsum(earlier, 0) + kept
    for number in tl.static_range(OF_PAIRS):
        result += tl.load(of_pairs + position * OF_PAIRS + number, mask=mask, other=0.0)
    g = tl.load(gates + row * g_b + (begin + token) * g_t + head * g_h, mask=mask, other=0.0)
    tl.store(grad_gates + position, tl.where(in_log2(g) > CLOSED, result, 0.0), mask=mask)
