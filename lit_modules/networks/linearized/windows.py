"""Softmax attention in a sliding window, optionally with the document's first tokens, in O(T window).

Kernels compute the window, PyTorch the first tokens. The log-sum-exp of the window joins both:

    o_i = (exp(lse_i) w_i + sum_s exp(z_is) v_s) / (exp(lse_i) + sum_s exp(z_is))        w_i: attention in the window
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import forgetting_attention
from lit_modules.networks.positions import Positions

SMALLEST_BLOCK = 16
"""Minimum queries per block: blocks as short as a small window would be all overhead."""


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int, positions: Positions, scale: float
) -> Tensor:
    """Compute softmax over each token's window and, with `sinks`, over its document's first tokens outside the window.

    Args:
        q: `[B, T, Hq, D]`, rotated, as k.
        k, v: `[B, T, Hk, D]`; Hk divides Hq.
        window: number of visible tokens, the token itself included, 1 or more.
        sinks: first tokens of a document (of a row, after its padding) that every later token sees (attention sinks,
            arXiv 2309.17453), 0 or more.
        positions: positions of the tokens, without a cache.
        scale: scale of the logits.

    Returns:
        `[B, T, Hq, D]` in q's dtype; 0 at the padding.
    """
    attended = forgetting_attention(
        q,
        k,
        v,
        scale=scale,
        window=window,
        cu_seqlens=positions.cu_seqlens,
        kv_start=positions.kv_start,
        return_lse=sinks > 0,
    )
    if isinstance(attended, Tensor):
        return attended
    in_window, lse = attended
    keys, values = (first_tokens(x, sinks, positions) for x in (k, v))
    at_sinks = sink_scores(q, keys, positions.index, window, scale)
    # The window is one more key with logit lse; for padding, which sees nothing, it is the only key.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unflatten(2, (k.shape[2], -1))
    of_window, of_sinks = torch.cat((lse[..., None], at_sinks), dim=-1).softmax(-1).split((1, sinks), dim=-1)
    out = of_window * in_window.unflatten(2, (k.shape[2], -1)) + weighted_sinks(of_sinks, values)
    return out.flatten(2, 3).to(q.dtype)


class WindowBlocks:
    """Queries `[B, T, Hq, D]` cut into blocks, each with the keys `[B, T, Hk, D]` that its windows may reach.

    A block is at least as long as the window, so it reads its own keys and the previous block's, and a mask selects
    each query's window. Query heads that share a key head are rows of one product. A query's position in its document
    limits its window, which separates packed documents and masks left padding.

    Args:
        key_heads: Hk.
        window: number of visible tokens, the token itself included.
        index: `[B, T]`, each token's position in its document, 0 or more.
    """

    def __init__(self, key_heads: int, window: int, index: Tensor):
        self.key_heads, self.window, self.index = key_heads, window, index
        self.length = index.shape[1]
        self.block = max(1, min(max(window, SMALLEST_BLOCK), self.length))
        self.count = -(-self.length // self.block)

    def cut(self, x: Tensor) -> Tensor:
        """Cut `[B, T, Hk, G, ...]` into `[B, blocks, Hk, G, block, ...]`, with zeros after the last token."""
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, self.count * self.block - self.length))
        return x.unflatten(1, (self.count, self.block)).movedim(2, 4)

    def join(self, x: Tensor) -> Tensor:
        """Invert `cut`."""
        return x.movedim(4, 2).flatten(1, 2)[:, : self.length]

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Compute scores `[B, blocks, Hk, G, block, 2 block]`, -inf outside the window; float32 at least."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = self.cut(q.to(dtype).unflatten(2, (self.key_heads, -1)))
        scores = _product("bnhgid,bnjhd->bnhgij", queries, self._reachable(k.to(dtype)))
        return (scores * scale).masked_fill(~self._visible()[:, :, None, None], -torch.inf)

    def weighted_sum(self, weights: Tensor, v: Tensor) -> Tensor:
        """Multiply `weights` `[B, blocks, Hk, G, block, 2 block]` by values `[B, T, Hk, D]`: `[B, T, Hk, G, D]`."""
        out = _product("bnhgij,bnjhd->bnhgid", weights, self._reachable(v.to(weights.dtype)))
        return self.join(out)

    def _reachable(self, x: Tensor) -> Tensor:
        """Cut `[B, T, H, D]` into `[B, blocks, 2 block, H, D]`: for each block the previous block and itself."""
        x = F.pad(x, (0, 0, 0, 0, self.block, self.count * self.block - self.length))
        x = x.unflatten(1, (self.count + 1, self.block))
        return torch.cat((x[:, :-1], x[:, 1:]), dim=2)

    def _visible(self) -> Tensor:
        """Return `[B, blocks, block, 2 block]` bool: the keys in each query's window and document."""
        index = F.pad(self.index, (0, self.count * self.block - self.length))
        place = torch.arange(2 * self.block, device=index.device)
        back = place[self.block :, None] - place
        near = (back >= 0) & (back < self.window)
        return near & (back <= index.unflatten(1, (self.count, self.block))[..., None])


