"""A separate linear map per head."""

import torch
from torch import Tensor, nn


class HeadwiseLinear(nn.Module):
    """`y_h = W_h x_h` for every head h, without biases.

    Args:
        heads: number of heads, H.
        in_features, out_features: size of a head at input and output; the weight is `[H, out_features, in_features]`.
    """

    def __init__(self, heads: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., H, in_features]` to `[..., H, out_features]`."""
        return torch.einsum("...hi,hoi->...ho", x, self.weight)
