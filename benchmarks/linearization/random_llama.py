"""A Llama with random weights, at once on the device that it is for."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def random_llama(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Its weights are drawn on the device and in the dtype: eight billion of them take a GPU a moment, a core of the
    host two minutes."""
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
