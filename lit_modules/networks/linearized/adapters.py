"""Save and load a trained linearization: an adapter for its base model, or the merged model.

An adapter folder holds peft's files (`adapter_config.json`, `adapter_model.safetensors`, readable by
`PeftModel.from_pretrained(linearized_model, folder)`), `linearization.json` (base model, its dtype, settings) and, if
the linearization has new parameters, `linearization.safetensors`. It does not hold the base model.

LoRA trained on a linearized model would corrupt the stock model. The tensor names therefore match nothing in a stock
model: peft warns with these names and leaves it unchanged.
"""

import copy
import json
from pathlib import Path
from typing import Any

from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto import AutoConfig

from common.atomic_files import replace_atomically
from common.hub import use_cache_where_unreachable
from common.settings import differences
from lit_modules.networks.linearized import lora
from lit_modules.networks.linearized.families import PREFIX
from lit_modules.networks.linearized.fingerprints import fingerprint, has_fingerprint
from lit_modules.networks.linearized.models import ADAPTER_PREFIX, LinearizedForCausalLM
from lit_modules.networks.linearized.settings import Linearization

RECORD = "linearization.json"
PARAMETERS = "linearization.safetensors"
LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
PEFT_PREFIX = "base_model.model."  # prefix of the names in LORA_WEIGHTS: the model's attribute path in a PeftModel
FORMAT = 2
READABLE_FORMATS = (1, FORMAT)  # 1: without base_dtype and ADAPTER_PREFIX

IDENTITY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
)


def export_merged(model: LinearizedForCausalLM, tokenizer: Any, folder: str | Path) -> Path:
    """Write the model with LoRA merged, and the tokenizer, as a Hugging Face folder, atomically.

    `AutoModelForCausalLM.from_pretrained` needs `import lit_modules.networks`. The given model is not changed.
    """
    with replace_atomically(Path(folder)) as partial:
        lora.merged_copy(model).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return Path(folder)


def save_adapter(model: LinearizedForCausalLM, folder: str | Path, *, base: str) -> Path:
    """Write the parameters that training added to the base model, atomically.

    Args:
        base: folder of the base model, or its name on the Hub.

    Raises:
        ValueError: if weights of the base model are trained, because an adapter does not hold them.
    """
    own = model.new_parameters()
    changed = [
        name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name and name not in own
    ]
    if changed:
        raise ValueError(
            f"{changed[0]} of the base model is trained, and no adapter holds it: export the whole (export_merged)"
        )
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    with replace_atomically(Path(folder)) as partial:
        if lora.has_lora(model):
            weights = get_peft_model_state_dict(model, adapter_name=lora.ADAPTER, save_embedding_layers=False)
            save_file(
                {PEFT_PREFIX + ADAPTER_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()},
                partial / LORA_WEIGHTS,
                metadata={"format": "pt"},
            )
            config = copy.copy(model.peft_config[lora.ADAPTER])
            config.base_model_name_or_path, config.inference_mode = base, True
            config.save_pretrained(str(partial))
        if own:
            save_file({name: tensor.detach().contiguous() for name, tensor in own.items()}, partial / PARAMETERS)
        record = {
            "format": FORMAT,
            "base": base,
            "base_dtype": str(model.dtype).removeprefix("torch."),
            "base_identity": {**config_identity(model.config), "weights": fingerprint(model)},
            "linearization": model.linearization.to_dict(),
            "files": sorted(file.name for file in partial.iterdir()),
        }
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return Path(folder)


