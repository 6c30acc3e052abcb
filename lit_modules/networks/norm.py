"""Root mean square normalization (arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        shape: the weight's shape: `(D,)`, or `(H, D)` for separate weights per head.
        eps: added to the mean square.
    """

    def __init__(self, *shape: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` `[..., *shape]`; statistics in float32 at least, result in x's dtype."""
        # The weight is applied outside: F.rms_norm leaves its fused kernel for a float32 weight with bf16 activations.
        return (F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight).to(x.dtype)
