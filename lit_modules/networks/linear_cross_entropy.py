"""Cross-entropy of a linear head, without the logits of more than a few tokens at a time.

For logits `z = h W^T` and a target y, the loss of a token is `logsumexp(z) - z_y`, and its gradient in z is
`softmax(z) - onehot(y)`. Both are known as soon as a chunk's logits are, so the forward pass computes dh and dW chunk
by chunk and keeps them: the backward pass has nothing left to do but to scale. What is said here of cross-entropy holds
for any loss that is a sum over tokens of a function of the logits: `summed_loss` takes the function.

Matrix products of a GPU lose most of their speed where rows are not aligned, as with 50,257 tokens: W gets rows of
zeros up to a multiple of 64 in the copy that the products work on, and the loss leaves the columns they make out.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cross_entropy import IGNORE_INDEX, token_losses

__all__ = ["IGNORE_INDEX", "LOGITS_AT_ONCE", "linear_cross_entropy"]

LOGITS_AT_ONCE = 2**26
"""Logits held at a time, by default: 256 MiB of float32. Twice as many are, where they never become float32."""

ALIGNMENT = 64

TokenLosses = Callable[[slice, Tensor, bool], Tensor]
"""(which tokens, their logits `[n, P]`, whether to overwrite those with the losses' gradient) -> losses `[n]`."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str = "mean", chunk_size: int | None = None
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against `targets`.

    Products are taken in the autocast dtype where autocast is on; softmax, loss and the gradient of `weight` are
    accumulated in float32 at least.

    Args:
        hidden: `[..., D]`.
        weight: `[V, D]`.
        targets: `[...]` int64, from 0 to V - 1, or -100 to leave a token out.
        reduction: "mean" over the tokens that count (0 when there is none), "sum", or "none".
        chunk_size: tokens whose logits are held at a time, at most; default `LOGITS_AT_ONCE` / V.

    Returns:
        A scalar, or for "none" the losses `[...]`, 0 where left out, float32 at least. "none" carries no gradient,
        and a gradient cannot be differentiated again.

    Raises:
        ValueError: for shapes that do not agree, or another reduction.
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
    """The losses of the tokens of hidden `[..., D]`, reduced as in `linear_cross_entropy`; `counted` `[...]` bool."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not known: give mean, sum or none")
    flat_hidden = hidden.flatten(0, -2)
    if reduction == "none":
        with torch.no_grad():
            padded = padded_weight(weight, product_dtype(hidden))
            chunks = logits_by_chunk(flat_hidden, padded, chunk_size)
            return torch.cat([losses(part, logits, False) for part, logits in chunks]).view(hidden.shape[:-1])
    total = summed_loss(flat_hidden, weight, losses, chunk_size)
    return total / counted.sum().clamp(min=1) if reduction == "mean" else total


def summed_loss(hidden: Tensor, weight: Tensor, losses: TokenLosses, chunk_size: int) -> Tensor:
    """The sum of `losses` over the tokens of hidden `[N, D]`, with gradients in hidden and weight."""
    return _SummedLoss.apply(hidden, weight, losses, chunk_size)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, losses: TokenLosses, chunk_size: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=accumulator, device=hidden.device)
        padded = padded_weight(weight, product_dtype(hidden))
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(padded, dtype=accumulator) if needs_weight else None
        for part, logits in logits_by_chunk(hidden, padded, chunk_size):
            total += losses(part, logits, needs_hidden or needs_weight).sum()
            with torch.autocast(hidden.device.type, enabled=False):
                if needs_hidden:
                    grad_hidden[part] = logits @ padded
                if needs_weight:
                    grad_weight += logits.T @ hidden[part].to(padded.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        if grad_weight is not None:
            # Scaled, cut and rounded in one go: it is the largest tensor of all.
            scaled = grad_weight.new_empty(ctx.weight_shape, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight[: ctx.weight_shape[0]], grad_total, out=scaled)
        return grad_hidden, grad_weight, None, None


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which the head's products with `hidden` are taken."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def padded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, with rows of zeros up to a multiple of ALIGNMENT; itself where it is so already."""
    missing = -weight.shape[0] % ALIGNMENT
    if not missing:
        return weight.detach().to(dtype)
    padded = weight.new_empty(weight.shape[0] + missing, weight.shape[1], dtype=dtype)
    padded[: weight.shape[0]].copy_(weight.detach())
    padded[weight.shape[0] :].zero_()
    return padded


def chunk_of(hidden: Tensor, weight: Tensor, asked: int | None, copies: int = 1) -> int:
    """How many tokens to take at a time, `asked` at most, where so many tensors of their logits are held: of more than
    ALIGNMENT tokens a multiple of it."""
    vocab_size = weight.shape[0] + -weight.shape[0] % ALIGNMENT
    held = LOGITS_AT_ONCE * (2 if hidden.is_cuda and product_dtype(hidden).itemsize == 2 else 1)
    tokens = asked or max(1, held // (vocab_size * copies))
    return tokens - tokens % ALIGNMENT if tokens > ALIGNMENT else tokens


def logits_by_chunk(hidden: Tensor, padded: Tensor, chunk_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk's slice of hidden `[N, D]`, and its logits `[n, P]` with the padded weight, in its dtype."""
    for start in range(0, max(1, hidden.shape[0]), chunk_size):
        part = slice(start, start + chunk_size)
        yield part, head_logits(hidden[part], padded)


def head_logits(hidden: Tensor, padded: Tensor) -> Tensor:
    """`hidden @ padded.T` in the padded weight's dtype, autocast or not."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(padded.dtype), padded)
