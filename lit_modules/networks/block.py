"""One pre-norm block: a token mixer and an optional SwiGLU."""

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers import MIXERS
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions
from lit_modules.networks.swiglu import SwiGLU


class Block(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`; modules are named as in Hugging Face's Llama."""

    def __init__(self, config: PalimpsestConfig, mixer: str):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = MIXERS[mixer](config)
        self.mlp = None
        if config.intermediate_size is not None:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden: Tensor, positions: Positions, cache: CacheLayerMixin | None = None, **shared: Tensor
    ) -> Tensor:
        """Map `[B, T, hidden_size]` to the same shape; `cache` is the mixer's or None; `shared` goes to the mixer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, cache, **shared)
        return hidden if self.mlp is None else hidden + self.mlp(self.post_attention_layernorm(hidden))
