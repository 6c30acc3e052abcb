"""Decoding step of a Liger layer, from q, k, v to the output projection's input (arXiv 2503.01496, eq. 5 to 8).

    S_t = G_t (.) S_{t-1} + f(k_t)^T v_t        out_t = a f(q_t) S_t + b softmax(scale r(q_t) r(K)^T) V

f is the feature map of a head's channels, r the rotary embedding, and G_t is computed from k_t. A late state receives
the token that leaves the window instead of token t, so state and window never overlap. This file has the definition in
plain PyTorch, which also runs on machines without CUDA; `windowed_step` does what follows f, r and G.
"""

import torch
from torch import Tensor

from kernels.gated_recurrence import forms
from kernels.gated_recurrence.decode.triton_liger_step import triton_liger_step
from kernels.gated_recurrence.decode.windowed_step import plain_windowed_step, take_in
from kernels.gated_recurrence.validation import (
    check_late_keys,
    check_liger_arguments,
    check_ring,
    check_step_vectors,
)


@torch.no_grad()
def liger_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cosine: Tensor,
    sine: Tensor,
    state: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    tokens: Tensor,
    *,
    late_keys: Tensor | None = None,
    gate: str,
    temperature: float = 1.0,
    feature_map: str = "softmax",
    gate_shift: Tensor | None = None,
    kv_start: Tensor | None = None,
    state_weight: Tensor,
    window_weight: Tensor,
    sinks: int = 0,
    window_scale: float | None = None,
) -> Tensor:
    """Run `windowed_step` on projected q and k, including feature map, gate and rotary embedding.

    The state is read by `f(q_t)` and updated with `f(k_t)` (HGRN2: 1 minus its gate), both without rotation and rounded
    to the dtype of q and k. The gate's logits are k_t, or the mean of k_t for a gate per head, plus gate_shift. The
    window uses q_t and k_t rotated: channel c of the first R is paired with channel c +- R / 2, as in Llama. On CUDA,
    gates, maps and rotations are computed in float32 and rounded once.

    With `late_keys`, the state receives token `t - window` instead of token t: its value is read from `ring_values`,
    its key and gate from `late_keys`, and k of token t is written to slot `t % (window + 1)`. Padding and the first
    `sinks` tokens of each row, which stay visible, never enter the state.

    Args:
        q: [B, 1, Hq, D], float16, bfloat16, float32 or float64, any strides. k and v have its dtype and device.
        k: [B, 1, Hk, D]; Hk divides Hq: head h of q reads the state h // (Hq / Hk).
        v: [B, 1, Hk, D].
        cosine: [B, 1, R] or [1, 1, R] in any floating dtype, R even and no more than D.
        sine: as cosine.
        state: [B, Hk, D, D] float32 (float64 for float64 inputs), contiguous, updated in place.
        ring_keys, ring_values, tokens, kv_start, state_weight, window_weight, sinks: as in `windowed_step`.
        late_keys: [B, window + 1, Hk, D] in q's dtype, contiguous, updated in place: k of the last tokens. Unwritten
            slots may hold anything. None: each token enters the state immediately.
        gate: "gla", "hgrn2" or "rwkv6" (per channel); "mamba2", "mlstm" or "gated_retention" (per head); "fixed" or
            "none". See `kernels.gated_recurrence.forms.liger`.
        temperature: divisor of the log gates.
        feature_map: f: "softmax" over a head's channels, or "none".
        gate_shift: [Hk] in any floating dtype, for gates that have logits.
        window_scale: factor of the scores; 1 / sqrt(D) when None.

    Returns:
        out [B, 1, Hq, D] in q's dtype.

    Raises:
        ValueError: for unknown names, and for shapes, dtypes or devices that do not fit.
    """
    check_liger_arguments(
        q, k, v, cosine, sine, state, gate_shift, gate=gate, temperature=temperature, feature_map=feature_map
    )
    check_ring(q, v, ring_keys, ring_values, sinks)
    check_late_keys(late_keys, k, ring_keys.shape[1] - sinks)
    check_step_vectors(q, tokens, kv_start, state_weight, window_weight)
    window_scale = float(q.shape[-1] ** -0.5 if window_scale is None else window_scale)
    implementation = triton_liger_step if q.is_cuda and q.dtype != torch.float64 else plain_liger_step
    return implementation(
        q, k, v, cosine, sine, state, ring_keys, ring_values, late_keys, tokens, kv_start, gate_shift, state_weight,
        window_weight, gate, float(temperature), feature_map, sinks, window_scale,
    )  # fmt: skip


def plain_liger_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cosine: Tensor,
    sine: Tensor,
    state: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    late_keys: Tensor | None,
    tokens: Tensor,
    kv_start: Tensor | None,
    gate_shift: Tensor | None,
    state_weight: Tensor,
    window_weight: Tensor,
    gate: str,
    temperature: float,
    feature_map: str,
    sinks: int,
    window_scale: float,
) -> Tensor:
    """Run `liger_step` in plain PyTorch; same arguments and result."""
    entering_k, entering_v, enters = k, v, None
    if late_keys is not None:
        entering_k, entering_v, enters = _leaving(k, late_keys, ring_values, tokens, kv_start, sinks)
    inputs = forms.liger(
        gate,
        _mapped(q, feature_map),
        _mapped(entering_k, feature_map),
        entering_v,
        _logits(entering_k, gate, gate_shift),
        temperature=temperature,
    )
    if enters is not None:
        take_in(state, *inputs[1:], enters)
        inputs = inputs._replace(k=None, v=v, log_decay=None)
    return plain_windowed_step(
        *inputs,
        state,
        _rotated(q, cosine, sine),
        _rotated(k, cosine, sine),
        ring_keys,
        ring_values,
        tokens,
        kv_start,
        state_weight,
        window_weight,
        sinks,
        1.0,
        window_scale,
    )


def _leaving(
    k: Tensor, late_keys: Tensor, ring_values: Tensor, tokens: Tensor, kv_start: Tensor | None, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return key and value [B, 1, Hk, D] of the token leaving the window, and a mask [B] of rows it enters; store k."""
    window, now = late_keys.shape[1] - 1, tokens.long()
    start = now.new_zeros(len(k)) if kv_start is None else kv_start.long()
    enters = now - window >= start + sinks
    oldest = late_keys.index_select(1, (now + 1) % (window + 1)).masked_fill(~enters[:, None, None, None], 0)
    late_keys.index_copy_(1, now % (window + 1), k)
    return oldest, ring_values.index_select(1, sinks + now % window), enters


def _mapped(x: Tensor, feature_map: str) -> Tensor:
    return x if feature_map == "none" else x.softmax(-1, dtype=_wide(x)).to(x.dtype)


def _logits(k: Tensor, gate: str, gate_shift: Tensor | None) -> Tensor | None:
    """Return the gate's logits [B, 1, Hk, D] or [B, 1, Hk], float32 or wider; None for constant gates."""
    if gate in forms.CONSTANT:
        return None
    logits = k.to(_wide(k))
    if gate_shift is not None:
        logits = logits + gate_shift.to(logits.dtype)[:, None]
    return logits.mean(-1) if gate in forms.PER_HEAD else logits


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide, width = x.to(_wide(x)), cosine.shape[-1]
    first, second = wide[..., :width].chunk(2, dim=-1)
    cosine, sine = (table.to(wide.dtype)[:, :, None] for table in (cosine, sine))
    turned = wide[..., :width] * cosine + torch.cat((-second, first), dim=-1) * sine
    return torch.cat((turned, wide[..., width:]), dim=-1).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