def first_tokens(x: Tensor, sinks: int, positions: Positions) -> Tensor:
    """Gather `[B, T, H, D]` to `[B, n, sinks, H, D]`: per token's document (n = T, packed) or per row (n = 1)."""
    batch, length = x.shape[:2]
    if positions.cu_seqlens is not None:
        start = positions.cu_seqlens[None, :-1].long()
    elif positions.kv_start is not None:
        start = positions.kv_start[:, None].long()
    else:
        start = positions.index.new_zeros(batch, 1)
    # In a document shorter than `sinks` these are other tokens; callers mask them.
    place = (start[..., None] + torch.arange(sinks, device=x.device)).clamp(max=length - 1)
    first = x[torch.arange(batch, device=x.device)[:, None, None], place]
    if positions.cu_seqlens is None:
        return first
    # A product with a 0/1 matrix, because its gradient is a product too. The gradient of a gather would accumulate all
    # tokens of a document serially.
    start = torch.arange(length, device=x.device) - positions.index
    mine = (start[..., None] == positions.cu_seqlens[:-1]) & (positions.cu_seqlens.diff() > 0)
    return _product("btn,bnshd->btshd", mine.to(x.dtype), first)


def sink_scores(q: Tensor, keys: Tensor, index: Tensor, window: int, scale: float) -> Tensor:
    """Compute scores `[B, T, Hk, G, sinks]` with keys `[B, n, sinks, Hk, D]`, float32 at least.

    A score is -inf if the sink is in the window or outside the document. `index` `[B, T]` is each token's position in
    it.
    """
    dtype, heads, sinks = torch.promote_types(q.dtype, torch.float32), keys.shape[3], keys.shape[2]
    queries = q.to(dtype).unflatten(2, (heads, -1))
    if keys.shape[1] == 1:
        scores = _product("blhgd,bshd->blhgs", queries, keys[:, 0].to(dtype))
    else:  # too few keys per token for matrix products
        scores = (queries.unsqueeze(4) * keys.to(dtype).transpose(2, 3).unsqueeze(3)).sum(-1)
    left = index[..., None] - torch.arange(sinks, device=q.device) >= window
    return (scores * scale).masked_fill(~left[:, :, None, None], -torch.inf)


def weighted_sinks(weights: Tensor, values: Tensor) -> Tensor:
    """Multiply `[B, T, Hk, G, sinks]` by `[B, n, sinks, Hk, D]`: `[B, T, Hk, G, D]`."""
    values = values.to(weights.dtype)
    if values.shape[1] == 1:
        return _product("blhgs,bshd->blhgd", weights, values[:, 0])
    return (weights.unsqueeze(-1) * values.transpose(2, 3).unsqueeze(3)).sum(-2)


def _product(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """Compute an einsum in the dtype of its arguments, under autocast too, as the kernels do."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum(equation, x, y)
