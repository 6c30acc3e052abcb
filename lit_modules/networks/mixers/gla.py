"""Gated linear attention (arXiv 2312.06635): one decay per key channel, from a low-rank gate."""

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gated_recurrence import forms
from lit_modules.networks.caches import RecurrentCacheLayer
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.recurrent import RecurrentMixer
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions

TEMPERATURE = 16
"""Divisor of the log gates (section 4.4)."""


class GLA(RecurrentMixer):
    """`S_t = G_t S_{t-1} + k_t^T v_t`, `o_t = q_t S_t / sqrt(Dk)`, with `G = sigmoid(W_2 W_1 x + b)^(1/16)`.

    Each head of the output is normalized and multiplied by `silu(W_g x)`. With short convolutions, queries, keys and
    values pass through a `silu`.
    """

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        width, (heads, key_dim, value_dim) = config.hidden_size, self.shape
        self.temperature = config.gate_temperature or TEMPERATURE
        self.q_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.g_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.decay_down_proj = nn.Linear(width, config.gate_rank, bias=False)
        self.decay_up_proj = nn.Linear(config.gate_rank, heads * key_dim)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)
        self.o_norm = RMSNorm(value_dim, eps=config.norm_eps)
        self.convolutions = self.new_convolutions(config, q=heads * key_dim, k=heads * key_dim, v=heads * value_dim)

    @classmethod
    def default_key_dim(cls, value_dim: int) -> int:
        """Return half the width of the values."""
        return max(1, value_dim // 2)

    def forward(self, hidden: Tensor, positions: Positions, cache: RecurrentCacheLayer | None = None) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; a cache provides the earlier tokens and is updated."""
        x = {"q": self.q_proj(hidden), "k": self.k_proj(hidden), "v": self.v_proj(hidden)}
        if self.convolutions is not None:
            x = {name: F.silu(out) for name, out in self.convolve(x, positions, cache).items()}
        logits = self.decay_up_proj(self.decay_down_proj(hidden))
        q, k, v, logits = (y.unflatten(-1, (self.shape.heads, -1)) for y in (*x.values(), logits))
        inputs = forms.gla(q, k, v, logits, temperature=self.temperature)
        out = self.o_norm(self.operation(inputs, positions, cache, scale=self.shape.key_dim**-0.5))
        return self.o_proj(F.silu(self.g_proj(hidden)) * out.flatten(2))
