"""HGRN2 (arXiv 2404.07904): linear attention with keys 1 - f, where f are forget gates with lower bounds."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gated_recurrence import forms
from lit_modules.networks.caches import RecurrentCacheLayer
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.recurrent import RecurrentMixer
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions


class HGRN2(RecurrentMixer):
    """`S_t = f_t S_{t-1} + (1 - f_t)^T i_t`, `o_t = silu(q_t) S_t / sqrt(Dk)`, with `f = bound + (1 - bound) sigmoid`.

    The output is normalized over all heads together. Without short convolutions the layer has four matrices, as
    attention, and the norm's weight.
    """

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        width, (heads, key_dim, value_dim) = config.hidden_size, self.shape
        self.q_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.f_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.i_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)
        self.o_norm = RMSNorm(heads * value_dim, eps=config.norm_eps)
        self.convolutions = self.new_convolutions(config, q=heads * key_dim, f=heads * key_dim, i=heads * value_dim)

    def forward(
        self,
        hidden: Tensor,
        positions: Positions,
        cache: RecurrentCacheLayer | None = None,
        lower_bound: Tensor | None = None,
    ) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; a cache provides the earlier tokens and is updated.

        Args:
            lower_bound: lower bounds of the forget gates, `[H, Dk]` from 0 to 1, float32 at least; None means 0.
        """
        projected = {"q": self.q_proj(hidden), "f": self.f_proj(hidden), "i": self.i_proj(hidden)}
        q, f, i = self.convolve(projected, positions, cache).values()
        heads = self.shape.heads
        q, f, i = (x.unflatten(-1, (heads, -1)) for x in (F.silu(q), f, i))
        inputs = forms.hgrn2(q, f, i, lower_bound=0.0 if lower_bound is None else lower_bound)
        out = self.operation(inputs, positions, cache, scale=self.shape.key_dim**-0.5)
        return self.o_proj(self.o_norm(out.flatten(2)))


class LowerBounds(nn.Module):
    """Lower bounds of all layers, rising with depth: the cumulative sum of a softmax over layers, from the second.

    Args:
        layers: HGRN2 layers of the model, at least 2. The first has the bound 0.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(self, config: PalimpsestConfig, layers: int):
        super().__init__()
        heads, key_dim, _ = HGRN2.state_shape(config)
        self.logits = nn.Parameter(torch.empty(layers, heads, key_dim))

    def forward(self) -> tuple[Tensor, ...]:
        """Return the bounds `[H, Dk]` of every layer, float32 at least."""
        shares = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).softmax(0)
        return (shares.cumsum(0) - shares[0]).unbind(0)
