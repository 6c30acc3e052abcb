"""Write a trained model as a Hugging Face folder, in its own form or in one that other engines can read."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from common.atomic_files import replace_atomically
from common.settings import SettingError, check_choice
from lit_modules.networks.causal_lm import PalimpsestForCausalLM
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.kv_groups import cached_numbers, share_kv_groups

FORMS = ("auto", "stock_llama", "shared_kv_groups")
NOTE = """# KV group sharing

The model was trained with {before[1]} key and {before[2]} value heads. This export repeats them to {after} of each, of
one width, for engines that need equal heads (arXiv 2501.13629 v2, appendix E). The logits are the same. The cache is
larger: {now:,} numbers a token instead of {then:,}, {ratio:.2f} times as many, and each decoding step reads all of
them. `palimpsest job=export` with `form=auto` writes the model as it was trained.
"""


def export_pretrained(
    model: PalimpsestForCausalLM, folder: str | Path, tokenizer: Any = None, form: str = "auto"
) -> Path:
    """Write `config.json`, `generation_config.json` and safetensors to `folder`, replacing its content atomically.

    Args:
        model: is not changed.
        folder: for the export.
        tokenizer: is written too, if there is one.
        form: "auto" writes a stock Llama if the architecture is one, else this project's. "stock_llama" refuses
            anything else. "shared_kv_groups" repeats key heads until there are as many as value heads (`kv_groups`),
            then does as "auto", and notes the cost in README.md.

    A stock Llama loads without this project. Anything else loads after `import lit_modules.networks`, or with
    `trust_remote_code`, by the file that `loader_file` describes.

    Raises:
        SettingError: the model cannot have this form.
    """
    check_choice("form", form, FORMS)
    folder, written = Path(folder), model
    if form == "shared_kv_groups":
        written = share_kv_groups(model)
    elif form == "stock_llama":
        check_is_llama(model.config)
    with replace_atomically(folder) as partial:
        (written if beyond_llama(written.config) else as_llama(written)).save_pretrained(partial)
        if written is not model:
            (partial / "README.md").write_text(note_of(model.config, written.config), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return folder


def beyond_llama(config: PalimpsestConfig) -> list[str]:
    """List the settings, as `key=value`, with which the architecture is not Hugging Face's Llama."""
    _, key_heads, value_heads = config.head_counts
    found = {
        f"forget_gate={config.forget_gate}": config.forget_gate != "none",
        "rope=false": not config.rope,
        "intermediate_size=null": config.intermediate_size is None,
        f"augmented_query_dim={config.augmented_query_dim}": config.augmented_query_dim is not None,
        f"key_head_dim={config.key_head_dim}": config.cached_key_dim != config.head_dim,
        f"num_key_heads={key_heads} with num_value_heads={value_heads}": key_heads != value_heads,
    }
    switches = ("qk_norm", "output_gate", "output_norm", "kv_shift")
    found |= {f"{switch}=true": getattr(config, switch) for switch in switches}
    mixers = [mixer for mixer in dict.fromkeys(config.layer_mixers) if mixer != "attention"]
    return [*(text for text, there in found.items() if there), *(f"mixers={mixer}" for mixer in mixers)]


def check_is_llama(config: PalimpsestConfig) -> None:
    """Raise a SettingError that names everything that Llama does not have."""
    beyond = beyond_llama(config)
    if not beyond:
        return
    fix = "leave form out"
    if all(text.startswith(("num_key_heads", "key_head_dim")) for text in beyond):
        fix = "give form=shared_kv_groups, which makes the heads equal and so a stock Llama"
    raise SettingError("form", "stock_llama", fix, f"cannot hold {', '.join(beyond)}")


def note_of(before: PalimpsestConfig, after: PalimpsestConfig) -> str:
    """Return the README.md of an export with shared KV groups."""
    then, now = cached_numbers(before), cached_numbers(after)
    return NOTE.format(before=before.head_counts, after=after.num_key_heads, then=then, now=now, ratio=now / then)


def as_llama(model: PalimpsestForCausalLM) -> PreTrainedModel:
    """Return a `LlamaForCausalLM` that shares the model's parameters; their names are the same."""
    config = model.config
    assert config.intermediate_size is not None  # beyond_llama has checked
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
