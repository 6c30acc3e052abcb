"""Cross-entropy of a linear head, without the logits of more than a few tokens at a time.

For logits `z = h W^T` and a target y, the loss of a token is `logsumexp(z) - z_y`, and its gradient in z is
`softmax(z) - onehot(y)`. Both are known as soon as a chunk's logits are, so the forward pass computes dh and dW chunk
by chunk and keeps them: the backward pass has nothing left to do but to scale.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

LOGITS_AT_ONCE = 2**26
"""Logits held at a time, by default: 256 MiB of float32."""


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
        chunk_size: tokens whose logits are held at a time; default `LOGITS_AT_ONCE` / V.

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
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not known: give mean, sum or none")
    chunk_size = chunk_size or max(1, LOGITS_AT_ONCE // weight.shape[0])
    flat_hidden, flat_targets = hidden.flatten(0, -2), targets.flatten()
    if reduction == "none":
        with torch.no_grad():
            losses = [loss for _, loss, _ in _chunks(flat_hidden, weight, flat_targets, chunk_size)]
            return torch.cat(losses).view(targets.shape)
    total = _SummedLoss.apply(flat_hidden, weight, flat_targets, chunk_size)
    if reduction == "mean":
        total = total / (targets != IGNORE_INDEX).sum().clamp(min=1)
    return total


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=accumulator, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=accumulator) if needs_weight else None
        low_weight = weight.to(_matmul_dtype(hidden))
        for part, losses, logits in _chunks(hidden, low_weight, targets, chunk_size):
            total += losses.sum()
            if not (needs_hidden or needs_weight):
                continue
            grad_logits = _logits_gradient(logits, targets[part]).to(low_weight.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                if needs_hidden:
                    grad_hidden[part] = grad_logits @ low_weight
                if needs_weight:
                    grad_weight += grad_logits.T @ hidden[part].to(low_weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_total).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int):
    """Yield each chunk's slice, losses `[n]`, and `log softmax(z)` `[n, V]`, the last two float32 at least."""
    dtype = _matmul_dtype(hidden)
    weight = weight.to(dtype)
    for start in range(0, max(1, hidden.shape[0]), chunk_size):
        part = slice(start, start + chunk_size)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden[part].to(dtype) @ weight.T
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        logits -= logits.logsumexp(-1, keepdim=True)
        ignored = targets[part] == IGNORE_INDEX
        picked = logits.gather(-1, targets[part].masked_fill(ignored, 0)[:, None])[:, 0]
        yield part, (-picked).masked_fill(ignored, 0), logits


def _logits_gradient(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """`softmax(z) - onehot(y)`, zero where the target is left out; overwrites its input."""
    ignored = targets == IGNORE_INDEX
    gradient = log_probabilities.exp_()
    one = torch.ones_like(gradient[:, :1])
    gradient.scatter_add_(-1, targets.masked_fill(ignored, 0)[:, None], -one)
    return gradient.masked_fill_(ignored[:, None], 0)
