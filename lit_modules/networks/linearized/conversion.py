"""From a pretrained model to the same weights with other attention: in memory, or as they are read."""

import copy
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from lit_modules.networks.linearized.families import PREFIX, check_config, check_model_type, family_of
from lit_modules.networks.linearized.models import MODELS, LinearizedForCausalLM
from lit_modules.networks.linearized.settings import Linearization


def linearize(model: PreTrainedModel, settings: Linearization) -> LinearizedForCausalLM:
    """The linearized form of a stock model, on the very same parameters: nothing is copied, both may be used.

    Args:
        model: of a supported family, on any device, "meta" too.

    Raises:
        ValueError: a model or settings that do not fit; the line names the key.
    """
    check_model_type(model.config.model_type)
    if not isinstance(model, family_of(model.config).model_class):
        raise ValueError(f"{type(model).__name__} is no causal language model: give one with its head, loaded as such")
    config = linearized_config(model.config.to_dict(), settings)
    with torch.device("meta"):
        linearized = MODELS[config.model_type](config)
    weights = model.state_dict(keep_vars=True)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    linearized.load_state_dict(weights, strict=False, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted[name])  # assigning sets it as in the new model
    linearized.model.rotary_emb = model.model.rotary_emb  # its tables are in no state dict
    if model.device.type != "meta":
        _begin_new_parameters(linearized, model.device)
    linearized.config.name_or_path = model.config.name_or_path
    linearized.generation_config = copy.deepcopy(model.generation_config)
    return linearized.train(model.training)


@torch.no_grad()
def _begin_new_parameters(model: LinearizedForCausalLM, device: torch.device) -> None:
    for attention in model.attentions():
        for module in attention.modules():
            if hasattr(module, "initial_values"):
                module.to_empty(device=device)
                for name, value in module.initial_values().items():
                    getattr(module, name).copy_(value)


def load_pretrained(source: str, settings: Linearization, dtype: torch.dtype | str = "auto") -> LinearizedForCausalLM:
    """Read a pretrained model's weights straight into its linearized form.

    Args:
        source: a folder with `config.json` and safetensors, or a name on the Hugging Face Hub.
        dtype: of the weights; "auto": as `config.json` says.

    Raises:
        ValueError: nothing to read, or not what can be linearized as asked; the line names the key or the file.
    """
    config = linearized_config(_read_config(source), settings)
    model_class = MODELS[config.model_type]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of what does not fit is one line below
    try:
        model, found = model_class.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{source} has no weights that can be read: {str(error).splitlines()[0]}") from error
    finally:
        logging.set_verbosity(verbosity)
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])
        raise ValueError(f"{source} has {name} of shape {list(stored)}, and its config.json means {list(wanted)}")
    missing = sorted(set(found["missing_keys"]) - set(model.new_parameters()))
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} of the model's weights, the first is {missing[0]}")
    return model


def linearized_config(stock: dict[str, Any], settings: Linearization) -> PreTrainedConfig:
    """The linearized configuration of a stock one's values, as they are in its `config.json`.

    Raises:
        ValueError: values or settings that do not fit.
    """
    model_type = stock.get("model_type", "")
    check_model_type(model_type)
    values = {key: value for key, value in stock.items() if key not in ("model_type", "architectures", "auto_map")}
    config_class = MODELS[PREFIX + model_type].config_class
    try:
        config = config_class.from_dict({**values, "linearization": settings.to_dict()})
    except Exception as error:
        raise ValueError(f"config.json of this {model_type} is refused: {' '.join(str(error).split())}") from error
    if stock.get("head_dim") is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} does not divide hidden_size={config.hidden_size}"
        )
    check_config(config, settings.softmax_layers)
    return config


def _read_config(source: str) -> dict[str, Any]:
    try:
        config, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} has no config.json that can be read: {str(error).splitlines()[0]}") from error
    if not config:
        raise ValueError(f"{source} has no config.json: give a model's folder, or its name on the Hugging Face Hub")
    return config
