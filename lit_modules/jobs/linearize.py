"""`job=linearize`: replace a pretrained model's attention by recurrences, and train the result."""

import contextlib
import dataclasses
import inspect
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import hydra
import torch
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from common.setting_nodes import plain_dict
from common.settings import SettingError, check_choice, check_keys, check_whole
from data_pipeline.tokens.token_data import TokenData
from lit_modules.jobs.summary import measured_values, write_and_print
from lit_modules.jobs.training_job import TrainingParts, build_trainer, check_on_other_machine, set_lengths, train
from lit_modules.linearization.layer_setup import check_softmax_layers, set_up_layers
from lit_modules.linearization.module import LinearizationTraining as Training
from lit_modules.linearization.stages import TrainingStage, check_groups
from lit_modules.linearization.teacher_store import TeacherStore
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM, load_pretrained
from lit_modules.networks.linearized.adapters import export_merged, save_adapter
from lit_modules.networks.linearized.conversion import (
    linearized_config,
    read_config,
    without_weights,
)
from lit_modules.networks.linearized.lora import add_lora, groups_of, has_lora
from lit_modules.parallel.choosing import count_devices, single_device
from lit_modules.parallel.strategies import DataParallel, OneDevice
from lit_modules.planning import out_of_memory

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def run(cfg: DictConfig) -> None:
    """Linearize, train (or resume training), and write an adapter and an evaluated model."""
    with out_of_memory.explain_out_of_memory(cfg):
        train(cfg, build_and_check_base, prepare_training, write_results)


def build_and_check_base(cfg: DictConfig, folder: Path) -> TrainingParts[Training]:
    """Run `build`, and read the base model, so that its errors come before any text is read.

    Raises:
        ValueError: a setting cannot work; the base model cannot be read, is damaged, or does not fit its tokenizer.
    """
    trainer, module, data = build(cfg, folder)
    module.model = read_base(cfg, data)
    return TrainingParts(trainer, module, data)


def check_run(cfg: DictConfig, folder: Path) -> None:
    """Raise ValueError for settings that `run` would refuse, without its devices, data and weights."""
    check_on_other_machine(cfg, folder, build)


def build(cfg: DictConfig, folder: Path) -> TrainingParts[Training]:
    """Return trainer, module without its model, and data module.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    check_keys("linearization", (key for key in cfg.linearization if key != "_target_"), field_names(Linearization))
    settings = hydra.utils.instantiate(cfg.linearization, _convert_="all")
    stages = {name: build_stage(name, stage) for name, stage in (cfg.stages or {}).items() if stage is not None}
    check_early(cfg, settings, stages)
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
    return TrainingParts(trainer, module, data)


def field_names(kind: type) -> list[str]:
    """Return the keys of a dataclass of settings."""
    return [field.name for field in dataclasses.fields(kind)]


def build_stage(name: str, stage: DictConfig) -> TrainingStage:
    """Build one of `stages`.

    Raises:
        ValueError: it is not a mapping, or has an unknown key.
    """
    if not OmegaConf.is_dict(stage):
        raise SettingError(f"stages.{name}", stage, f"give its keys, as stages.{name}.kl=1, or null for none")
    given = plain_dict(stage)
    check_keys(f"stages.{name}", given, field_names(TrainingStage))
    train_groups = given.get("train", ["lora"])
    if not isinstance(train_groups, list):
        raise SettingError(f"stages.{name}.train", train_groups, "give groups as [lora,feature_maps]", "is not a list")
    return TrainingStage(**{**given, "train": tuple(train_groups)})


def check_early(cfg: DictConfig, settings: Linearization, stages: dict[str, TrainingStage]) -> None:
    """Raise ValueError for mistakes that show before any weights or data are read."""
    check_choice("base_dtype", cfg.base_dtype, DTYPES)
    if cfg.lora is not None and not OmegaConf.is_dict(cfg.lora):
        raise SettingError("lora", cfg.lora, "give its keys, as lora.rank=8, or null for none", "is not known")
    if cfg.base is None:
        raise SettingError("base", None, "give a pretrained model's folder, or its name on the Hub")
    if cfg.tokenizer._target_.endswith("ByteLevelBPE"):
        raise SettingError("tokenizer", "bpe", "give tokenizer=pretrained", "is trained on text, and base has its own")
    if cfg.trainer.precision == "bf16-true":
        raise ValueError(
            "trainer.precision=bf16-true would make LoRA, gates and scalars bfloat16, in which small steps are lost: "
            "give bf16-mixed"
        )
    config = base_config(cfg, settings)
    if len(settings.softmax_layers) == config.num_hidden_layers:
        problem = f"are all the layers that base={cfg.base} has"
        fix = "leave out those that are to be linearized"
        raise SettingError("linearization.softmax_layers", list(settings.softmax_layers), fix, problem)
    if cfg.teacher_top_k is not None:
        check_whole("teacher_top_k", cfg.teacher_top_k, 1, config.vocab_size)
        if not any(stage.kl for stage in stages.values()):
            fix = "set stages.finetuning.kl=1"
            raise SettingError("teacher_top_k", cfg.teacher_top_k, fix, "is for stages with kl")
    if cfg.softmax_layers is not None:
        check_softmax_layers(cfg.softmax_layers, settings, config.num_hidden_layers)
    with prefix_errors_with_base(cfg):
        model = without_weights(config)
    if cfg.lora is not None:
        add_configured_lora(cfg, model)
    check_groups(model, stages)


def base_config(cfg: DictConfig, settings: Linearization) -> PreTrainedConfig:
    """Return the base model's configuration, linearized.

    Raises:
        ValueError: it is missing or does not fit.
    """
    with prefix_errors_with_base(cfg):
        return linearized_config(read_config(str(cfg.base)), settings)


@contextlib.contextmanager
def prefix_errors_with_base(cfg: DictConfig) -> Iterator[None]:
    """Prefix a ValueError that names no key with `base=...`."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, SettingError) and error.key.startswith("linearization."):
            raise
        if isinstance(error, SettingError) and error.key == "source":
            raise SettingError("base", error.value, error.fix, error.problem) from error
        raise SettingError("base", cfg.base, str(error)) from error


