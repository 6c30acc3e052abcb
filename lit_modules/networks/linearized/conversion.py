"""Convert a pretrained model to its linearized form, in memory or while loading."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.hub import is_path, use_cache_where_unreachable
from common.settings import SettingError
from lit_modules.networks.linearized.families import PREFIX, check_config, check_model_type, family_of
from lit_modules.networks.linearized.family_models import MODELS
from lit_modules.networks.linearized.models import LinearizedForCausalLM
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.loading import load_whole


def linearize(model: PreTrainedModel, settings: Linearization) -> LinearizedForCausalLM:
    """Return the linearized form of a stock model; both share the same parameters, nothing is copied.

    Args:
        model: a model of a supported family, on any device, including "meta".

    Raises:
        ValueError: if the model or the settings do not fit; the line names the key.
    """
    check_model_type(model.config.model_type)
    if not isinstance(model, family_of(model.config).model_class):
        raise ValueError(
            f"{type(model).__name__} is not a causal language model: give one with its head, loaded as such"
        )
    linearized = _linearized_copy(model, linearized_config(model.config.to_dict(), settings))
    if model.device.type != "meta":
        _initialize_new_parameters(linearized, model.device)
    return linearized


def with_softmax_layers(model: LinearizedForCausalLM, layers: Sequence[int]) -> LinearizedForCausalLM:
    """Return a linearized model in which exactly these layers are softmax attention, on the same parameters.

    The given model must have been made without softmax layers, so that it has the parameters of all layers.

    Raises:
        ValueError: if a layer does not exist.
    """
    settings = dataclasses.replace(model.linearization, softmax_layers=tuple(layers))
    values = model.config.to_dict() | {"linearization": settings.to_dict()}
    return _linearized_copy(model, type(model.config).from_dict(values))


def _linearized_copy(model: PreTrainedModel, config: PreTrainedConfig) -> LinearizedForCausalLM:
    linearized = without_weights(config)
    weights = model.state_dict(keep_vars=True)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    linearized.load_state_dict(weights, strict=False, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted[name])  # assign=True copies the new model's flag
    linearized.model.rotary_emb = model.model.rotary_emb  # its tables are not in the state dict
    linearized.config.name_or_path = model.config.name_or_path
    linearized.generation_config = copy.deepcopy(model.generation_config)
    return linearized.train(model.training)


def without_weights(config: PreTrainedConfig) -> LinearizedForCausalLM:
    """Return the model of a linearized configuration, on the meta device.

    Raises:
        ValueError: if it cannot be built.
    """
    try:
        with torch.device("meta"):
            return MODELS[config.model_type](config)
    except Exception as error:  # stock classes raise anything for unexpected values
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"no model can be built from its config.json: {reason}") from error


@torch.no_grad()
def _initialize_new_parameters(model: LinearizedForCausalLM, device: torch.device) -> None:
    for attention in model.attentions():
        for module in attention.modules():
            initial_values = getattr(module, "initial_values", None)
            if initial_values is not None:
                module.to_empty(device=device)
                for name, value in initial_values().items():
                    getattr(module, name).copy_(value)


def load_pretrained(source: str, settings: Linearization, dtype: torch.dtype | str = "auto") -> LinearizedForCausalLM:
    """Load a pretrained model's weights directly into its linearized form.

    Args:
        source: a folder with `config.json` and safetensors, or a name on the Hugging Face Hub.
        dtype: dtype of the weights; "auto": as in `config.json`.

    Raises:
        ValueError: if the source cannot be read or linearized with these settings; the line names the key or the file.
    """
    config = linearized_config(read_config(source), settings)
    return load_whole(
        MODELS[config.model_type], source, LinearizedForCausalLM.new_parameters, config=config, dtype=dtype
    )


def load_adapted(
    folder: str | Path, *, base: str | None = None, dtype: torch.dtype | str | None = None, merge: bool = False
) -> LinearizedForCausalLM:
    """Load what `adapters.save_adapter` wrote: the linearized base model with the adapter's parameters and LoRA.

    Args:
        base: current location of the base model; by default the recorded one.
        dtype: dtype of the base weights; None: the one used in training; "auto": as stored.
        merge: merge LoRA into the projections.

    Raises:
        ValueError: if a file is missing or damaged, or the base model is missing or another one.
    """
    from lit_modules.networks.linearized import adapters, lora  # peft takes its time, and most models have no LoRA

    folder = Path(folder)
    record = adapters.read_record(folder)
    source = record["base"] if base is None else base
    adapters.check_identity(record, adapters.base_config(source, folder), source, folder)  # before loading gigabytes
    dtype = record["base_dtype"] if dtype is None else dtype
    model = adapters.apply_adapter(load_pretrained(source, record["linearization"], dtype), folder)
    return lora.merge(model) if merge and lora.has_lora(model) else model


def linearized_config(stock: dict[str, Any], settings: Linearization) -> PreTrainedConfig:
    """Return the linearized configuration for the values of a stock `config.json`.

    Raises:
        ValueError: if values or settings do not fit.
    """
    model_type = str(stock.get("model_type", ""))
    check_model_type(model_type)
    _check_not_quantized(stock)
    values = {key: value for key, value in stock.items() if key not in ("model_type", "architectures", "auto_map")}
    config_class = MODELS[PREFIX + model_type].config_class
    try:
        config = config_class.from_dict({**values, "linearization": settings.to_dict()})
    except Exception as error:
        raise ValueError(f"config.json of this {model_type} is refused: {' '.join(str(error).split())}") from error
    if stock.get("head_dim") is None and config.hidden_size % config.num_attention_heads:
        problem = f"does not divide hidden_size={config.hidden_size}"
        raise SettingError("num_attention_heads", config.num_attention_heads, "give head_dim", problem)
    check_config(config, settings.softmax_layers)
    return config


def _check_not_quantized(stock: dict[str, Any]) -> None:
    """Check that the weights are not quantized, because no layer here supports it."""
    quantization = stock.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise ValueError(
        f"its config.json has a quantization_config ({getattr(method, 'value', method)}): "
        "give the model in bfloat16, float16 or float32"
    )


def read_config(source: str) -> dict[str, Any]:
    """Return the values in the `config.json` of a folder or of a name on the Hub.

    Raises:
        ValueError: if it is missing or cannot be read.
    """
    if not Path(source).is_dir():
        if is_path(source):
            fix = "give a model's folder, or its name on the Hugging Face Hub"
            raise SettingError("source", source, fix, "is not a folder")
        use_cache_where_unreachable()
    try:
        config, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingError("source", source, reason, "has no config.json that can be read") from error
    if not isinstance(config, dict):
        problem = f"has a config.json that is {type(config).__name__}"
        raise SettingError("source", source, "give one with an object that has a model_type", problem)
    if not config:
        beside = " (it is a run's: give its export/)" if (Path(source) / "export" / "config.json").is_file() else ""
        fix = f"give a model's folder, or its name on the Hub{beside}"
        raise SettingError("source", source, fix, "has no config.json")
    return config
