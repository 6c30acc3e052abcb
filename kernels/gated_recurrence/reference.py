"""The gated recurrence by its definition, token by token: the reference for tests.

    S_t = G_t (.) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t

G_t is exp(log_decay_t) along the rows of S (key axis), along its columns (value axis), or one number per head.
"""

from itertools import pairwise

import torch
from torch import Tensor


def gated_recurrence_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    decay_axis: str = "key",
    bonus: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_recurrence` by its definition; same arguments except memory_budget, same results.

    Differentiable by autograd. Computes in float64 for float64 inputs, otherwise in float32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, length, heads, key_dim = k.shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    rows = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        initial_state = k.new_zeros(rows, heads, key_dim, v.shape[-1], dtype=dtype)
    outs, states = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        state = initial_state.to(dtype) if cu_seqlens is None else initial_state[number : number + 1].to(dtype)
        for t in range(begin, end):
            # One state per head of k and v, read by all query heads that share it.
            q_t = q[:, t].to(dtype).unflatten(1, (heads, -1))
            added = k[:, t].to(dtype)[..., :, None] * v[:, t].to(dtype)[..., None, :]
            read = None
            if bonus is not None:
                weights = bonus.to(dtype).unflatten(0, (heads, -1))
                read = torch.einsum("bhgk,bhkv->bhgv", q_t, state)
                read = read + torch.einsum("bhgk,hgk,bhkv->bhgv", q_t, weights, added)
            state = _gate(log_decay[:, t].to(dtype), decay_axis) * state + added
            if read is None:
                read = torch.einsum("bhgk,bhkv->bhgv", q_t, state)
            outs.append(scale * read.flatten(1, 2))
        states.append(state)
    out = torch.stack(outs, 1) if outs else q.new_zeros(batch, 0, q.shape[2], v.shape[-1])
    return out.to(q.dtype), torch.cat(states).to(torch.promote_types(dtype, torch.float32))


def _gate(log_decay: Tensor, decay_axis: str) -> Tensor:
    """Return the factor of a state [B, H, Dk, Dv], from log_decay [B, H], [B, H, Dk] or [B, H, Dv]."""
    gate = log_decay.exp()
    if gate.ndim == 2:
        return gate[..., None, None]
    return gate[..., :, None] if decay_axis == "key" else gate[..., None, :]


def gated_slot_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute `gated_slot_attention` by two reference recurrences; same arguments except memory_budget."""
    first, second = (None, None) if initial_state is None else initial_state
    scores, keys = gated_recurrence_reference(
        q, k, slots, log_decay, decay_axis="value", scale=scale, initial_state=first, cu_seqlens=cu_seqlens
    )
    weights = scores.softmax(-1)
    out, values = gated_recurrence_reference(weights, slots, v, log_decay, initial_state=second, cu_seqlens=cu_seqlens)
    return out, (keys, values)
