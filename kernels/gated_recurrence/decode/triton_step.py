"""The gated recurrence for a few tokens after a state, in Triton: decoding, and short continuations of a prefix.

    S_t = G_t (.) S_{t-1} + k_t^T v_t        o_t = scale q_t S_t        for each query head that shares the state

There is little arithmetic: time goes into reading and writing the states. The columns of a state are independent. A
program owns all rows of some columns of one head's state, reads that tile once, updates it for all tokens in registers,
with out_t the sum over its rows, and writes it once. Hence the state can be updated in place, and a token's memory and
time do not depend on the length of its prefix. With a bonus u (RWKV6) a token reads the previous state, and itself
through o_t = scale (q_t S_{t-1} + (sum_d q_td u_d k_td) v_t). The batch, the number of tokens and all strides are plain
arguments: changing them does not recompile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operation import register_operation
from kernels.rounding import cdiv, next_power_of_2

MAX_STEPS = 16
"""Largest number of tokens these kernels are meant for."""


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    decay_axis: str,
    scale: float,
    bonus: Tensor | None = None,
) -> Tensor:
    """Run `gated_recurrence` after `state` and leave the final state in it. Without gradients.

    Args:
        q: [B, T, Hq, Dk] float16, bfloat16 or float32, any strides; T from 1 to MAX_STEPS (more is correct but slow).
        k, v: [B, T, Hk, Dk], [B, T, Hk, Dv] in q's dtype, any strides; Hk divides Hq, Dk and Dv are 256 or less.
        log_decay: [B, T, Hk, Dk], [B, T, Hk, Dv] or [B, T, Hk], 0 or less.
        state: [B, Hk, Dk, Dv] float32. Updated in place where each head's matrix is contiguous; otherwise by a copy.
        decay_axis: "key" or "value", the axis that a gate per channel decays.
        scale: factor of the output.
        bonus: [Hq, Dk] or None, as in `gated_recurrence`.

    Returns:
        out [B, T, Hq, Dv] in q's dtype.
    """
    if _holds_matrices(state):
        return gated_recurrence_step_in_place(q, k, v, log_decay, state, decay_axis, scale, bonus)
    out, final = short_recurrence(q, k, v, log_decay, state, decay_axis, scale, bonus)
    state.copy_(final)
    return out


def short_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    decay_axis: str,
    scale: float,
    bonus: Tensor | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `step` without changing the initial state (None: zeros) and return (out, final_state).

    wide: out in float32.
    """
    return gated_recurrence_short(q, k, v, log_decay, initial_state, decay_axis, scale, bonus, wide)


def _step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    decay_axis: str,
    scale: float,
    bonus: Tensor | None = None,
) -> Tensor:
    out = _empty_out(q, v)
    _launch(q, k, v, log_decay, bonus, state, state, out, decay_axis, scale)
    if not state.is_inference():
        # Torch cannot see the kernel's write; a graph that saved the state must refuse to use it.
        torch.autograd.graph.increment_version(state)
    return out


def _fake_step_in_place(q, k, v, log_decay, state, decay_axis, scale, bonus=None):
    return _empty_out(q, v)


gated_recurrence_step_in_place = register_operation(
    "gated_recurrence_step_in_place", _step_in_place, _fake_step_in_place, mutates=("state",)
)


def _short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    decay_axis: str,
    scale: float,
    bonus: Tensor | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    out, final = _empty_out(q, v, wide), _empty_state(k, v)
    source = final if initial_state is None else initial_state.contiguous()
    _launch(q, k, v, log_decay, bonus, source, final, out, decay_axis, scale, from_zeros=initial_state is None)
    return out, final


def _fake_short(q, k, v, log_decay, initial_state, decay_axis, scale, bonus=None, wide=False):
    return _empty_out(q, v, wide), _empty_state(k, v)


gated_recurrence_short = register_operation("gated_recurrence_short", _short, _fake_short)


def _empty_out(q: Tensor, v: Tensor, wide: bool = False) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32 if wide else v.dtype)


