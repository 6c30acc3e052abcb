"""One pre-norm block: a token mixer, then a SwiGLU."""

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_modules.networks.mixers import MIXERS
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions

if TYPE_CHECKING:
    from lit_modules.networks.config import PalimpsestConfig


class SwiGLU(nn.Module):
    """`W_down (silu(W_gate x) * W_up x)` (arXiv 2002.05202), without biases."""

    def __init__(self, config: "PalimpsestConfig"):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to the same."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`; parts are named as in Hugging Face's Llama."""

    def __init__(self, config: "PalimpsestConfig", mixer: str):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = MIXERS[mixer](config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor, positions: Positions, cache: CacheLayerMixin | None = None) -> Tensor:
        """`[B, T, hidden_size]` to the same; `cache` is the mixer's own, or None."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
