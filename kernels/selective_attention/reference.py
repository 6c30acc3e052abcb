"""Reference implementation of selective attention, with all scores and weights; tests compare against it.

s_j = scale * q . k_j + c - c_j                      for the keys j in use, c the sum at the query's own key
P   = the top_values keys of the highest s_j         of equal scores, the earlier key first
o   = sum_{j in P} softmax_{j in P}(s_j) v_j         (DiffQKV's selective V fetching, arXiv 2501.13629)
"""

import torch
from torch import Tensor


def selective_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
) -> Tensor:
    """Compute `selective_attention` by its definition; same arguments.

    Computes in float64 for float64 inputs, otherwise in float32. A NaN counts as the highest score.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (_heads_first(x, q, dtype) for x in (q, k, v))
    scores = (queries @ keys.mT)[:, :, 0] * (q.shape[-1] ** -0.5 if scale is None else scale)  # [B, Hq, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    batch, length = k.shape[:2]
    end = torch.full((batch,), length, device=k.device) if kv_end is None else kv_end.long()
    if decay is not None:
        own = decay.gather(1, (end - 1).clamp(min=0)[:, None, None].expand(-1, 1, decay.shape[2]))
        scores = scores + (own - decay).mT.to(dtype)
    key = torch.arange(length, device=k.device)
    visible = key < end[:, None]
    if kv_start is not None:
        visible = visible & (key >= kv_start[:, None])
    visible = visible[:, None]

    scores = scores.masked_fill(~visible, -torch.inf)
    # A stable sort leaves equal scores in the order of their keys.
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = visible & (rank < top_values)
    # A row without a key must give 0, and a softmax over nothing would give NaN.
    weights = scores.masked_fill(~chosen, -torch.inf).masked_fill(~visible.any(-1, keepdim=True), 0.0).softmax(-1)
    weights = weights.masked_fill(~chosen, 0.0)
    # Values that are not chosen may be NaN, and 0 * NaN is NaN.
    out = (weights[..., None] * values).masked_fill(~chosen[..., None], 0.0).sum(2)
    return out[:, None].to(q.dtype)


def _heads_first(x: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [B, S, H, D] as [B, Hq, S, D], each head repeated for the query heads that share it."""
    return x.to(dtype).repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)
