"""Cross-entropy and KL divergence of a language model's logits; the gradient overwrites the logits."""

import torch
from torch import Tensor

from kernels.cross_entropy.reference import IGNORE_INDEX, reference_token_losses

__all__ = ["IGNORE_INDEX", "reference_token_losses", "token_losses"]


def token_losses(
    logits: Tensor,
    targets: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    gradient: bool = True,
) -> Tensor:
    """Compute each token's cross-entropy and KL divergence; overwrite `logits` with their weighted sum's gradient.

    With z a token's logits, t its teacher's, y its target and c the temperature:

        cross-entropy = logsumexp(z) - z_y          divergence = c^2 KL(softmax(t / c) || softmax(z / c))

    in nats. c^2 keeps the size of the divergence's gradient, c (softmax(z / c) - softmax(t / c)), nearly constant in c.
    Softmax and sums are float32 or wider.

    Args:
        logits: `[N, P]`, rows contiguous; columns from vocab_size on are padding and ignored.
        targets: `[N]` int64 below vocab_size, or -100 to leave a token out of the cross-entropy.
        teacher_logits: `[N, P]`, finite; for the divergence.
        mask: `[N]` bool, the tokens that count in the divergence; all by default.
        weights: `[2]`, weights of cross-entropy and divergence in the gradient; 1 and 1 by default.
        vocab_size: default P.
        temperature: of both distributions of the divergence.
        gradient: overwrite `logits` with the gradient, 0 in the padding; otherwise leave them unchanged.

    Returns:
        `[2, N]` cross-entropies and divergences, float32 or wider; 0 where left out, or without targets or a teacher.
        An out-of-range target gives NaN on a GPU; elsewhere PyTorch raises.

    Raises:
        ValueError: the shapes do not agree, or the temperature is not positive.
    """
    vocab_size = vocab_size or logits.shape[-1]
    _check(logits, targets, teacher_logits, mask, vocab_size, temperature)
    if weights is None:
        weights = torch.ones(2, device=logits.device)
    if logits.is_cuda and logits.dtype.itemsize <= 4:
        from kernels.cross_entropy.triton_token_losses import fused_token_losses

        return fused_token_losses(logits, targets, teacher_logits, mask, weights, vocab_size, temperature, gradient)
    return reference_token_losses(logits, targets, teacher_logits, mask, weights, vocab_size, temperature, gradient)


def _check(
    logits: Tensor,
    targets: Tensor | None,
    teacher_logits: Tensor | None,
    mask: Tensor | None,
    vocab_size: int,
    temperature: float,
) -> None:
    if logits.ndim != 2 or not 0 < vocab_size <= logits.shape[1] or not (logits.shape[0] < 2 or logits.stride(1) == 1):
        raise ValueError(
            f"logits are {list(logits.shape)} of strides {logits.stride()} for a vocabulary of {vocab_size}: give "
            "[N, P], P vocab_size or more, rows contiguous"
        )
    tokens = {"targets": targets, "mask": mask}
    for name, tensor in tokens.items():
        if tensor is not None and tensor.shape != logits.shape[:1]:
            raise ValueError(f"{name} is {list(tensor.shape)} for logits {list(logits.shape)}: give [N]")
    if teacher_logits is not None and teacher_logits.shape != logits.shape:
        raise ValueError(
            f"teacher_logits are {list(teacher_logits.shape)} for logits {list(logits.shape)}: give the same shape"
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} is not positive: give 1.0 for the models' own distributions")
