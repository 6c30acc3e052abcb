"""Cache size of a variant's linearized layers in decoding, measured by filling their caches."""

from collections.abc import Sequence

import hydra
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measuring.configuration import compose
from lit_modules.networks.linearized import Linearization, linearize

HEAD_DIM = 64
TOKENS = 512  # more than any variant's window


def settings_of(overrides: Sequence[str]) -> Linearization:
    """Return the linearization settings of `experiment=liger/study` with a variant's overrides, for any kept layers."""
    cfg = compose("experiment=liger/study", "base=none", *overrides)
    return hydra.utils.instantiate(cfg.linearization, softmax_layers=[], _convert_="all")


@torch.no_grad()
def cache_bytes(settings: Linearization) -> int:
    """Return a linearized layer's cached bytes per key/value head of width 64, bfloat16 with float32 states."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HEAD_DIM,
        intermediate_size=HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = linearize(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), settings).eval()
    (layer,) = model(torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=True).past_key_values.layers
    rings = [ring for ring in (layer.ring_keys, layer.ring_values) if ring is not None]
    return sum(held.nbytes for held in (*rings, *layer.states, *layer.late))
