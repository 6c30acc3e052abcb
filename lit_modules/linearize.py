"""`job=linearize`: give a pretrained model recurrences in place of attention, and train what that takes."""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from data_pipeline.files import write_whole
from data_pipeline.settings import check_whole
from lit_modules.launching.ranks import ranks
from lit_modules.linearization import Linearization as Training
from lit_modules.linearization import Stage
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM, load_pretrained
from lit_modules.networks.linearized.adapters import export_merged, save_adapter
from lit_modules.networks.linearized.calibration import fit_clusters
from lit_modules.networks.linearized.conversion import linearized_config
from lit_modules.networks.linearized.lora import add_lora, has_lora
from lit_modules.networks.linearized.sensitivity import choose_layers, every, sensitivity
from lit_modules.parallel.choosing import count_devices, device_of
from lit_modules.parallel.strategies import DataParallel, OneDevice
from lit_modules.results import conclude, measured
from lit_modules.teacher_store import TeacherStore
from lit_modules.trainer import Parts, build_trainer, set_lengths, train

log = logging.getLogger(__name__)

KEPT = "softmax_layers.json"  # in the run's folder: the layers that stay, once they have been chosen
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SENSITIVITY_BATCHES, FITTING_BATCHES = 8, 4  # micro-batches of the train text


def run(cfg: DictConfig) -> None:
    """Linearize, train (or go on training), and leave an adapter and a measured model."""
    train(cfg, build, adopt, finish)


