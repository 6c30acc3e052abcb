"""A short causal convolution over time, one filter per channel (as in H3, arXiv 2212.14052, and Mamba)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_modules.networks.caches import RecurrentCacheLayer


class ShortConvolution(nn.Module):
    """`y_t = bias + sum_j weight_j x_{t-j}` over the last `width` tokens of the same document.

    Args:
        channels: number of filters; the weight is `[channels, width]`, with the newest token last.
        width: number of tokens that a filter sees.
        bias: add a bias per channel.
    """

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, index: Tensor, cache: RecurrentCacheLayer | None = None, name: str = "") -> Tensor:
        """Convolve `x` `[B, T, channels]` over time; products and sums in float32 at least, result in x's dtype.

        Args:
            index: `[B, T]`, position in the document, cached tokens included: nothing precedes position 0.
            cache: provides the previous inputs of `name` and stores the last ones.
        """
        past = self.weight.shape[1] - 1
        if cache is None:
            extended = F.pad(x, (0, 0, past, 0))
        else:
            extended = torch.cat((cache.update_tail(name, x, past), x), dim=1)
        return _Convolution.apply(extended, self.weight, self.bias, index)


class _Convolution(torch.autograd.Function):
    """Handwritten autograd: the backward pass keeps one copy of the inputs, not one per filter tap."""

    @staticmethod
    def forward(ctx: Any, extended: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        ctx.save_for_backward(extended, weight, index)
        ctx.has_bias = bias is not None
        length, width = index.shape[1], weight.shape[1]
        dtype = torch.promote_types(extended.dtype, torch.float32)
        out = torch.zeros((), dtype=dtype, device=extended.device) if bias is None else bias.to(dtype)
        for lag in range(width):
            start = width - 1 - lag
            seen = extended[:, start : start + length]
            if lag:
                seen = seen.masked_fill((index < lag)[..., None], 0)
            out = out + seen * weight[:, start].to(dtype)
        return out.to(extended.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        extended, weight, index = ctx.saved_tensors
        length, width = index.shape[1], weight.shape[1]
        grad_out = grad_out.to(torch.promote_types(grad_out.dtype, torch.float32))
        grad_extended = torch.zeros_like(extended, dtype=grad_out.dtype)
        grad_weight = []
        for lag in range(width - 1, -1, -1):
            start = width - 1 - lag
            part = grad_out.masked_fill((index < lag)[..., None], 0) if lag else grad_out
            grad_extended[:, start : start + length] += part * weight[:, start].to(part.dtype)
            grad_weight.append((part * extended[:, start : start + length]).sum((0, 1)))
        grad_bias = grad_out.sum((0, 1)).to(weight.dtype) if ctx.has_bias else None
        return grad_extended.to(extended.dtype), torch.stack(grad_weight, 1).to(weight.dtype), grad_bias, None
