"""A few tokens after a state, one by one, in plain PyTorch, for machines without CUDA."""

import torch
from torch import Tensor

from kernels.gated_recurrence.validation import check_values
from kernels.operation import register_operation


def decay_of_states(log_decay: Tensor, per_head: bool, decay_axis: str) -> Tensor:
    """Return the factor of states [..., H, Dk, Dv], from log_decay [..., H, D], or [..., H] with per_head."""
    decay = log_decay.exp()
    if per_head:
        return decay[..., None, None]
    return decay[..., None, :] if decay_axis == "value" else decay[..., :, None]


@torch.autocast("cpu", enabled=False)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    decay_axis: str,
    scale: float,
    bonus: Tensor | None,
) -> Tensor:
    """Run `gated_recurrence_step`; same arguments and result. Updates state in place."""
    check_values(log_decay, None)
    heads, decays = k.shape[2], decay_of_states(log_decay.to(state.dtype), log_decay.ndim == 3, decay_axis)
    queries = (q.to(state.dtype) * scale).unflatten(2, (heads, -1))
    keys, values = k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :]
    if bonus is not None:
        own = (queries * bonus.to(state.dtype).unflatten(0, (heads, -1))) @ keys * values
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for t in range(q.shape[1]):
        if bonus is not None:
            out[:, t] = (queries[:, t] @ state).add_(own[:, t]).flatten(1, 2)
        state.mul_(decays[:, t]).addcmul_(keys[:, t], values[:, t])
        if bonus is None:
            out[:, t] = (queries[:, t] @ state).flatten(1, 2)
    return out


def _fake_step(q, k, v, log_decay, state, decay_axis, scale, bonus):
    return q.new_empty(*q.shape[:3], v.shape[3])


plain_step = register_operation("gated_recurrence_step", _step, _fake_step, mutates=("state",))