def _empty_state(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _holds_matrices(state: Tensor) -> bool:
    """Return whether each head's matrix is contiguous and none share memory (as in an expanded state)."""
    batch, heads, key_dim, value_dim = state.shape
    columns = value_dim == 1 or state.stride(3) == 1
    rows = key_dim == 1 or state.stride(2) == value_dim
    return columns and rows and (batch == 1 or state.stride(0) > 0) and (heads == 1 or state.stride(1) > 0)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    source: Tensor,
    destination: Tensor,
    out: Tensor,
    decay_axis: str,
    scale: float,
    from_zeros: bool = False,
) -> None:
    """Launch the kernel; source and destination have equal strides or are one tensor; from_zeros skips the source."""
    batch, heads, key_dim, value_dim = destination.shape
    if batch == 0:
        return
    block_keys, block_values, num_warps = _tile(key_dim, value_dim)
    slices = cdiv(value_dim, block_values)
    decay_strides = log_decay.stride() if log_decay.ndim == 4 else (*log_decay.stride(), 0)
    # The stride of an axis of size 1 is arbitrary. The common divisor of the others is a kernel constant, which shows
    # the compiler how wide it may load; the strides themselves are not constants.
    state_strides = [0 if size == 1 else destination.stride(axis) for axis, size in enumerate((batch, heads))]
    unit = math.gcd(4, key_dim * value_dim, *state_strides)
    with torch.cuda.device_of(q):
        _take_steps[(batch * heads * slices,)](
            q, k, v, log_decay, bonus, source, destination, out, *q.stride(), *k.stride(), *v.stride(), *decay_strides,
            *((0, 0) if bonus is None else bonus.stride()), *(stride // unit for stride in state_strides), q.shape[1],
            int(from_zeros), scale,
            HEADS=heads, GROUPS=q.shape[2] // heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_KEYS=block_keys,
            BLOCK_VALUES=block_values, SLICES=slices, GATE="head" if log_decay.ndim == 3 else decay_axis,
            STATE_UNIT=unit, num_warps=num_warps,
        )  # fmt: skip


def _tile(key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a program; only the model's sizes decide, so that no batch recompiles.

    Rows have 128 bytes or more, and a thread up to 128 elements. More warps would synchronize in every sum over the
    rows: on an H200, four instead of one took a third longer for 16 tokens, and twice as long with grouped heads.
    """
    rows = next_power_of_2(key_dim)
    return rows, min(next_power_of_2(value_dim), 64 if rows <= 64 else 32), max(1, rows // 128)


_STRIDES = [f"{x}_stride_{axis}" for x in ("q", "k", "v", "decay") for axis in "bthd"]


@triton.jit(
    do_not_specialize=[
        *_STRIDES,
        *("bonus_stride_h", "bonus_stride_d", "state_stride_b", "state_stride_h", "length", "from_zeros"),
    ],
    do_not_specialize_on_alignment=["q", "k", "v", "log_decay", "bonus", "out"],
)
def _take_steps(
    q, k, v, log_decay, bonus, source, destination, out,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d, decay_stride_b, decay_stride_t, decay_stride_h, decay_stride_d,
    bonus_stride_h, bonus_stride_d, state_stride_b, state_stride_h,
    length, from_zeros, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr, SLICES: tl.constexpr, GATE: tl.constexpr,
    STATE_UNIT: tl.constexpr,
):  # fmt: skip
    """Update some columns of one head's state in one batch row; bonus may be None."""
    program = tl.program_id(0)
    head = program // SLICES % HEADS
    # States and inputs may have more than 2^31 elements.
    batch = (program // SLICES // HEADS).to(tl.int64)
    key, value = tl.arange(0, BLOCK_KEYS), program % SLICES * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    key_used, value_used = key < KEY_DIM, value < VALUE_DIM
    tile = (batch * state_stride_b + head.to(tl.int64) * state_stride_h) * STATE_UNIT
    tile_offset = key[:, None] * VALUE_DIM + value
    tile_used = key_used[:, None] & value_used
    # Zeros come from a fully masked load, which gives the tile the layout of its store.
    state = tl.load(source + tile + tile_offset, mask=tile_used & (from_zeros == 0), other=0.0)

    key_wide, value_wide = key.to(tl.int64), value.to(tl.int64)
    q_step, q_head_step = q_stride_t.to(tl.int64), q_stride_h.to(tl.int64)
    k_step, v_step, decay_step = k_stride_t.to(tl.int64), v_stride_t.to(tl.int64), decay_stride_t.to(tl.int64)
    q += batch * q_stride_b + head * GROUPS * q_head_step
    k += batch * k_stride_b + head.to(tl.int64) * k_stride_h
    v += batch * v_stride_b + head.to(tl.int64) * v_stride_h
    log_decay += batch * decay_stride_b + head.to(tl.int64) * decay_stride_h
    out += (batch * length * HEADS + head) * GROUPS * VALUE_DIM + value
    q_offset, k_offset, v_offset = key_wide * q_stride_d, key_wide * k_stride_d, value_wide * v_stride_d
    exists = length > 0
    if GATE == "key":
        decay_offset, decay_used = key_wide * decay_stride_d, key_used
    elif GATE == "value":
        decay_offset, decay_used = value_wide * decay_stride_d, value_used
    else:
        decay_offset, decay_used = 0, exists

    # Load the next token before storing the output: the compiler does not move loads above a store.
    q_next = tl.load(q + q_offset, mask=key_used & exists, other=0.0)
    k_next = tl.load(k + k_offset, mask=key_used & exists, other=0.0)
    v_next = tl.load(v + v_offset, mask=value_used & exists, other=0.0)
    decay_next = tl.load(log_decay + decay_offset, mask=decay_used & exists, other=0.0)
    for t in range(length):
        k_t, v_t, decay = k_next.to(tl.float32), v_next.to(tl.float32), tl.exp(decay_next.to(tl.float32))
        if GATE == "key":
            decay = decay[:, None]
        exists = t + 1 < length
        k += k_step
        v += v_step
        log_decay += decay_step
        k_next = tl.load(k + k_offset, mask=key_used & exists, other=0.0)
        v_next = tl.load(v + v_offset, mask=value_used & exists, other=0.0)
        decay_next = tl.load(log_decay + decay_offset, mask=decay_used & exists, other=0.0)
        if bonus is None:
            state = decay * state + k_t[:, None] * v_t
        for query in range(GROUPS):
            q_t = q_next.to(tl.float32)
            last = query == GROUPS - 1
            q += tl.where(last, q_step - (GROUPS - 1) * q_head_step, q_head_step)
            q_next = tl.load(q + q_offset, mask=key_used & (exists | (not last)), other=0.0)
            read = tl.sum(q_t[:, None] * state, 0)
            if bonus is not None:
                u = bonus + (head * GROUPS + query) * bonus_stride_h + key * bonus_stride_d
                u = tl.load(u, mask=key_used, other=0.0).to(tl.float32)
                read += tl.sum(q_t * u * k_t, 0) * v_t
            tl.store(out + query * VALUE_DIM, (scale * read).to(out.dtype.element_ty), mask=value_used)
        out += HEADS * GROUPS * VALUE_DIM
        if bonus is not None:
            state = decay * state + k_t[:, None] * v_t
    tl.store(destination + tile + tile_offset, state, mask=tile_used)
