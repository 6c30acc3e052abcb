"""KL divergence of a student's next tokens from its teacher's, from hidden states and heads, chunk by chunk.

    divergence = c^2 KL(softmax(t / c) || softmax(z / c)),      z = h W^T, t = h' W'^T, c the temperature

in nats per token. The factor c^2 keeps the scale of the gradient in z, c (softmax(z / c) - softmax(t / c)), when c
changes. As in `linear_cross_entropy`, the forward pass computes the gradients. Only the student gets gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.settings import SettingError
from kernels.cross_entropy import IGNORE_INDEX, token_losses
from lit_modules.networks.linear_cross_entropy import (
    chunk_of,
    head_logits,
    logits_by_chunk,
    padded_weight,
    product_dtype,
    reduced_loss,
    summed_loss,
)


@dataclass(frozen=True)
class Teacher:
    """A teacher's hidden states, and its head padded and cast for the products."""

    hidden: Tensor
    padded: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> "Teacher":
        """Create one from hidden `[..., D']` and weight `[V, D']`."""
        hidden = hidden.detach().flatten(0, -2)
        return cls(hidden, padded_weight(weight, product_dtype(hidden)))

    def logits(self, part: slice) -> Tensor:
        return head_logits(self.hidden[part], self.padded)


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute `c^2 KL(teacher || student)` in nats, with gradients only for the student's `hidden` and `weight`.

    Args:
        hidden: `[..., D]`, the student's.
        weight: `[V, D]`, the student's head.
        teacher_hidden: `[..., D']`.
        teacher_weight: `[V, D']`.
        mask: `[...]` bool, tokens to include; all by default.
        temperature: c, used for both distributions.
        reduction: "mean" over the included tokens (0 if there are none), "sum", or "none".
        chunk_size: maximum tokens whose logits, of both models, are in memory at a time.

    Returns:
        A scalar, or for "none" the divergences `[...]`, 0 where masked, without gradient; float32 at least.

    Raises:
        ValueError: if shapes disagree, the temperature is not positive, or the reduction is unknown.
    """
    mask = _check(hidden, weight, mask)
    _check_teacher(hidden, weight, teacher_hidden, teacher_weight)
    flat_mask, vocab_size = mask.flatten(), weight.shape[0]
    with torch.no_grad():
        teacher = Teacher.of(teacher_hidden, teacher_weight)

    def losses(part: slice, logits: Tensor, gradient: bool) -> Tensor:
        return token_losses(
            logits,
            teacher_logits=teacher.logits(part).to(logits.dtype),
            mask=flat_mask[part],
            vocab_size=vocab_size,
            temperature=temperature,
            gradient=gradient,
        )[1]

    return reduced_loss(hidden, weight, losses, mask, reduction, chunk_of(hidden, weight, chunk_size, copies=2))


def linear_cross_entropy_and_kl(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    *,
    cross_entropy_weight: float = 1.0,
    kl_weight: float = 1.0,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute cross-entropy and divergence from one product with the student's head.

    Arguments are as in `linear_cross_entropy` and `linear_kl_divergence`. Each loss is the mean over its included
    tokens: targets other than -100, and the mask.

    Returns:
        (`cross_entropy_weight` cross-entropy + `kl_weight` divergence, then each loss, unweighted and without
        gradient).

    Raises:
        ValueError: if shapes disagree, or the temperature is not positive.
    """
    mask = _check(hidden, weight, mask)
    _check_teacher(hidden, weight, teacher_hidden, teacher_weight)
    if targets.shape != mask.shape:
        raise ValueError(f"targets are {list(targets.shape)} for hidden {list(hidden.shape)}: give targets [...]")
    flat_targets, flat_mask, vocab_size = targets.flatten(), mask.flatten(), weight.shape[0]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    counts = torch.stack(((targets != IGNORE_INDEX).sum(), mask.sum())).clamp(min=1)
    # Weights near 1 and one division at the end, because the gradients of single logits are in low precision.
    scale = counts.max()
    weights = torch.tensor([cross_entropy_weight, kl_weight], dtype=dtype, device=hidden.device) * scale / counts
    sums = torch.zeros(2, dtype=dtype, device=hidden.device)
    with torch.no_grad():
        teacher = Teacher.of(teacher_hidden, teacher_weight)

    def losses(part: slice, logits: Tensor, gradient: bool) -> Tensor:
        both = token_losses(
            logits,
            flat_targets[part],
            teacher.logits(part).to(logits.dtype),
            flat_mask[part],
            weights=weights,
            vocab_size=vocab_size,
            temperature=temperature,
            gradient=gradient,
        )
        sums.add_(both.sum(1))
        return (weights[:, None] * both).sum(0)  # no matrix product: autocast would round it

    total = summed_loss(hidden.flatten(0, -2), weight, losses, chunk_of(hidden, weight, chunk_size, copies=2))
    return total / scale, *(sums / counts)


