"""Weights from a Hugging Face folder or the Hub, all that a model has or none."""

from collections.abc import Callable, Iterable
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging


def load_whole(
    model_class: Any, source: str, may_lack: Callable[[PreTrainedModel], Iterable[str]] | None = None, **arguments: Any
) -> PreTrainedModel:
    """What `model_class.from_pretrained` reads, which by itself draws what is not there and drops what does not fit.

    Args:
        model_class: a class of models, or AutoModelForCausalLM.
        source: a folder, or a name on the Hub.
        may_lack: names of the parameters of the model that the source need not have.
        arguments: of `from_pretrained`.

    Raises:
        ValueError: there are no weights, or they cannot be read, or do not fit config.json: one has too few, too many
            or other tensors.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of what does not fit is one line below
    try:
        model, found = model_class.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    except (OSError, SafetensorError, RuntimeError, ImportError) as error:  # what quantized weights need may be missing
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source} has no weights that can be read: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])
        raise ValueError(f"{source} has {name} of shape {list(stored)}, and its config.json means {list(wanted)}")
    missing = sorted(set(found["missing_keys"]) - set(may_lack(model) if may_lack else ()))
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} of the model's weights, the first is {missing[0]}")
    unexpected = sorted(found["unexpected_keys"])
    if unexpected:
        raise ValueError(
            f"{source} has {len(unexpected)} tensors that a {type(model).__name__} of its config.json does not use, "
            f"the first is {unexpected[0]}: mend config.json, or remove the tensors"
        )
    return model