def build_strategy(cfg: DictConfig, module: Training) -> Strategy:
    """Return a strategy of one device or DDP: adapters and their optimizer are small.

    Raises:
        ValueError: the strategy shards weights, or devices are missing.
    """
    several = len({each.stage.train for each in module.stages}) > 1 or any(
        not each.stage.cross_entropy and not each.stage.kl for each in module.stages
    )  # with attention_transfer alone, layers that stay and output projections have no gradient
    if cfg.strategy._target_:
        if cfg.strategy.get("context_parallel_size", 1) != 1:
            problem = "is not for job=linearize"
            raise SettingError("strategy.context_parallel_size", cfg.strategy.context_parallel_size, "give 1", problem)
        of_ddp = hydra.utils.get_class(cfg.strategy._target_) is DataParallel
        unused = {"find_unused_parameters": cfg.strategy.get("find_unused_parameters", several)} if of_ddp else {}
        strategy = hydra.utils.instantiate(cfg.strategy, **unused)
        if not isinstance(strategy, OneDevice | DataParallel):
            raise ValueError("strategy: job=linearize runs on one device or with strategy=ddp")
        return strategy
    if count_devices(cfg.trainer.accelerator, cfg.trainer.devices) * cfg.trainer.num_nodes == 1:
        return OneDevice(single_device(cfg.trainer.accelerator, cfg.trainer.devices))
    return DataParallel(find_unused_parameters=several)


def read_base(cfg: DictConfig, data: TokenData) -> LinearizedForCausalLM:
    """Read the base model, linearized.

    Raises:
        ValueError: it cannot be read, is damaged, or has too few embeddings for the tokenizer.
    """
    settings = hydra.utils.instantiate(cfg.linearization, _convert_="all")
    config = base_config(cfg, settings)
    known = config.max_position_embeddings
    for key in ("sequence_length", "validation_length"):
        if (length := getattr(data, key)) > known:
            log.warning(
                "data.%s=%s is more than base=%s was trained for: beyond %s tokens "
                "(max_position_embeddings) the teacher itself is off; give data.%s=%s or less",
                key,
                length,
                cfg.base,
                known,
                key,
                known,
            )
    check_tokenizer(cfg, config)
    with prefix_errors_with_base(cfg):
        model = load_pretrained(str(cfg.base), settings, DTYPES[cfg.base_dtype])
        check_finite(model)
    return model


