"""Cross-entropy and KL divergence of logits with their gradient, in plain PyTorch: the reference, also used on CPUs."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def reference_token_losses(
    logits: Tensor,
    targets: Tensor | None,
    teacher_logits: Tensor | None,
    mask: Tensor | None,
    weights: Tensor,
    vocab_size: int,
    temperature: float,
    gradient: bool,
) -> Tensor:
    """Compute `token_losses` in any dtype, with at most three further tensors of the logits' size."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.zeros(2, logits.shape[0], dtype=dtype, device=logits.device)
    used, total = logits[:, :vocab_size], None
    if teacher_logits is not None:
        losses[1], total = _divergence(used, teacher_logits[:, :vocab_size], mask, weights[1], temperature, gradient)
    if targets is not None:
        losses[0], own = _cross_entropy(used, targets, weights[0], gradient)
        total = own if total is None or own is None else total.add_(own)
    if gradient:
        logits.zero_() if total is None else used.copy_(total)
        logits[:, vocab_size:] = 0
    return losses


def _cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    ignored = targets == IGNORE_INDEX
    safe = targets.masked_fill(ignored, 0)[:, None]
    log_q = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = (-log_q.gather(-1, safe)[:, 0]).masked_fill(ignored, 0)
    if not gradient:
        return losses, None
    total = log_q.exp_()
    total.scatter_add_(-1, safe, torch.full_like(total[:, :1], -1))
    return losses, total.mul_(weight.to(total.dtype) * ~ignored[:, None])


def _divergence(
    logits: Tensor, teacher_logits: Tensor, mask: Tensor | None, weight: Tensor, temperature: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_q, log_p = (torch.log_softmax(x.to(dtype) / temperature, -1) for x in (logits, teacher_logits))
    losses = temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    factor = weight.to(dtype).expand(losses.shape)
    if mask is not None:
        losses, factor = losses * mask, factor * mask
    if not gradient:
        return losses, None
    return losses, log_q.exp_().sub_(log_p.exp_()).mul_(temperature * factor[:, None])
