"""Reference implementation in plain PyTorch, also used without CUDA."""

import torch
import torch.nn.functional as F
from torch import Tensor


def small_batch_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """Compute `small_batch_linear` for any number of rows, rounded like separate modules."""
    if norm_weight is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)
        x = norm_weight * wide.to(x.dtype)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y
