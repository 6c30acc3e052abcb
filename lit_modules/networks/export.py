"""Write a trained model as a Hugging Face folder, with a stock architecture if possible."""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from common.atomic_files import replace_atomically
from lit_modules.networks.causal_lm import PalimpsestForCausalLM
from lit_modules.networks.config import PalimpsestConfig


def export_pretrained(model: PalimpsestForCausalLM, folder: str | Path) -> Path:
    """Write `config.json`, `generation_config.json` and safetensors to `folder`, replacing its content atomically.

    With RoPE, no other switch and equal numbers of key and value heads, the model is written as a LLaMA, and the folder
    loads without this project. Otherwise `AutoModelForCausalLM.from_pretrained` needs `import lit_modules.networks`.
    """
    folder = Path(folder)
    with replace_atomically(folder) as partial:
        (as_llama(model) if is_llama(model.config) else model).save_pretrained(partial)
    return folder


def is_llama(config: PalimpsestConfig) -> bool:
    """Return whether the architecture is exactly Hugging Face's Llama."""
    _, key_heads, value_heads = config.head_counts
    beyond = (
        config.qk_norm,
        config.output_gate,
        config.output_norm,
        config.kv_shift,
        key_heads != value_heads,
        config.cached_key_dim != config.head_dim,
        config.augmented_query_dim is not None,
        config.intermediate_size is None,
    )
    attention_only = set(config.layer_mixers) == {"attention"}
    return config.rope and config.forget_gate == "none" and attention_only and not any(beyond)


def as_llama(model: PalimpsestForCausalLM) -> PreTrainedModel:
    """Return a `LlamaForCausalLM` that shares the model's parameters; their names are the same."""
    config = model.config
    assert config.intermediate_size is not None  # is_llama has checked
    llama_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.head_counts[1],
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        dtype=model.dtype,
    )
    if config.max_position_embeddings is not None:
        llama_config.max_position_embeddings = config.max_position_embeddings
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config)
    llama.load_state_dict(model.state_dict(), strict=True, assign=True)
    llama.generation_config = model.generation_config
    return llama