def linear_top_k_kl(
    hidden: Tensor,
    weight: Tensor,
    indices: Tensor,
    log_probabilities: Tensor,
    mask: Tensor | None = None,
    *,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute KL(teacher || student) in nats from the teacher's top-k tokens K; the rest counts as one token.

        sum_{i in K} p_i log(p_i / q_i) + p_R log(p_R / q_R),      p_R = 1 - sum_{i in K} p_i, and q_R likewise

    This omits the divergence within the rest, p_R KL(p / p_R || q / q_R over the rest): a lower bound, exact for k = V.

    Args:
        hidden: `[..., D]`, the student's.
        weight: `[V, D]`, the student's head.
        indices: `[..., k]`, distinct tokens.
        log_probabilities: `[..., k]`, of these tokens in the teacher; rescaled if rounding brings their sum above 1.
        mask, reduction, chunk_size: as in `linear_kl_divergence`.

    Returns:
        As `linear_kl_divergence`.

    Raises:
        ValueError: if shapes disagree, or the reduction is unknown.
    """
    mask = _check(hidden, weight, mask)
    if indices.shape != log_probabilities.shape or indices.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"indices are {list(indices.shape)} and log_probabilities {list(log_probabilities.shape)} for hidden "
            f"{list(hidden.shape)}: give both [..., k] for hidden [..., D]"
        )
    flat_indices, flat_p, flat_mask = indices.flatten(0, -2), log_probabilities.detach().flatten(0, -2), mask.flatten()

    def losses(part: slice, logits: Tensor, gradient: bool) -> Tensor:
        return _top_k_losses(logits, flat_indices[part], flat_p[part], flat_mask[part], weight.shape[0], gradient)

    return reduced_loss(hidden, weight, losses, mask, reduction, chunk_of(hidden, weight, chunk_size, copies=2))


def _top_k_losses(
    logits: Tensor, indices: Tensor, log_p: Tensor, mask: Tensor, vocab_size: int, gradient: bool
) -> Tensor:
    """Return the losses `[n]`, and overwrite `logits` with their gradient.

    The gradient is q_i - p_i for the k tokens and (1 - p_R / q_R) q_i for the rest. The rest's sum is computed
    directly: 1 - sum q would lose it to rounding.
    """
    dtype, indices = torch.promote_types(logits.dtype, torch.float32), indices.long()
    log_p = log_p.to(dtype)
    mass = log_p.logsumexp(-1, keepdim=True)
    whole = log_p.shape[-1] == vocab_size
    log_p = log_p - (mass if whole else mass.clamp(min=0))
    rest = torch.zeros_like(mass) if whole else -torch.expm1(mass.clamp(max=0))
    z = logits[:, :vocab_size].to(dtype, copy=True)
    known = z.gather(-1, indices)
    z.scatter_(-1, indices, -torch.inf)
    unknown_sum = z.logsumexp(-1, keepdim=True)
    normalizer = torch.logaddexp(known.logsumexp(-1, keepdim=True), unknown_sum)
    log_q, log_q_rest = known - normalizer, unknown_sum - normalizer
    of_rest = torch.where(rest > 0, torch.xlogy(rest, rest) - rest * log_q_rest, 0)
    losses = (log_p.exp() * (log_p - log_q)).sum(-1) + of_rest[:, 0]
    if gradient:
        p, factor = log_p.exp(), 1 - torch.where(rest > 0, rest * (-log_q_rest).exp(), 0)
        slope = z.sub_(normalizer).exp_().mul_(factor).scatter_(-1, indices, log_q.exp() - p)
        torch.mul(slope, mask[:, None], out=logits[:, :vocab_size])
        logits[:, vocab_size:] = 0
    return losses * mask


@torch.no_grad()
def top_k_log_probabilities(
    hidden: Tensor, weight: Tensor, k: int, chunk_size: int | None = None, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Return the top-k tokens of each position: (log-probabilities `[..., k]` in `dtype`, indices `[..., k]` int32).

    hidden `[..., D]`, weight `[V, D]`; the likeliest token is first. Float16 log-probabilities have a relative error of
    0.05%.

    Raises:
        ValueError: if the vocabulary has fewer than k tokens.
    """
    vocab_size = weight.shape[0]
    _check(hidden, weight, None)
    if not 0 < k <= vocab_size:
        raise SettingError("k", k, f"give 1 to {vocab_size}", f"tokens of a vocabulary of {vocab_size}")
    padded, found = padded_weight(weight, product_dtype(hidden)), []
    chunk_size = chunk_of(hidden, weight, chunk_size, copies=2)
    for _, logits in logits_by_chunk(hidden.flatten(0, -2), padded, chunk_size):
        used = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        highest, chosen = used.topk(k, dim=-1)
        found.append(((highest - used.logsumexp(-1, keepdim=True)).to(dtype), chosen.int()))
    log_probabilities, indices = zip(*found, strict=True)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast's cat refuses another low-precision dtype
        both = torch.cat(log_probabilities), torch.cat(indices)
    return both[0].view(*hidden.shape[:-1], k), both[1].view(*hidden.shape[:-1], k)


def _check(hidden: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask, all True if None is given."""
    if hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(f"weight is {list(weight.shape)} for hidden {list(hidden.shape)}: give weight [V, D]")
    if mask is None:
        return torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:-1] or mask.dtype != torch.bool:
        raise ValueError(
            f"mask is {mask.dtype} {list(mask.shape)} for hidden {list(hidden.shape)}: give bool [...] for [..., D]"
        )
    return mask


def _check_teacher(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> None:
    if teacher_hidden.shape[:-1] != hidden.shape[:-1] or teacher_hidden.shape[-1] != teacher_weight.shape[-1]:
        raise ValueError(
            f"teacher_hidden is {list(teacher_hidden.shape)} and teacher_weight {list(teacher_weight.shape)} for "
            f"hidden {list(hidden.shape)}: give [..., D'] and [V, D'] for hidden [..., D]"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"the teacher's head has {teacher_weight.shape[0]} tokens and the student's {weight.shape[0]}: "
            "give two models of one tokenizer"
        )
