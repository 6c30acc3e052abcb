"""Reference implementation of forgetting attention, with a [T, S] matrix for each head; tests compare against it.

    c_j  = sum_{l <= j} log_forget_l
    s_ij = scale * q_i . k_j + c_i - c_j                    for the keys j that query i sees
    o_i  = sum_j softmax_j(s_ij) v_j                       (FoX, arXiv 2503.02130, eq. 2 to 4)
    lse_i = log sum_j exp(s_ij)

A gate of 0 (log_forget_l = -inf) hides every j < l from every i >= l. It becomes a mask instead of a term of the sum:
-inf - -inf never arises, and the other gates keep their precision.
"""

import torch
from torch import Tensor

# A log gate under this is a closed gate: exp(-1e3) is 0 in any dtype.
CLOSED_GATE = -1e3


def forgetting_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    cumulative: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `forgetting_attention` by its definition, without pruning; same arguments except prune and logit_bound.

    Differentiable by autograd. Computes in float64 for float64 inputs, otherwise in float32; O(T S) memory.
    """
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query_position = _query_positions(q, k, kv_end)
    visible = _visible(query_position, k, window, cu_seqlens, kv_start)

    scores = scale * _heads_first(q, q, compute_dtype) @ _heads_first(k, q, compute_dtype).mT
    if log_forget is not None:
        closed = (log_forget < CLOSED_GATE) & (not cumulative)
        decay = log_forget.double().masked_fill(closed, 0.0)
        if not cumulative:
            decay = decay.cumsum(1)
        query_decay = _at_positions(decay, query_position)
        scores = scores + (query_decay[..., None] - decay.mT[..., None, :]).to(compute_dtype)
        closed_so_far = closed.long().cumsum(1)
        visible = visible & (_at_positions(closed_so_far, query_position)[..., None] == closed_so_far.mT[..., None, :])

    # A query that sees nothing (left padding) must give 0, and a softmax over nothing would give NaN.
    sees_nothing = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(sees_nothing, 0.0)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    out = (weights @ _heads_first(v, q, compute_dtype)).transpose(1, 2).to(q.dtype)
    if not return_lse:
        return out
    return out, scores.logsumexp(-1).masked_fill(sees_nothing[..., 0], -torch.inf).transpose(1, 2)


def _heads_first(x: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [B, S, H, D] as [B, Hq, S, D], each head repeated for the query heads that share it."""
    return x.to(dtype).repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def _query_positions(q: Tensor, k: Tensor, kv_end: Tensor | None) -> Tensor:
    """Return each query's position among the keys, [B, T]: the last T positions that the keys hold."""
    batch, length = q.shape[:2]
    end = kv_end.long() if kv_end is not None else torch.full((batch,), k.shape[1], device=q.device)
    return end[:, None] - length + torch.arange(length, device=q.device)


def _at_positions(x: Tensor, position: Tensor) -> Tensor:
    """Gather x [B, S, H] at positions [B, T] into [B, H, T]."""
    return x.mT.gather(2, position.clamp(min=0)[:, None].expand(-1, x.shape[2], -1))


def _visible(
    query_position: Tensor, k: Tensor, window: int | None, cu_seqlens: Tensor | None, kv_start: Tensor | None
) -> Tensor:
    """Return the mask of keys that each query sees, [B, 1, T, S] bool, ignoring gates."""
    query = query_position[:, None, :, None]
    key = torch.arange(k.shape[1], device=k.device)
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if kv_start is not None:
        visible = visible & (key >= kv_start.long()[:, None, None, None])
    if cu_seqlens is not None:
        document = torch.bucketize(key, cu_seqlens.long(), right=True)
        visible = visible & (document[:, None] == document)
    return visible
