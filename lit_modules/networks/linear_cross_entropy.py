"""Cross-entropy of a linear head with the logits of only a few tokens in memory at a time.

For logits `z = h W^T` and a target y, the loss of a token is `logsumexp(z) - z_y`, and its gradient in z is
`softmax(z) - onehot(y)`. Both follow from a chunk's logits, so the forward pass computes and keeps dh and dW chunk by
chunk, and the backward pass only scales them. The same holds for any loss that is a sum over tokens of a function of
the logits: `summed_loss` takes the function.

GPU matrix products lose most of their speed if rows are not aligned, as with 50,257 tokens. The products therefore use
a copy of W with zero rows up to a multiple of 64, and the loss ignores the extra columns.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.settings import SettingError
from kernels.cross_entropy import IGNORE_INDEX, token_losses

__all__ = ["IGNORE_INDEX", "LOGITS_AT_ONCE", "linear_cross_entropy"]

LOGITS_AT_ONCE = 2**26
"""Logits in memory at a time, by default: 256 MiB of float32. 16-bit logits on a GPU may be twice as many."""

ALIGNMENT = 64

TokenLosses = Callable[[slice, Tensor, bool], Tensor]
"""(tokens, their logits `[n, P]`, whether to overwrite the logits with the losses' gradient) -> losses `[n]`."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str = "mean", chunk_size: int | None = None
) -> Tensor:
    """Compute the cross-entropy of `hidden @ weight.T` against `targets`.

    Products use the autocast dtype if autocast is on. Softmax, loss and the gradient of `weight` accumulate in float32
    at least.

    Args:
        hidden: `[..., D]`.
        weight: `[V, D]`.
        targets: `[...]` int64, from 0 to V - 1, or -100 to ignore a token.
        reduction: "mean" over the tokens that are not ignored (0 if there are none), "sum", or "none".
        chunk_size: maximum tokens whose logits are in memory at a time; default `LOGITS_AT_ONCE` / V.

    Returns:
        A scalar, or for "none" the losses `[...]`, 0 where ignored, float32 at least. "none" carries no gradient, and
        second derivatives are not available.

    Raises:
        ValueError: if shapes disagree, or the reduction is unknown.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"targets are {list(targets.shape)} and weight {list(weight.shape)} for hidden {list(hidden.shape)}: "
            "give targets [...] and weight [V, D] for hidden [..., D]"
        )
    flat_targets, vocab_size = targets.flatten(), weight.shape[0]

    def losses(part: slice, logits: Tensor, gradient: bool) -> Tensor:
        return token_losses(logits, flat_targets[part], vocab_size=vocab_size, gradient=gradient)[0]

    chunk_size = chunk_of(hidden, weight, chunk_size)
    return reduced_loss(hidden, weight, losses, targets != IGNORE_INDEX, reduction, chunk_size)


def reduced_loss(
    hidden: Tensor, weight: Tensor, losses: TokenLosses, counted: Tensor, reduction: str, chunk_size: int
) -> Tensor:
    """Reduce the losses of hidden `[..., D]` as `linear_cross_entropy` does; `counted` is `[...]` bool."""
    if reduction not in ("mean", "sum", "none"):
        raise SettingError("reduction", reduction, "give mean, sum or none", "is not known")
    flat_hidden = hidden.flatten(0, -2)
    if reduction == "none":
        with torch.no_grad():
            padded = padded_weight(weight, product_dtype(hidden))
            chunks = logits_by_chunk(flat_hidden, padded, chunk_size)
            return torch.cat([losses(part, logits, False) for part, logits in chunks]).view(hidden.shape[:-1])
    total = summed_loss(flat_hidden, weight, losses, chunk_size)
    return total / counted.sum().clamp(min=1) if reduction == "mean" else total


def summed_loss(hidden: Tensor, weight: Tensor, losses: TokenLosses, chunk_size: int) -> Tensor:
    """Return the sum of `losses` over the tokens of hidden `[N, D]`, with gradients in hidden and weight."""
    return _SummedLoss.apply(hidden, weight, losses, chunk_size)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, losses: TokenLosses, chunk_size: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=accumulator, device=hidden.device)
        padded = padded_weight(weight, product_dtype(hidden))
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(padded, dtype=accumulator) if needs_weight else None
        for part, logits in logits_by_chunk(hidden, padded, chunk_size):
            total += losses(part, logits, needs_hidden or needs_weight).sum()
            with torch.autocast(hidden.device.type, enabled=False):
                if grad_hidden is not None:
                    grad_hidden[part] = logits @ padded
                if grad_weight is not None:
                    grad_weight += logits.T @ hidden[part].to(padded.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        if grad_weight is not None:
            # Scale, slice and cast in one operation, because this is the largest tensor.
            scaled = grad_weight.new_empty(ctx.weight_shape, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight[: ctx.weight_shape[0]], grad_total, out=scaled)
        return grad_hidden, grad_weight, None, None


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the head's products with `hidden`."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def padded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`, with zero rows up to a multiple of ALIGNMENT."""
    missing = -weight.shape[0] % ALIGNMENT
    if not missing:
        return weight.detach().to(dtype)
    padded = weight.new_empty(weight.shape[0] + missing, weight.shape[1], dtype=dtype)
    padded[: weight.shape[0]].copy_(weight.detach())
    padded[weight.shape[0] :].zero_()
    return padded


def chunk_of(hidden: Tensor, weight: Tensor, asked: int | None, copies: int = 1) -> int:
    """Return the tokens per chunk, at most `asked`, if `copies` tensors of logits are in memory.

    Above ALIGNMENT it is a multiple of it.
    """
    vocab_size = weight.shape[0] + -weight.shape[0] % ALIGNMENT
    held = LOGITS_AT_ONCE * (2 if hidden.is_cuda and product_dtype(hidden).itemsize == 2 else 1)
    tokens = asked or max(1, held // (vocab_size * copies))
    return tokens - tokens % ALIGNMENT if tokens > ALIGNMENT else tokens


def logits_by_chunk(hidden: Tensor, padded: Tensor, chunk_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk's slice of hidden `[N, D]` and its logits `[n, P]` with the padded weight, in its dtype."""
    for start in range(0, max(1, hidden.shape[0]), chunk_size):
        part = slice(start, start + chunk_size)
        yield part, head_logits(hidden[part], padded)


def head_logits(hidden: Tensor, padded: Tensor) -> Tensor:
    """Return `hidden @ padded.T` in the padded weight's dtype, regardless of autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(padded.dtype), padded)
