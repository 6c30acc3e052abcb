"""Load weights from a Hugging Face folder or the Hub, and refuse incomplete ones."""

from collections.abc import Callable, Iterable
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from common.settings import SettingError


def load_whole(
    model_class: Any, source: str, may_lack: Callable[[Any], Iterable[str]] | None = None, **arguments: Any
) -> Any:
    """Call `model_class.from_pretrained`, and refuse the missing and mismatched tensors that it would ignore.

    Args:
        model_class: a model class, or AutoModelForCausalLM.
        source: a folder, or a name on the Hub.
        may_lack: returns the names of the model's parameters that the source may lack.
        arguments: passed to `from_pretrained`.

    Raises:
        ValueError: if there are no readable weights, or if they do not fit config.json: missing, unexpected or
            differently shaped tensors.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the errors below replace its report of mismatches
    try:
        model, found = model_class.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    except (OSError, SafetensorError, RuntimeError, ImportError) as error:  # also a missing quantization package
        reason = str(error).strip().partition("\n")[0]
        raise SettingError("source", source, reason, "has no weights that can be read") from error
    finally:
        logging.set_verbosity(verbosity)
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])
        problem = f"has {name} of shape {list(stored)}, and its config.json means {list(wanted)}"
        raise SettingError("source", source, "give the config.json of these weights", problem)
    missing = sorted(set(found["missing_keys"]) - set(may_lack(model) if may_lack else ()))
    if missing:
        problem = f"lacks {len(missing)} of the model's weights, the first is {missing[0]}"
        raise SettingError("source", source, "give all files of the model", problem)
    unexpected = sorted(found["unexpected_keys"])
    if unexpected:
        name = type(model).__name__
        problem = (
            f"has {len(unexpected)} tensors that a {name} of its config.json does not use, such as {unexpected[0]}"
        )
        raise SettingError("source", source, "correct config.json, or remove the tensors", problem)
    return model