def apply_adapter(model: LinearizedForCausalLM, folder: str | Path) -> LinearizedForCausalLM:
    """Load an adapter onto a linearized model without LoRA, in place; its LoRA is trainable as after `add_lora`.

    Raises:
        ValueError: if the adapter is for another base model or other settings, a file is missing or damaged, or the
            model has LoRA or is not linearized.
    """
    folder = Path(folder)
    record = read_record(folder)
    if not isinstance(model, LinearizedForCausalLM):
        raise ValueError(
            f"{folder} belongs on a linearized model, and this is a {type(model).__name__}: give what load_pretrained "
            "or linearize returns, or use load_adapted"
        )
    if lora.has_lora(model):
        raise ValueError(f"{folder} cannot be put onto a model that has LoRA: merge it before")
    check_settings(record["linearization"], model.linearization, folder)
    check_identity(record, model.config, "the model", folder)
    if not has_fingerprint(model, record["base_identity"]["weights"]):
        raise ValueError(f"{folder} was made for {record['base']}, and this model has its shape but other weights")
    if PARAMETERS in record["files"]:
        own = read_tensors(folder / PARAMETERS)
        check_names(set(own), set(model.new_parameters()), folder / PARAMETERS)
        model.load_state_dict(own, strict=False)
    elif model.new_parameters():
        raise ValueError(f"{folder} lacks {PARAMETERS}, which its settings need")
    if LORA_WEIGHTS in record["files"]:
        weights = {
            name.replace(PEFT_PREFIX + ADAPTER_PREFIX, PEFT_PREFIX, 1): tensor
            for name, tensor in read_tensors(folder / LORA_WEIGHTS).items()
        }
        lora.inject(model, read_lora_config(folder))
        # set_peft_model_state_dict does not report missing tensors, so compare the names first.
        expected = get_peft_model_state_dict(model, adapter_name=lora.ADAPTER, save_embedding_layers=False)
        check_names({name.removeprefix(PEFT_PREFIX) for name in weights}, set(expected), folder / LORA_WEIGHTS)
        set_peft_model_state_dict(model, weights, lora.ADAPTER)
    return model


def read_record(folder: Path) -> dict[str, Any]:
    """Read `linearization.json` of a complete adapter; its settings become a `Linearization`.

    Raises:
        ValueError: if it is missing, damaged or of another format, or a file that it names is missing.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} is not an adapter of a linearized model: it has no {RECORD}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] not in READABLE_FORMATS:
            raise ValueError(
                f"its format is {record['format']}, and this version reads {READABLE_FORMATS[0]} to {FORMAT}"
            )
        record.setdefault("base_dtype", "auto")
        record["linearization"] = Linearization(**record["linearization"])
        missing = [name for name in record["files"] if not (folder / name).is_file()]
        _ = record["base"], record["base_identity"]["weights"]
    except KeyError as error:
        raise ValueError(f"{path} cannot be read: it has no {error}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if missing:
        raise ValueError(f"{folder} is not whole: {missing[0]} is missing")
    return record


def base_config(source: str, folder: Path) -> PreTrainedConfig:
    """Load the configuration of the base model.

    Raises:
        ValueError: if there is none.
    """
    if not Path(source).is_dir():
        use_cache_where_unreachable()
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} was made for the base model {source}, which is not there ({str(error).splitlines()[0]}): bring "
            f'it back, or give its place: base=FOLDER in load_adapted, or "base" in {folder / RECORD}'
        ) from error


def config_identity(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the parts of a configuration that an adapter depends on; linearization does not change them."""
    return {
        "family": config.model_type.removeprefix(PREFIX),
        **{name: getattr(config, name, None) for name in IDENTITY},
    }


def base_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a configuration as of its base model, without names, versions, dtypes and linearization settings."""
    aside = ("architectures", "dtype", "linearization", "name_or_path", "transformers_version", "use_cache")
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_") and key not in aside}
    return {**values, "model_type": config.model_type.removeprefix(PREFIX)}


def check_identity(record: dict[str, Any], config: PreTrainedConfig, name: str, folder: Path) -> None:
    """Check that the configuration of the model called `name` matches the adapter's base model.

    Raises:
        ValueError: with the first difference.
    """
    found = config_identity(config)
    for key, value in record["base_identity"].items():
        if key != "weights" and found.get(key) != value:
            raise ValueError(
                f"{folder} was made for {record['base']} with {key}={value}, and {name} has {key}={found.get(key)}"
            )


def check_settings(made_for: Linearization, found: Linearization, folder: Path) -> None:
    """Check that a model's settings equal those of the adapter.

    Raises:
        ValueError: with the first difference.
    """
    for key, (before, after) in differences(made_for.to_dict(), found.to_dict()).items():
        raise ValueError(
            f"{folder} was made for linearization.{key}={before}, and the model has linearization.{key}={after}: "
            "linearize the base model with the adapter's settings (load_adapted does)"
        )


def read_lora_config(folder: Path) -> PeftConfig:
    """Read peft's configuration of the LoRA.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        return PeftConfig.from_pretrained(str(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / LORA_CONFIG} cannot be read: {str(error).splitlines()[0]}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def check_names(found: set[str], expected: set[str], path: Path) -> None:
    """Check that a file has exactly the expected tensors.

    Raises:
        ValueError: with the first missing or unknown tensor.
    """
    if expected - found:
        raise ValueError(f"{path} does not fit its settings: {min(expected - found)} is missing")
    if found - expected:
        raise ValueError(f"{path} does not fit its settings: the model has no {min(found - expected)}")
