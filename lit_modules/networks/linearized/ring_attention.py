"""Softmax attention of new tokens over a ring of the last ones, one token or one block at a time."""

import torch
from torch import Tensor

from lit_modules.networks.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.linearized.windows import window_attention
from lit_modules.networks.positions import Positions

LARGEST_BLOCK = 256
"""Maximum new tokens whose scores are in memory at a time."""


def cached_window_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: LinearizedCacheLayer, *, positions: Positions, scale: float
) -> Tensor:
    """Attend to a cache's window and sinks, and update its ring; see `ring_attention`."""
    if cache.ring_keys is not None:
        return ring_attention(q, k, v, cache, kv_start=positions.kv_start, scale=scale)
    cache.append(k, v, positions.kv_start)
    return window_attention(q, k, v, window=cache.window, sinks=cache.sinks, positions=positions, scale=scale)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: LinearizedCacheLayer, *, kv_start: Tensor | None, scale: float
) -> Tensor:
    """Attend from new tokens to the ring's window and sinks, and append the tokens to the ring.

    Args:
        q: `[B, T, Hq, D]`, rotated, as k.
        k, v: `[B, T, Hk, D]`.
        cache: the cache of the ring; `counter` is not changed.
        kv_start: `[B]` int32, left padding of each row.
        scale: scale of the logits.

    Returns:
        `[B, T, Hq, D]` in q's dtype, 0 at the padding.
    """
    # A block is at most a window, so no sink is among the new tokens: it would still be in the window.
    block, tokens = min(cache.window, LARGEST_BLOCK), q.shape[1]
    parts = []
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        parts.append(_attend(q[:, part], k[:, part], v[:, part], cache, first, kv_start, scale))
        cache.append(k[:, part], v[:, part], kv_start, after=first)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LinearizedCacheLayer,
    after: int,
    kv_start: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend from at most `window` tokens to the ring and to themselves; `after` tokens followed its counter."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    # Copies, because the ring changes before a backward pass reads it.
    keys, values = (torch.cat(pair, dim=1).to(dtype) for pair in zip(cache.rings(), (k, v), strict=True))
    scores = torch.einsum("bihgd,bjhd->bhgij", q.to(dtype).unflatten(2, (heads, -1)), keys) * scale
    visible = _visible(q.shape[1], cache, after, kv_start)[:, None, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~visible, 0)  # padding sees nothing, not even itself
    return torch.einsum("bhgij,bjhd->bihgd", weights, values).flatten(2, 3).to(q.dtype)


def _visible(tokens: int, cache: LinearizedCacheLayer, after: int, kv_start: Tensor | None) -> Tensor:
    """Return `[B or 1, T, S]` bool: the sinks, ring slots and new tokens that each new token sees."""
    time = cache.time(tokens) + after
    start = time.new_zeros(1, 1) if kv_start is None else kv_start[:, None].long()
    newest_held = time[0] - 1
    slot = torch.arange(cache.window, device=time.device)
    held = newest_held - (newest_held - slot) % cache.window
    place = torch.cat((held, time))
    back = time[:, None] - place
    near = (back >= 0) & (back < cache.window) & (place >= start)[:, None]
    if not cache.sinks:
        return near
    sink = start + torch.arange(cache.sinks, device=time.device)
    far = (time[:, None] - sink[:, None]) >= cache.window
    return torch.cat((far, near), dim=-1)
