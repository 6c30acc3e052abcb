"""Rotary position embedding (arXiv 2104.09864), pairing the two halves of a head as Hugging Face's Llama does."""

import torch
from torch import Tensor


def rotary_tables(index: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines `[B, T, head_dim]` float32 for the positions `index` `[B, T]`.

    Computed at each forward pass: a buffer would limit the length and would have to survive `from_pretrained`. Float32
    for any model dtype, so that the numbers equal stock Llama's.
    """
    exponent = torch.arange(0, head_dim, 2, device=index.device, dtype=torch.int64).float() / head_dim
    angle = index.float()[..., None] * (1.0 / base**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x` `[B, T, H, D]`, pairing channels (i, i + D/2); the result has x's dtype."""
    cosine, sine = (table[:, :, None].to(x.dtype) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
