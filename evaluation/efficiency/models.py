"""The measured models: files of conf/model, or folders with a config.json. Their weights are random."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from transformers.models.auto import AutoConfig
from transformers.models.llama import LlamaConfig

from common.settings import NO_VALUE, SettingError, under
from lit_modules.launching.choices import read_choice
from lit_modules.networks import PalimpsestConfig


@dataclass(frozen=True)
class NamedModel:
    """A model to measure: its name as the user gave it, and its sizes."""

    name: str
    config: PalimpsestConfig


def read_model(key: str, name: str) -> NamedModel:
    """Return the model that a setting names.

    Args:
        key: the setting, for errors.
        name: a file of conf/model, or a folder: an export, a run with one, or any with the config.json of one of our
            networks or of a Llama.

    Raises:
        SettingError: it is neither, or its attention is not measured.
    """
    if Path(name).is_dir():
        config = read_folder(key, Path(name))
    else:
        with under(key):
            config = hydra.utils.instantiate(read_choice("model", name, key))
    if not isinstance(config, PalimpsestConfig):
        raise SettingError(key, name, "give a model of this project", f"is a {type(config).__name__}")
    check_layers(key, name, config)
    return NamedModel(name, config)


def read_folder(key: str, folder: Path) -> PalimpsestConfig:
    """Return the configuration in a folder, or in its `export/`.

    Raises:
        SettingError: there is none, or it is of another architecture.
    """
    place = next((each for each in (folder, folder / "export") if (each / "config.json").is_file()), None)
    if place is None:
        raise SettingError(key, folder, "give a run's with an export, or one with a config.json", "has no config.json")
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise SettingError(key, folder, str(error).splitlines()[0], "cannot be read") from error
    if isinstance(config, PalimpsestConfig):
        return config
    if type(config) is not LlamaConfig:
        raise SettingError(key, folder, "give one of our networks, or a Llama", f"holds a {type(config).__name__}")
    if config.attention_bias or config.head_dim not in (None, config.hidden_size // config.num_attention_heads):
        fix = "give a Llama without"
        raise SettingError(key, folder, fix, "has biases in its attention, or heads of another width")
    return of_llama(config)


def of_llama(config: Any) -> PalimpsestConfig:
    """Return the configuration of a stock Llama as one of ours."""
    return PalimpsestConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_key_heads=config.num_key_value_heads,
        num_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        forget_gate="none",
        rope=True,
        rope_base=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
    )


def check_layers(key: str, name: str, config: PalimpsestConfig) -> None:
    """Check that all layers are alike, and that decoding has a fused step for them.

    Raises:
        SettingError: they are not, or it has none.
    """
    others = sorted(set(config.layer_mixers) - {"attention"})
    more = [switch for switch in ("kv_shift", "qk_norm", "output_norm", "output_gate") if getattr(config, switch)]
    if config.forget_gate != "none":
        more.append(f"forget_gate={config.forget_gate}")
    if config.cached_key_dim != config.head_dim:
        more.append(f"key_head_dim={config.key_head_dim}")
    if others or more:
        problem = f"has layers of {', '.join(others)}" if others else f"has {', '.join(more)}"
        fix = "give a model with attention alone, whose layers decode in fused steps"
        raise SettingError(key, name, fix, f"{problem}, which is not measured")


def check_pair(model: NamedModel, against: NamedModel) -> None:
    """Raise SettingError if the two are the same, so that nothing could differ."""
    if model.config.to_dict() == against.config.to_dict():
        raise SettingError("benchmark.against", NO_VALUE, "give another one", "is the same as benchmark.model")
