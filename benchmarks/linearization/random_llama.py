"""A Llama with random weights, created on its device."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def random_llama(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Draw the weights on the device in the dtype: eight billion take a GPU a moment, a CPU core two minutes."""
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
