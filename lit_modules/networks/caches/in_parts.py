"""Attention over a compressed cache in PyTorch operations, part by part, where the fused kernel has no form for it.

Needed where keys and values keep different tokens, where the attention weights are read (heavy hitters), and where keys
are mapped after they are cached. Packed tokens are dequantized a part at a time, never all at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packed_kv import Packed, error_variance, unpack

MAX_WEIGHTS = 1 << 25
"""Attention weights held at a time."""

MAX_TOKENS = 4096
"""Packed tokens that are dequantized at a time."""

Finish = Callable[[Tensor, Tensor], Tensor]
"""Maps cached keys `[B, Hk, S, d]` and their rotary positions `[B, S]` to keys `[B, Hk, S, D]`."""


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer.

    Attributes:
        layout: `[B, H, slots, D]`, with the queries' own tokens last before `end`.
        end: int32 `[B]`.
        packed: the packed tokens, or None.
        blocks: int32 `[B]`, packed blocks in use.
        inverse: `[D, D]`, what was packed is multiplied with its transpose; or None.
        finish: for keys that are mapped after they are cached, or None.
        positions: rotary positions, `[B, 1, slots]` and of the packed tokens `[B, 1, N, block]`; only with `finish`.
        mean: `[H, 1, D]`, what is held lacks it, which matters before `finish`; or None.
    """

    layout: Tensor
    end: Tensor
    packed: Packed | None
    blocks: Tensor
    inverse: Tensor | None = None
    finish: Finish | None = None
    positions: tuple[Tensor, Tensor | None] | None = None
    mean: Tensor | None = None

    @property
    def packed_tokens(self) -> int:
        """Packed tokens in the storage, used or not."""
        return 0 if self.packed is None else self.packed.blocks * self.packed.block

    def parts(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the tensor in parts `[B, H, n, D]`, packed tokens first."""
        if self.packed is not None:
            step = max(1, MAX_TOKENS // self.packed.block)
            for start in range(0, self.packed.blocks, step):
                part = self.packed.map(lambda x, start=start: x[:, :, start : start + step])  # type: ignore[misc]  # a default
                x = unpack(part, dtype)
                if self.inverse is not None:
                    x = x @ self.inverse.to(x).mT
                if self.finish is not None:
                    assert self.positions is not None
                    assert self.positions[1] is not None
                    x = self.finish(self._whole(x), self.positions[1][:, 0, start : start + step].flatten(1))
                yield x
        x = self.layout.to(dtype)
        if self.finish is not None:
            assert self.positions is not None
            x = self.finish(self._whole(x), self.positions[0][:, 0])
        yield x

    def _whole(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x + self.mean

    def in_use(self) -> Tensor:
        """Return which packed tokens are in use, bool `[B, packed tokens]`."""
        if self.packed is None:
            return self.layout.new_zeros(len(self.end), 0, dtype=torch.bool)
        return torch.arange(self.packed_tokens, device=self.end.device) < self.packed.block * self.blocks[:, None]


def attend_in_parts(
    q: Tensor,
    keys: Side,
    values: Side,
    *,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    decay: tuple[Tensor, Tensor | None] | None = None,
    link: Tensor | None = None,
    received: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Attend to packed tokens and those in 16 bits as one softmax; the queries are the last T tokens.

    Args:
        q: `[B, Hq, T, D]`.
        keys, values: what is held.
        scale: factor on the logits.
        start: int32 `[B]`, the first slot that is no padding, or None.
        softcap: logits become `softcap * tanh(logit / softcap)`; None leaves them.
        decay: sums of log gates in the keys' order, `[B, Hq, slots]` and of packed tokens `[B, Hq, N, block]`.
        link: int64 `[B or 1, S]`, for each value the place of its key, both with packed tokens first; the number of
            keys for a place that is not in use. None where the order is the same.
        received: float32 `[B, G, slots]`, to which the attention that each slot receives is added; or None.
        squares: of `read_squares`, to take half the variance of packed keys' errors from their logits; or None.

    Returns:
        `[B, Hq, T, Dv]` in q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, time, _ = q.shape
    slots, packed = keys.layout.shape[2], keys.packed_tokens
    step = max(1, MAX_WEIGHTS // (batch * heads * (slots + packed)))
    slot = torch.arange(slots, device=q.device)
    outs = []
    for first in range(0, time, step):
        part = q[:, :, first : first + step].to(dtype)
        own = (keys.end.long()[:, None] - time + first) + torch.arange(part.shape[2], device=q.device)  # [B, t]
        scores = torch.cat([products(part, each.mT, part.shape[2]) for each in keys.parts(dtype)], -1) * scale
        if squares is not None and keys.packed is not None:
            of_part = squares if squares.shape[2] < time else squares[:, :, first : first + step]
            scores[..., :packed] -= error_variance(keys.packed, of_part) / 2
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if decay is not None:
            scores = scores + bias(decay, own, heads)
        visible = slot <= own[..., None]
        if start is not None:
            visible = visible & (slot >= start[:, None, None])
        # A query before its row's first key is padding and sees nothing, packed or not.
        held = keys.in_use()[:, None] & visible.any(-1, keepdim=True)
        visible = torch.cat((held, visible), -1)[:, None]
        largest = scores.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        weights = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp().masked_fill(~visible, 0.0)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1.0)
        if received is not None:
            of_slots = weights[..., packed:].sum(2)  # [B, Hq, slots]
            received += of_slots.unflatten(1, (received.shape[1], -1)).sum(2)
        if link is not None:
            none = weights.new_zeros(*weights.shape[:3], 1)
            index = link[:, None, None].expand(batch, heads, part.shape[2], -1)
            weights = torch.cat((weights, none), -1).gather(-1, index)
        outs.append(_weighted(weights, values, dtype))
    return torch.cat(outs, 2).to(q.dtype)


def _weighted(weights: Tensor, values: Side, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of the values, `[B, Hq, T, Dv]`."""
    out, done = None, 0
    for part in values.parts(dtype):
        share = weights[..., done : done + part.shape[2]]
        # Unused slots may hold anything, and 0 * NaN is NaN; the weights of used slots that are NaN stay NaN.
        used = (share != 0).any(2).any(1)[:, None, :, None]
        product = products(share, part.masked_fill(~used, 0.0), share.shape[2])
        out, done = product if out is None else out + product, done + part.shape[2]
    assert out is not None
    return out


def products(x: Tensor, y: Tensor, time: int) -> Tensor:
    """Multiply `[B, Hq, t, n]` by `[B, H, n, m]`, each head of y for the Hq / H heads of x that share it."""
    shared = x.reshape(x.shape[0], y.shape[1], -1, x.shape[-1]) @ y
    return shared.view(x.shape[0], x.shape[1], time, y.shape[-1])


def bias(decay: tuple[Tensor, Tensor | None], own: Tensor, heads: int) -> Tensor:
    """Return `c_i - c_j` `[B, Hq, t, S]` for the queries in the slots `own` `[B, t]`."""
    dense, packed = decay
    of_keys = dense if packed is None else torch.cat((packed.flatten(2), dense), -1)
    of_queries = dense.gather(2, own.clamp(min=0)[:, None].expand(-1, heads, -1))
    return of_queries[..., None] - of_keys[:, :, None]