def build(cfg: DictConfig, folder: Path) -> Parts:
    """Trainer, module without its model, and data module.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    settings = hydra.utils.instantiate(cfg.linearization, _convert_="all")
    stages = {name: build_stage(name, stage) for name, stage in cfg.stages.items() if stage is not None}
    check(cfg, settings, stages)
    data = hydra.utils.instantiate(cfg.data)
    module = Training(
        stages=stages,
        max_tokens=cfg.max_tokens,
        optimizer=hydra.utils.instantiate(cfg.optimizer, _convert_="all"),
        schedule=hydra.utils.instantiate(cfg.schedule),
        batch_tokens=cfg.data.batch_tokens,
        compile=cfg.compile,
        activation_checkpointing=cfg.activation_checkpointing,
    )
    trainer = build_trainer(cfg, module, build_strategy(cfg, module), folder)
    set_lengths(cfg, trainer, module, data)
    return trainer, module, data


def build_stage(name: str, stage: DictConfig) -> Stage:
    """One of `stages`. Raises ValueError for a key that a stage does not have."""
    if not OmegaConf.is_dict(stage):
        raise ValueError(f"stages.{name}={stage} is no stage: give its keys, as stages.{name}.kl=1, or null for none")
    given = OmegaConf.to_container(stage, resolve=True)
    known = [field.name for field in dataclasses.fields(Stage)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"stages.{name}.{unknown[0]} is not known: give some of {', '.join(known)}")
    train_groups = given.get("train", ["lora"])
    if not isinstance(train_groups, list):
        raise ValueError(f"stages.{name}.train={train_groups} is not a list: give the groups as [lora,feature_maps]")
    return Stage(**{**given, "train": tuple(train_groups)})


def check(cfg: DictConfig, settings: Linearization, stages: dict[str, Stage]) -> None:
    """Raise ValueError for what can be refused before any weights or data are read."""
    if cfg.base_dtype not in DTYPES:
        raise ValueError(f"base_dtype={cfg.base_dtype} is not known: give one of {', '.join(DTYPES)}")
    if cfg.lora is not None and not OmegaConf.is_dict(cfg.lora):
        raise ValueError(f"lora={cfg.lora} is not known: give its keys, as lora.rank=8, or null for none")
    try:
        stored, _ = PreTrainedConfig.get_config_dict(cfg.base)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"base={cfg.base} cannot be read: {str(error).strip().splitlines()[0]}") from error
    if not stored:
        raise ValueError(f"base={cfg.base} has no config.json: give a model's folder, or its name on the Hub")
    with naming_base(cfg):
        config = linearized_config(stored, settings)
    if cfg.teacher_top_k is not None:
        check_whole("teacher_top_k", cfg.teacher_top_k, 1, config.vocab_size)
        if not any(stage.kl for stage in stages.values()):
            raise ValueError(f"teacher_top_k={cfg.teacher_top_k} is for stages with kl: set stages.finetuning.kl=1")
    if cfg.softmax_layers is not None:
        check_softmax_layers(cfg.softmax_layers, settings, config.num_hidden_layers)


def check_softmax_layers(kept: Any, settings: Linearization, layers: int) -> None:
    """Raise ValueError unless `softmax_layers` is one of its two forms, and keeps some of so many layers, not all."""
    ways = OmegaConf.to_container(kept) if OmegaConf.is_dict(kept) else {}
    if list(ways) not in (["every"], ["most_sensitive"]):
        raise ValueError(
            f"softmax_layers={kept} is not known: give {{every: 8}}, {{most_sensitive: 2}}, or null and a list as "
            "linearization.softmax_layers=[7,15]"
        )
    if settings.softmax_layers:
        raise ValueError("softmax_layers and linearization.softmax_layers are both given: give one of them")
    ((way, number),) = ways.items()
    least, most = (2, layers) if way == "every" else (1, layers - 1)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ValueError(
            f"softmax_layers.{way}={number} of {layers} layers: give a whole number from {least} to {most}"
        )


@contextlib.contextmanager
def naming_base(cfg: DictConfig) -> Iterator[None]:
    """Put `base=...` before the line of a ValueError that names neither it nor another key."""
    try:
        yield
    except ValueError as error:
        if str(cfg.base) in str(error) or "linearization." in str(error):
            raise
        raise ValueError(f"base={cfg.base}: {error}") from error


def build_strategy(cfg: DictConfig, module: Training) -> Strategy:
    """One device, or DDP: adapters and their optimizer are small.

    Raises:
        ValueError: a strategy that spreads weights, or devices that are not there.
    """
    several = len({stage.train for *_, stage in module.stages}) > 1 or any(
        not stage.cross_entropy and not stage.kl for *_, stage in module.stages
    )  # of attention_transfer alone layers that stay, and output projections, have no gradient
    if cfg.strategy._target_:
        strategy = hydra.utils.instantiate(cfg.strategy)
        if not isinstance(strategy, OneDevice | DataParallel) or strategy.layout.context > 1:
            raise ValueError("strategy: job=linearize runs on one device or with strategy=ddp")
        return strategy
    try:
        if count_devices(cfg.trainer.accelerator, cfg.trainer.devices) * cfg.trainer.num_nodes == 1:
            return OneDevice(device_of(cfg.trainer.accelerator, cfg.trainer.devices))
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ValueError(f"trainer: {error}") from error
    return DataParallel(find_unused_parameters=several)


def adopt(cfg: DictConfig, module: Training, data: Any, folder: Path) -> None:
    """Read the base model, linearize it, put LoRA on it, and give it to the module.

    Raises:
        ValueError: the base model does not fit, or the tokenizer does not fit it.
    """
    with naming_base(cfg):
        settings = choose_softmax_layers(cfg, data, folder)
        model = load_pretrained(cfg.base, settings, DTYPES[cfg.base_dtype])
        begin_maps(cfg, model, data)
    needed = data.manifest["vocab_size"]
    if needed > model.config.vocab_size:
        raise ValueError(
            f"tokenizer: it has {needed} tokens, and base={cfg.base} has embeddings for {model.config.vocab_size}: "
            "give the base model's own"
        )
    if cfg.teacher_top_k is not None:
        sequences = math.ceil(cfg.max_tokens / module.batch_tokens) * module.batch_tokens // data.sequence_length
        module.teacher_store = TeacherStore(data, sequences, cfg.teacher_top_k)
        device = device_of(cfg.trainer.accelerator, cfg.trainer.devices)
        module.teacher_store.prepare(model, str(cfg.base), cfg.trainer.precision, device)
    if cfg.lora is not None:
        try:
            add_lora(model, **OmegaConf.to_container(cfg.lora, resolve=True))
        except TypeError as error:
            raise ValueError(f"lora: {str(error).removeprefix('add_lora() ')}") from error
    module.adopt(model)
    new = sum(parameter.numel() for parameter in model.new_parameters().values())
    trained = sum(p.numel() for name, p in model.named_parameters() if name in module.trained)
    log.info(
        f"{settings.mixer} {settings.gate if settings.mixer == 'liger' else ''} over {cfg.base}: {new} new parameters, "
        f"{trained} trained" + (f", softmax layers {list(settings.softmax_layers)}" if settings.softmax_layers else "")
    )


def choose_softmax_layers(cfg: DictConfig, data: Any, folder: Path) -> Linearization:
    """The settings with the layers that stay softmax attention; a run that goes on keeps those that it chose."""
    settings = hydra.utils.instantiate(cfg.linearization, _convert_="all")
    if cfg.softmax_layers is None:
        return settings
    if (folder / KEPT).is_file():
        return dataclasses.replace(settings, softmax_layers=tuple(json.loads((folder / KEPT).read_text())["kept"]))
    (way, number), found = next(iter(OmegaConf.to_container(cfg.softmax_layers).items())), None
    if way == "every":
        config = linearized_config(PreTrainedConfig.get_config_dict(cfg.base)[0], settings)
        kept = every(config.num_hidden_layers, number)
    else:
        model = load_pretrained(cfg.base, settings, DTYPES[cfg.base_dtype])
        found = measure_sensitivity(cfg, model, data)
        kept = choose_layers(found, number)
        log.info(
            "nats per token that each layer loses when it alone is linearized: "
            + ", ".join(f"{layer}: {loss:.4f}" for layer, loss in enumerate(found.tolist()))
        )
    record = {"kept": list(kept), "sensitivity": None if found is None else found.tolist()}
    if ranks().rank == 0:
        write_whole(folder / KEPT, json.dumps(record) + "\n")
    return dataclasses.replace(settings, softmax_layers=kept)


def measure_sensitivity(cfg: DictConfig, model: LinearizedForCausalLM, data: Any) -> torch.Tensor:
    """What each layer loses when it alone is linearized, on the first batches of the train text."""
    begin_maps(cfg, model, data)
    return sensitivity(model, first_batches(cfg, model, data, SENSITIVITY_BATCHES))


def begin_maps(cfg: DictConfig, model: LinearizedForCausalLM, data: Any) -> None:
    """Begin feature maps that are fitted to text, where the settings have such."""
    if model.linearization.feature_map == "clusters":
        batches = first_batches(cfg, model, data, FITTING_BATCHES)
        fit_clusters(model, [{key: batch[key] for key in ("input_ids", "cu_seqlens")} for batch in batches])


def first_batches(
    cfg: DictConfig, model: LinearizedForCausalLM, data: Any, number: int
) -> list[dict[str, torch.Tensor]]:
    """Arguments of the model for the first micro-batches of the train text, both on the trainer's device."""
    device = device_of(cfg.trainer.accelerator, cfg.trainer.devices)
    model.to(device)
    names = {"input_ids": "input_ids", "shift_labels": "targets", "cu_seqlens": "cu_seqlens"}
    batches = itertools.islice(data.train_dataloader(), number)
    return [{name: batch[key].to(device) for name, key in names.items()} for batch in batches]


