"""RWKV6's bonus for any form of the recurrence: tokens read the previous state, and themselves through the bonus.

k, v and log_decay are shifted by one token, so that the recurrence at token t reads the state before t. A document's
first token then adds and decays nothing. The final state lacks the last token, which `add_last` adds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gated_recurrence.decode.step import decay_of_states


def delay(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Shift x [B, T, ...], T >= 1, one token later; the first token of each row or document becomes 0."""
    later = F.pad(x, (*(0, 0) * (x.ndim - 2), 1, -1))
    if cu_seqlens is None:
        return later
    # Empty documents may start at T.
    first = torch.zeros(x.shape[1] + 1, dtype=torch.bool, device=x.device)
    first = first.index_fill(0, cu_seqlens[:-1].long(), True)[: x.shape[1]]
    return later.masked_fill(first.view(-1, *(1,) * (x.ndim - 2)), 0.0)


def add_own(out: Tensor, q: Tensor, k: Tensor, v: Tensor, bonus: Tensor, scale: float) -> Tensor:
    """Return out + scale (q_t diag(bonus) k_t^T) v_t, [B, T, Hq, Dv] in q's dtype."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    weighted = (q.to(dtype) * bonus.to(dtype)).unflatten(2, (heads, -1))
    weights = (weighted * k.to(dtype)[:, :, :, None]).sum(-1, keepdim=True)
    own = (weights * v.to(dtype)[:, :, :, None]).flatten(2, 3)
    return (out.to(dtype) + scale * own).to(q.dtype)


def add_last(
    state: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, decay_axis: str, cu_seqlens: Tensor | None
) -> Tensor:
    """Return the state after the last token, [B, Hk, Dk, Dv] or [N, ...], from the state before it."""
    if cu_seqlens is None:
        k, v, log_decay = (x[:, -1] for x in (k, v, log_decay))
    else:
        last = (cu_seqlens[1:].long() - 1).clamp(min=0)
        k, v, log_decay = (x[0].index_select(0, last) for x in (k, v, log_decay))
    decay = decay_of_states(log_decay.to(state.dtype), log_decay.ndim == 2, decay_axis)
    after = decay * state + k.to(state.dtype)[..., :, None] * v.to(state.dtype)[..., None, :]
    if cu_seqlens is None:
        return after
    return torch.where((cu_seqlens[1:] > cu_seqlens[:-1])[:, None, None, None], after, state)