def check_tokenizer(cfg: DictConfig, config: PreTrainedConfig) -> None:
    """Raise ValueError for a tokenizer with more tokens than the base model has embeddings."""
    needed = len(hydra.utils.instantiate(cfg.tokenizer).build(None))
    if needed > config.vocab_size:
        problem = f"has {needed} tokens, and base={cfg.base} has embeddings for {config.vocab_size}"
        raise SettingError("tokenizer.path", cfg.tokenizer.path, "give the base model's own tokenizer", problem)


def check_finite(model: LinearizedForCausalLM) -> None:
    """Raise ValueError, naming the first one, for weights that are not finite."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight.detach().sum(dtype=torch.float32)):
            raise ValueError(
                f"{name} holds values that are not finite: the model is damaged, or base_dtype too narrow for it"
            )


def prepare_training(cfg: DictConfig, module: Training, data: TokenData, folder: Path) -> None:
    """Prepare the module for training: choose the layers that keep attention, store the teacher's outputs, add LoRA."""
    model = set_up_layers(cfg, module.model, data, folder)
    if cfg.teacher_top_k is not None:
        sequences = math.ceil(cfg.max_tokens / module.batch_tokens) * module.batch_tokens // data.sequence_length
        module.teacher_store = TeacherStore(data, sequences, cfg.teacher_top_k)
        device = single_device(cfg.trainer.accelerator, cfg.trainer.devices)
        module.teacher_store.prepare(model, str(cfg.base), cfg.trainer.precision, device)
    if cfg.lora is not None:
        add_configured_lora(cfg, model)
    module.adopt(model)
    settings = model.linearization
    new = sum(parameter.numel() for parameter in model.new_parameters().values())
    trained = sum(p.numel() for name, p in model.named_parameters() if name in module.trained)
    gate = "" if settings.gate == "none" else f" {settings.gate}"
    kept = f", softmax layers {list(settings.softmax_layers)}" if settings.softmax_layers else ""
    log.info("%s%s over %s: %s new parameters, %s trained%s", settings.mixer, gate, cfg.base, new, trained, kept)
    left = groups_of([name for name in model.new_parameters() if name not in module.trained])
    if left:
        left.remove("all")
        log.warning(
            "new parameters keep their initial values, since no stage trains them: add %s to stages.%s.train, "
            "or ignore this if intended",
            ", ".join(left),
            module.stages[-1].name,
        )


def add_configured_lora(cfg: DictConfig, model: LinearizedForCausalLM) -> None:
    """Add the configured LoRA to a model, in place.

    Raises:
        ValueError: an unknown key, or LoRA that the model cannot have.
    """
    given = plain_dict(cfg.lora)
    check_keys("lora", given, list(inspect.signature(add_lora).parameters)[1:])
    add_lora(model, **given)


def write_results(cfg: DictConfig, parts: TrainingParts[Training], folder: Path) -> None:
    """Write `adapter/` (if there is LoRA or new parameters), `export/` and summary.json, and print the results."""
    trainer, module, data = parts
    summary = measured_values(trainer, module, data)
    module.to(trainer.strategy.root_device)  # Lightning has moved it to main memory
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
        if summary["teacher_loss"] < unigram:
            summary["recovery"] = (unigram - summary["validation_loss"]) / (unigram - summary["teacher_loss"])
            closing.append(f"recovery: {summary['recovery']:.1%} of the teacher's advantage over the unigram model")
        else:
            closing.append(f"recovery: none to tell, token frequencies alone have {unigram:.4f}, less than the teacher")
    if (has_lora(model) or model.new_parameters()) and not module.changes_base:
        save_adapter(model, folder / "adapter", base=str(cfg.base))
        closing.append(f"adapter:  {folder}/adapter/")
    export_merged(model, data.hf_tokenizer, folder / "export")
    closing += [
        f"model:    {folder}/export/ (Hugging Face format; import lit_modules.networks makes it known)",
        f'write on: palimpsest job=generate checkpoint={folder} prompt="Returns the"',
    ]
    write_and_print(trainer, summary, folder, closing)