def finish(cfg: DictConfig, parts: Parts, folder: Path) -> None:
    """Leave `adapter/` (where there is LoRA) and `export/`, write summary.json, and print what came out."""
    trainer, module, data = parts
    summary = measured(trainer, module, data)
    module.to(trainer.strategy.root_device)  # Lightning has put it into main memory
    summary["teacher_loss"] = module.measure("teacher") if module.has_teacher else module.before["teacher"]
    summary["loss_before_training"] = module.before["student"]
    if not trainer.is_global_zero:
        return
    model = module.model
    summary["new_parameters"] = sum(parameter.numel() for parameter in model.new_parameters().values())
    summary["trained_parameters"] = sum(p.numel() for n, p in model.named_parameters() if n in module.trained)
    closing = [f"teacher:  loss {summary['teacher_loss']:.4f} nats per token on the same text"]
    if summary.get("unigram_bits_per_byte"):
        unigram = summary["unigram_bits_per_byte"] * math.log(2) * data.validation_bytes / summary["validation_tokens"]
        summary["recovery"] = (unigram - summary["validation_loss"]) / (unigram - summary["teacher_loss"])
        closing.append(f"recovery: {summary['recovery']:.1%} of the teacher's advantage over the unigram model")
    if (has_lora(model) or model.new_parameters()) and not module.changes_base:
        save_adapter(model, folder / "adapter", base=str(cfg.base))
        closing.append(f"adapter:  {folder}/adapter/")
    export_merged(model, data.hf_tokenizer, folder / "export")
    closing += [
        f"model:    {folder}/export/ (Hugging Face format; import lit_modules.networks makes it known)",
        f'write on: palimpsest job=generate checkpoint={folder} prompt="Returns the"',
    ]
    conclude(trainer, summary, folder, closing)
