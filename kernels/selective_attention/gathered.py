"""Selective attention in PyTorch, for CPUs and float64: keys are read head by head, and the chosen values alone."""

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Compute `selective_attention`; same arguments and result."""
    batch, length = k.shape[:2]
    scores = _scores(q, k, scale, softcap)
    if decay is not None:
        own = decay[:, -1:] if kv_end is None else decay[torch.arange(batch, device=q.device), kv_end.long() - 1, None]
        scores += (own - decay).mT.to(scores.dtype)
    key = torch.arange(length, device=q.device)
    hidden = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
    if kv_start is not None:
        hidden |= key < kv_start[:, None]
    if kv_end is not None:
        hidden |= key >= kv_end[:, None]
    scores.masked_fill_(hidden[:, None], -torch.inf)
    place = _highest(scores, hidden[:, None], min(top_values, length))
    is_hidden = hidden[:, None].expand_as(scores).gather(2, place)
    weights = scores.gather(2, place).masked_fill(is_hidden.all(-1, keepdim=True), 0.0).softmax(-1)
    row = torch.arange(batch, device=q.device)[:, None, None]
    head = torch.arange(q.shape[2], device=q.device)[:, None] // (q.shape[2] // v.shape[2])
    values = v[row, place, head].to(scores.dtype)  # [B, Hq, top_values, Dv]
    # Keys out of use fill up where there are too few others; their values may be NaN, and 0 * NaN is NaN.
    values.masked_fill_(is_hidden[..., None], 0.0)
    return (weights[..., None, :] @ values).transpose(1, 2).to(q.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the scores without decay, [B, Hq, S]: float64 for float64 inputs, otherwise float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_empty(k.shape[0], q.shape[2], k.shape[1], dtype=dtype)
    shared = q.shape[2] // k.shape[2]
    for head in range(k.shape[2]):
        heads = slice(head * shared, (head + 1) * shared)
        scores[:, heads] = q[:, 0, heads].to(dtype) @ k[:, :, head].to(dtype).mT
    scores *= scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _highest(scores: Tensor, hidden: Tensor, number: int) -> Tensor:
    """Return the keys of the highest scores `[B, Hq, S]`, `[B, Hq, number]`; of equal scores those of earlier keys.

    Hidden keys come last. A NaN counts as the highest score.
    """
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    # Integers in the order of the scores: no NaN is among them, and the two zeros are one number.
    bits = torch.where(scores == 0, 0.0, scores).view(integer)
    order = torch.where(bits < 0, bits ^ limits.max, bits).masked_fill_(scores.isnan(), limits.max)
    order.masked_fill_(hidden, limits.min)
    least = order.topk(number, -1, sorted=False).values.amin(-1, keepdim=True)
    above, ties = order > least, order == least
    room = number - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1) <= room))
    return chosen.nonzero()[:, 2].view(*scores.shape[:2], number)
