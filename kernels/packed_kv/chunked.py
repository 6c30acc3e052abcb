"""Attention over packed tokens in PyTorch, segment by segment: for CPUs, float64, and soft-capped logits.

A segment of blocks is unpacked, attended to, and merged into the running softmax; never the whole past at once.
"""

import torch
from torch import Tensor

from kernels.packed_kv.formats import PackedPast
from kernels.packed_kv.reference import error_variance, unpack

MAX_SCORES = 1 << 24
"""Scores of one segment, over all rows, heads and queries."""


class RunningSoftmax:
    """The softmax over the segments so far: maximum, sum and weighted values of each query.

    Args:
        q: `[B, Hq, T, Dk]`.
        scale: factor on the logits.
        softcap: logits become `softcap * tanh(logit / softcap)`; None leaves them.
    """

    def __init__(self, q: Tensor, scale: float, softcap: float | None):
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.scale, self.softcap = q.to(self.dtype), scale, softcap
        self.largest = self.q.new_full((*q.shape[:3], 1), -torch.inf)
        self.total = self.q.new_zeros(*q.shape[:3], 1)
        self.out: Tensor | None = None

    def add(
        self, keys: Tensor, values: Tensor, visible: Tensor, bias: Tensor | None, excess: Tensor | None = None
    ) -> None:
        """Add keys `[B, Hk, S, Dk]` and values `[B, Hv, S, Dv]`.

        Args:
            visible: bool, broadcastable to `[B, Hq, T, S]`. Hidden slots may hold anything.
            bias: `[B, Hq, T, S]`, added to the logits, or None.
            excess: `[B, Hq, T or 1, S]`, taken from the logits before they are capped, or None.
        """
        keys, values = keys.to(self.dtype), values.to(self.dtype)
        used = visible.any(-2)
        values = values.masked_fill(~(used.any(1, keepdim=True) if used.shape[1] > 1 else used)[..., None], 0.0)
        scores = _by_head(self.q, keys.shape[1]) @ keys.mT * self.scale
        scores = scores.view(*self.q.shape[:3], -1)
        if excess is not None:
            scores = scores - excess
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~visible, -torch.inf)
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        # -inf - -inf is NaN: a query that has seen nothing yet uses the reference 0.
        reference = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (scores - reference).exp()
        shrink = (self.largest - reference).exp()
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        new = (_by_head(weights, values.shape[1]) @ values).view(*self.q.shape[:3], -1)
        self.out = new if self.out is None else self.out * shrink + new
        self.largest = largest

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output `[B, Hq, T, Dv]`, 0 for a query that saw nothing, and its lse `[B, Hq, T]`."""
        assert self.out is not None
        safe = self.total.masked_fill(self.total == 0, 1.0)
        return self.out / safe, (self.largest + safe.log())[..., 0]


def attend_past(
    q: Tensor,
    past: PackedPast,
    query_decay: Tensor | None,
    scale: float,
    softcap: float | None,
    squares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend to all packed tokens.

    Args:
        q: `[B, Hq, T, D]`, not rotated.
        past: the packed tokens.
        query_decay: `[B, Hq, T]`, the sum of the log gates up to each query, or None.
        scale: factor on the logits.
        softcap: see `RunningSoftmax`.
        squares: of `read_squares`, if `past.debias`.

    Returns:
        Output `[B, Hq, T, Dv]`, in float32 at least, and lse `[B, Hq, T]`, -inf where a row has no packed token.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if past.key_rotation is not None:
        q = q.to(dtype) @ past.key_rotation.to(dtype)
    softmax = RunningSoftmax(q, scale, softcap)
    block, blocks = past.keys.block, int(past.blocks.max())
    step = max(1, MAX_SCORES // (q[..., 0].numel() * block))
    for start in range(0, max(blocks, 1), step):
        stop = min(start + step, max(blocks, 1))
        packed_keys, packed_values = (
            side.map(lambda x, begin=start, end=stop: x[:, :, begin:end])  # type: ignore[misc]  # mypy infers no lambda with defaults
            for side in (past.keys, past.values)
        )
        keys, values = unpack(packed_keys, dtype), unpack(packed_values, dtype)
        slot = torch.arange(start * block, stop * block, device=q.device)
        visible = (slot < block * past.blocks[:, None])[:, None, None]
        bias = None
        if query_decay is not None:
            assert past.decay is not None
            bias = query_decay[..., None] - past.decay[:, :, start:stop].flatten(2)[:, :, None]
        excess = None if squares is None else error_variance(packed_keys, squares) / 2
        softmax.add(keys, values, visible, bias, excess)
    out, lse = softmax.result()
    return (out if past.value_rotation is None else out @ past.value_rotation.to(dtype).mT), lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge two outputs `[..., D]` over disjoint keys, by their lse `[...]`, into one softmax."""
    largest = torch.maximum(lse, other_lse)
    reference = largest.masked_fill(largest == -torch.inf, 0.0)
    one, two = (lse - reference).exp()[..., None], (other_lse - reference).exp()[..., None]
    total = one + two
    return (one * out + two * other) / total.masked_fill(total == 0, 1.0)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return `x` `[B, Hq, T, C]` as `[B, heads, Hq / heads * T, C]`."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])
