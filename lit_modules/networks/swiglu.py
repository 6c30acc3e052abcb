"""SwiGLU, for the feed-forward half of a block and for augmented queries."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """`W_down (silu(W_gate x) * W_up x)` (arXiv 2002.05202), without biases.

    Args:
        width: size of the input and of the output.
        inner_width: size of the hidden layer.
    """

    def __init__(self, width: int, inner_width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., width]` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
