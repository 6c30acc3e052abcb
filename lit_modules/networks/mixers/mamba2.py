"""Mamba-2 (arXiv 2405.21060): a state space with one decay per head, and keys and queries shared by all heads."""

import math
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

STEP_SIZES = (1e-3, 0.1)
"""Range of the initial step sizes, log-uniform."""

DECAY_RATES = (1.0, 16.0)
"""Range of the initial decay rates `exp(A_log)`, uniform."""


class Mamba2(RecurrentMixer):
    """`S_t = exp(-dt_t exp(A_log)) S_{t-1} + B_t^T (dt_t x_t)`, `y_t = C_t S_t + D x_t`.

    `dt` is `softplus(W hidden + dt_bias)`, one step size per head. `x`, `B` and `C` come from a short convolution and a
    `silu`. The output is `norm(y silu(z))`, over all heads together. All heads share `B` and `C`.
    """

    expand_value = 2
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        heads, key_dim, value_dim = self.shape
        inner = heads * value_dim
        self.parts = (inner, inner + 2 * key_dim, heads)
        self.in_proj = nn.Linear(config.hidden_size, sum(self.parts), bias=False)
        self.convolutions = self.new_convolutions(config, bias=True, xBC=inner + 2 * key_dim)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(3))
        self.norm = RMSNorm(inner, eps=config.norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @classmethod
    def default_key_dim(cls, value_dim: int) -> int:
        """Return 128."""
        return 128

    def forward(self, hidden: Tensor, positions: Positions, cache: RecurrentCacheLayer | None = None) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; a cache provides the earlier tokens and is updated."""
        heads, key_dim, value_dim = self.shape
        z, projected, dt = self.in_proj(hidden).split(self.parts, dim=-1)
        mixed = F.silu(self.convolve({"xBC": projected}, positions, cache)["xBC"])
        x, keys, queries = mixed.split((heads * value_dim, key_dim, key_dim), dim=-1)
        x = x.unflatten(-1, (heads, value_dim))
        dt = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + self.dt_bias)
        out = self.operation(forms.mamba2(x, dt, self.A_log, keys[:, :, None], queries[:, :, None]), positions, cache)
        y = forms.mamba2_output(out, x, self.D).flatten(2)
        return self.out_proj(self.norm(y * F.silu(z)))

    def initial_values(self) -> dict[str, Tensor]:
        """Return initial `A_log`, `dt_bias` and `D` `[H]`: random as in the authors' code, and ones for `D`."""
        rates = torch.empty_like(self.A_log).uniform_(*DECAY_RATES)
        steps = torch.empty_like(self.dt_bias).uniform_(*(math.log(size) for size in STEP_SIZES)).exp()
        inverse_softplus = steps + torch.log(-torch.expm1(-steps))
        return {"A_log": rates.log(), "dt_bias": inverse_softplus, "D": torch.ones_like(self.D)}
