"""Decoding step of a recurrence with a sliding window: the sum of both outputs in one operation.

    S_t = G_t (.) S_{t-1} + k_t^T v_t        out_t = a q_t S_t + b softmax(scale q'_t K'^T) V

K' and V are a ring of keys and values of the last tokens and of the first few (sinks). This file has the definition in
plain PyTorch, which also runs on machines without CUDA.
"""

import torch
from torch import Tensor

from kernels.gated_recurrence.decode.step import decay_of_states
from kernels.gated_recurrence.decode.triton_windowed_step import triton_windowed_step
from kernels.gated_recurrence.validation import (
    check_ring,
    check_step_arguments,
    check_step_vectors,
    check_values,
    check_window,
)
from kernels.operation import register_operation


@torch.no_grad()
def windowed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    q_window: Tensor,
    k_window: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    tokens: Tensor,
    *,
    kv_start: Tensor | None = None,
    state_weight: Tensor,
    window_weight: Tensor,
    sinks: int = 0,
    state_scale: float = 1.0,
    window_scale: float | None = None,
) -> Tensor:
    """Compute `state_weight q_t S_t + window_weight softmax(window_scale q'_t . k'_j) v_j` for one token per row.

    `S_t` is the state of `gated_recurrence`; j runs over the window and the sinks. The state and the ring are updated
    in place. Without gradients. There is no synchronization and no host value changes between tokens, so a CUDA graph
    of one call is valid for every token.

    With a ring of `sinks + window` slots, token t is written to slot `sinks + t % window`, and also to slot
    `t - kv_start` if that is less than `sinks`. It attends to tokens `t - window + 1` to t, from `kv_start` on, and to
    earlier sinks. Softmax does not depend on the order of slots: rotate keys by position before the call.

    Args:
        q: [B, 1, Hq, Dk], float16, bfloat16, float32 or float64: reads the state. All other tensors have its device,
            and its dtype unless stated otherwise.
        k: [B, 1, Hk, Dk]; Hk divides Hq: head h of q reads the state h // (Hq / Hk).
        v: [B, 1, Hk, D].
        log_decay: [B, 1, Hk, Dk] or [B, 1, Hk], 0 or less, float32 or float64.
        state: [B, Hk, Dk, D] float32 (float64 for float64 inputs), contiguous.
        q_window: [B, 1, Hq, D], q', the queries of the attention.
        k_window: [B, 1, Hk, D].
        ring_keys: [B, sinks + window, Hk, D], contiguous. Unwritten slots may hold anything.
        ring_values: [B, sinks + window, Hk, D], contiguous.
        tokens: int32 [1], t: number of tokens before this one, including padding. It is not changed.
        kv_start: int32 [B], the first token of each row that is not padding. Padding adds nothing to the state.
        state_weight: float32 [Hq] (float64 for float64 inputs).
        window_weight: float32 [Hq] (float64 for float64 inputs).
        sinks: slots at the start of the ring that keep each row's first tokens.
        state_scale: factor of q S.
        window_scale: factor of the scores; 1 / sqrt(D) when None.

    Returns:
        out [B, 1, Hq, D] in q's dtype.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit.
    """
    check_step_arguments(q, k, v, log_decay, state, decay_axis="key", bonus=None)
    check_window(q, v, q_window, k_window)
    check_ring(q, v, ring_keys, ring_values, sinks)
    check_step_vectors(q, tokens, kv_start, state_weight, window_weight)
    window_scale = float(q_window.shape[-1] ** -0.5 if window_scale is None else window_scale)
    implementation = triton_windowed_step if q.is_cuda and q.dtype != torch.float64 else plain_windowed_step
    return implementation(
        q, k, v, log_decay, state, q_window, k_window, ring_keys, ring_values, tokens, kv_start, state_weight,
        window_weight, sinks, float(state_scale), window_scale,
    )  # fmt: skip


def take_in(state: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, written: Tensor) -> None:
    """Update `state` in place with one token per row; rows not `written` [B] decay but add no value."""
    dtype = state.dtype
    decays = decay_of_states(log_decay.to(dtype), log_decay.ndim == 3, "key")[:, 0]
    values = v[:, 0].to(dtype).masked_fill(~written[:, None, None], 0)
    state.mul_(decays).addcmul_(k[:, 0].to(dtype)[..., None], values[..., None, :])


@torch.autocast("cpu", enabled=False)
def _plain(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    q_window: Tensor,
    k_window: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    tokens: Tensor,
    kv_start: Tensor | None,
    state_weight: Tensor,
    window_weight: Tensor,
    sinks: int,
    state_scale: float,
    window_scale: float,
) -> Tensor:
    """Run `windowed_step`; same arguments and result. Without k and log_decay the state is only read."""
    batch, slots, heads, _ = ring_keys.shape
    window, dtype = slots - sinks, state.dtype
    now = tokens.long()
    start = now.new_zeros(batch) if kv_start is None else kv_start.long()
    if k is not None:
        check_values(log_decay, None)
        take_in(state, k, v, log_decay, now >= start)
    from_state = (q[:, 0].to(dtype) * state_scale).unflatten(1, (heads, -1)) @ state

    ring_keys.index_copy_(1, sinks + now % window, k_window)
    ring_values.index_copy_(1, sinks + now % window, v)
    slot = torch.arange(slots, device=q.device)
    place = (now - start)[:, None]
    becomes_sink = ((slot == place) & (slot < sinks))[..., None, None]
    torch.where(becomes_sink, k_window, ring_keys, out=ring_keys)
    torch.where(becomes_sink, v, ring_values, out=ring_values)

    held = now - (now - (slot - sinks)) % window  # the newest token in each slot of the window
    in_window = held >= start[:, None]
    is_sink = start[:, None] + slot <= now - window
    visible = torch.where(slot < sinks, is_sink, in_window)
    queries = q_window[:, 0].to(dtype).unflatten(1, (heads, -1)) * window_scale
    scores = torch.einsum("bhgd,bshd->bhgs", queries, ring_keys.to(dtype))
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    # A row of padding sees no token, and 0 times the content of an unwritten slot may be NaN.
    weights = weights.masked_fill(~visible[:, None, None], 0)
    seen = ring_values.to(dtype).masked_fill(~visible[..., None, None], 0)
    from_window = torch.einsum("bhgs,bshd->bhgd", weights, seen)
    out = state_weight[:, None] * from_state.flatten(1, 2) + window_weight[:, None] * from_window.flatten(1, 2)
    return out[:, None].to(q.dtype)


def _fake(q, k, v, log_decay, state, q_window, *_):
    return torch.empty_like(q_window, memory_format=torch.contiguous_format)


plain_windowed_step = register_operation("windowed_step", _plain, _fake, mutates=("state", "ring_keys", "ring_values"))
