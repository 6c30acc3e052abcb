"""Supported model families and their differences."""

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.phi3 import Phi3Config, Phi3ForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from common.settings import SettingError

Window = Callable[[PreTrainedConfig, int], int | None]


class Heads(NamedTuple):
    """Numbers of query heads and of key (and value) heads, and the width of one head."""

    query: int
    key: int
    dim: int


class Family(NamedTuple):
    """Stock classes of one model type.

    Attributes:
        config_class: class of the configuration.
        model_class: class of the causal language model.
        window: returns the sliding window of a layer in tokens; None means no window.
    """

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    window: Window


def _no_window(config: PreTrainedConfig, layer: int) -> None:
    return None


def _one_window(config: PreTrainedConfig, layer: int) -> int | None:
    return config.sliding_window


def _window_by_layer(config: PreTrainedConfig, layer: int) -> int | None:
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaForCausalLM, _no_window),
    "mistral": Family(MistralConfig, MistralForCausalLM, _one_window),
    "qwen2": Family(Qwen2Config, Qwen2ForCausalLM, _window_by_layer),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, _window_by_layer),
    "phi3": Family(Phi3Config, Phi3ForCausalLM, _one_window),
}

PREFIX = "linearized_"
"""Prefix of a linearized model's `model_type`."""


def check_model_type(model_type: str) -> None:
    """Check that a model type can be linearized.

    Raises:
        ValueError: if it cannot.
    """
    if model_type.removeprefix(PREFIX) in FAMILIES and model_type.startswith(PREFIX):
        raise SettingError("model_type", model_type, "give the model that it was made from", "is linearized already")
    if model_type not in FAMILIES:
        raise SettingError("model_type", model_type, f"give one of {', '.join(FAMILIES)}", "cannot be linearized")


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a stock or a linearized configuration."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def head_counts(config: PreTrainedConfig) -> Heads:
    """Return the heads of every layer.

    Raises:
        ValueError: if the key heads do not divide the query heads.
    """
    query, key = config.num_attention_heads, config.num_key_value_heads
    if key < 1 or query % key:
        problem = f"does not divide num_attention_heads={query}"
        raise SettingError("num_key_value_heads", key, "give a divisor, query heads share key heads evenly", problem)
    return Heads(query, key, getattr(config, "head_dim", None) or config.hidden_size // query)


def check_config(config: PreTrainedConfig, softmax_layers: tuple[int, ...]) -> None:
    """Check that a configuration can be linearized.

    Args:
        config: configuration of the stock or the linearized model.
        softmax_layers: layers that stay softmax attention.

    Raises:
        ValueError: if heads do not divide, a layer does not exist, or there is dropout.
    """
    head_counts(config)
    count = config.num_hidden_layers
    if count < 1:
        raise SettingError("num_hidden_layers", count, "there is no layer to linearize")
    beyond = [layer for layer in softmax_layers if not 0 <= layer < count]
    if beyond:
        problem = f"is not a layer of a model of {count}"
        raise SettingError("linearization.softmax_layers", beyond[0], f"give some of 0 to {count - 1}", problem)
    if getattr(config, "attention_dropout", 0):
        fix = "no attention weights are held to drop, set it to 0"
        raise SettingError("attention_dropout", config.attention_dropout, fix, "cannot be had")
    if getattr(config, "resid_pdrop", 0):
        fix = "in training the teacher would not be the pretrained model, set it to 0"
        raise SettingError("resid_pdrop", config.resid_pdrop, fix, "cannot be had")
