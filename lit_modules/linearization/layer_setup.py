"""Layer setup before training: which layers stay softmax attention, and initial feature maps."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from common.atomic_files import write_atomic
from common.setting_nodes import plain_dict
from common.settings import NO_VALUE, SettingError, check_whole
from data_pipeline.tokens.token_data import TokenData
from lit_modules.launching.process import this_process
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM
from lit_modules.networks.linearized.calibration import fit_clusters
from lit_modules.networks.linearized.conversion import with_softmax_layers
from lit_modules.networks.linearized.sensitivity import choose_layers, every_nth_layer, sensitivity
from lit_modules.parallel.choosing import single_device

log = logging.getLogger(__name__)

KEPT = "softmax_layers.json"  # in the run's folder: the layers that stay, once chosen
SENSITIVITY_BATCHES, FITTING_BATCHES = 8, 4  # micro-batches of the train text


def check_softmax_layers(kept: Any, settings: Linearization, layers: int) -> None:
    """Raise ValueError unless `softmax_layers` has one of its two forms and keeps some layers but not all.

    All keys null is allowed.
    """
    ways = chosen_ways(kept)
    if OmegaConf.is_dict(kept) and not ways:
        return
    if len(ways) != 1 or not ways.keys() <= {"every", "most_sensitive"}:
        one = "; of several keys set all but one to null, as softmax_layers.every=null" if len(ways) > 1 else ""
        fix = (
            "give softmax_layers.every=8, softmax_layers.most_sensitive=2, or a list as "
            f"linearization.softmax_layers=[7,15]{one}"
        )
        raise SettingError("softmax_layers", kept, fix, "is not known")
    if settings.softmax_layers:
        problem = "and linearization.softmax_layers are both given"
        raise SettingError("softmax_layers", NO_VALUE, "give one of them", problem)
    ((way, number),) = ways.items()
    if layers == 1:
        raise SettingError(
            f"softmax_layers.{way}", number, "give null", "is for more than one layer, and the base has one"
        )
    least, most = (2, layers) if way == "every" else (1, layers - 1)
    check_whole(f"softmax_layers.{way}", number, least, most)


def chosen_ways(kept: Any) -> dict[str, Any]:
    """Return the keys of `softmax_layers` that are not null."""
    given = plain_dict(kept, resolve=False) if OmegaConf.is_dict(kept) else {}
    return {way: number for way, number in given.items() if number is not None}


def set_up_layers(
    cfg: DictConfig, model: LinearizedForCausalLM, data: TokenData, folder: Path
) -> LinearizedForCausalLM:
    """Return the model with the layers that `softmax_layers` keeps; a resumed run keeps its earlier choice.

    Args:
        model: with its layers linearized; the result has the same parameters.
        data: prepared; layers are measured and feature maps fitted on the first of its train text.
        folder: the run's folder.
    """
    asked, chosen = chosen_ways(cfg.softmax_layers), folder / KEPT
    if "most_sensitive" in asked:
        # The first rank to get the lock measures: ranks that measure separately might choose differently by rounding.
        with FileLock(folder / f".{KEPT}.lock"):
            if not chosen.is_file():
                begin_maps(cfg, model, data)
                return keep_most_sensitive(cfg, model, data, chosen)
    if chosen.is_file():
        model = with_softmax_layers(model, read_choice(chosen))
    elif "every" in asked:
        kept = every_nth_layer(model.config.num_hidden_layers, asked["every"])
        model = with_softmax_layers(model, kept)
        if this_process().rank == 0:
            keep_choice(chosen, kept)
    begin_maps(cfg, model, data)
    return model


def keep_most_sensitive(
    cfg: DictConfig, model: LinearizedForCausalLM, data: TokenData, path: Path
) -> LinearizedForCausalLM:
    """Keep softmax attention in the layers that lose most by linearization, measured on the first train batches."""
    found = sensitivity(model, first_batches(cfg, model, data, SENSITIVITY_BATCHES))
    losses = ", ".join(f"{layer}: {loss:.4f}" for layer, loss in enumerate(found.tolist()))
    log.info("nats per token of train text that each layer loses when it alone is linearized: %s", losses)
    kept = choose_layers(found, chosen_ways(cfg.softmax_layers)["most_sensitive"])
    keep_choice(path, kept, found.tolist())
    return with_softmax_layers(model, kept)


def keep_choice(path: Path, kept: tuple[int, ...], found: list[float] | None = None) -> None:
    """Save which layers stay, for resuming and for other ranks."""
    write_atomic(path, json.dumps({"kept": list(kept), "sensitivity": found}) + "\n")


def read_choice(path: Path) -> list[int]:
    """Return the layers that `keep_choice` saved.

    Raises:
        ValueError: the file is not one of `keep_choice`.
    """
    try:
        return json.loads(path.read_text())["kept"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: it does not say which layers stay ({error}): start a new run without resume"
        ) from error


def begin_maps(cfg: DictConfig, model: LinearizedForCausalLM, data: TokenData) -> None:
    """Initialize feature maps that are fitted to text, if the settings use them."""
    if model.linearization.feature_map == "clusters":
        batches = first_batches(cfg, model, data, FITTING_BATCHES)
        fit_clusters(model, [{key: batch[key] for key in ("input_ids", "cu_seqlens")} for batch in batches])


def first_batches(
    cfg: DictConfig, model: LinearizedForCausalLM, data: TokenData, number: int
) -> list[dict[str, torch.Tensor]]:
    """Return the model's arguments for the first train micro-batches; move both to the trainer's device."""
    device = single_device(cfg.trainer.accelerator, cfg.trainer.devices)
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides that the method is bound
    names = {"input_ids": "input_ids", "shift_labels": "targets", "cu_seqlens": "cu_seqlens"}
    batches = itertools.islice(data.train_dataloader(), number)
    return [{name: batch[key].to(device) for name, key in names.items()} for batch in batches]
