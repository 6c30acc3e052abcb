"""`job=pretrain`: train a causal language model from scratch on blocks of text."""

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from safetensors import SafetensorError

from data_pipeline.mixtures.card import draw_held_out
from data_pipeline.settings import check_whole
from lit_modules import checkpoints, runs
from lit_modules.callbacks.machines import ranks
from lit_modules.callbacks.pictures import losing_what_the_disk_refuses, show
from lit_modules.callbacks.preemption import listening
from lit_modules.callbacks.progress import count
from lit_modules.callbacks.watchdog import naming_the_cause
from lit_modules.launching import failures
from lit_modules.launching import ranks as launched
from lit_modules.metrics_csv import MetricsCsv
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, count_parameters, export_pretrained
from lit_modules.parallel.choosing import choose
from lit_modules.parallel.context import check_heads, check_tokens
from lit_modules.parallel.gathering import gathered
from lit_modules.parallel.layout import Layout
from lit_modules.parallel.recomputing import check_policy
from lit_modules.parallel.strategies import Sharded
from lit_modules.parallel.tensor import check_split
from lit_modules.pretraining import Pretraining

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def run(cfg: DictConfig) -> None:
    """Check the configuration, prepare the text, train (or go on training), and leave a measured model.

    Everything that can be refused is refused before any data is read.

    Raises:
        ValueError: a setting cannot work; the line names its key.
        RunStopped: the run could not go on, for a reason that no setting caused.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    check_settings(cfg)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    quieten_libraries()
    trainer, module, data = build(cfg, folder)
    lock = runs.hold(folder) if trainer.is_global_zero else None
    config = runs.resolved_config(folder, cfg)
    find = checkpoints.newest_whole if trainer.is_global_zero else checkpoints.newest  # one rank reads it to check it
    checkpoint = find(folder / "checkpoints")
    add_loggers(trainer, cfg, folder, config, checkpoint)
    log.info(f"run: {folder}" + (f", resumed from {checkpoint.name}" if checkpoint else ""))

    data.prepare()
    adopt_tokenizer(data, module)
    module.data_fingerprint = data.fingerprint
    module.components, module.phase_starts = tuple(data.component_bytes), data.phase_starts
    if trainer.is_global_zero:
        runs.record_config(folder, config)
        save_tokenizer(data.hf_tokenizer, folder / "tokenizer")
    log.info(describe(trainer, module, data))
    exit_code = 1
    try:
        with listening(trainer, module):
            fit_and_measure(trainer, module, data, checkpoint)
            trained = gathered(module.model, trainer.strategy)
            if trainer.is_global_zero:
                finish(trainer, module, trained, data, folder)
        exit_code = 0
    except (OSError, SafetensorError) as error:
        raise runs.RunStopped(f"{folder}: {error}; resume=auto goes on from the last checkpoint") from error
    finally:
        for logger in trainer.loggers:
            if hasattr(logger, "close"):
                logger.close(exit_code)
        if lock is not None:
            lock.close()


def fit_and_measure(trainer: lightning.Trainer, module: Pretraining, data: Any, checkpoint: Path | None) -> None:
    """Train to the end, then measure on all the held-out text unless the last validation was just that.

    Raises:
        KeyboardInterrupt: the user interrupted the training; Lightning itself would only exit.
        Preempted: the run was told to end, and has a checkpoint.
        Said: another rank is the cause of this one's end, and that has been said.
    """
    with naming_the_cause(trainer):
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            if trainer.interrupted:
                raise KeyboardInterrupt("; resume=auto goes on from the last checkpoint") from None
            raise
        if module.measured_whole != trainer.global_step:
            trainer.limit_val_batches = 1.0
            trainer.validate(module, datamodule=data, verbose=False)


def quieten_libraries() -> None:
    """Leave out what the libraries say that our own lines say, or that a user can do nothing about."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # it sets its own level when it is imported
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process by hand is meant
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # rows are memory-mapped


def build(cfg: DictConfig, folder: Path) -> tuple[lightning.Trainer, Pretraining, Any]:
    """Trainer, module and data module of a configuration; nothing is read from the disk yet.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    model_config = hydra.utils.instantiate(cfg.model, _convert_="all")
    data = hydra.utils.instantiate(cfg.data)
    schedule = hydra.utils.instantiate(cfg.schedule)
    strategy = build_strategy(cfg, model_config)
    module = Pretraining(
        model_config,
        optimizer=hydra.utils.instantiate(cfg.optimizer, _convert_="all"),
        schedule=schedule,
        batch_tokens=cfg.data.batch_tokens,
        sequence_length=cfg.data.sequence_length,
        compile=cfg.compile,
        activation_checkpointing=cfg.activation_checkpointing,
        weights_later=isinstance(strategy, Sharded),
    )
    trainer = build_trainer(cfg, module, strategy, folder)
    layout = trainer.strategy.layout
    check_spread(model_config, data, layout)
    readers = layout.data
    trainer.accumulate_grad_batches = data.accumulation(readers)
    if cfg.validation_tokens is not None:
        trainer.limit_val_batches = math.ceil(cfg.validation_tokens / data.validation_batch_tokens(readers))
    trainer.val_check_interval = module.steps_of(cfg.validate_every_tokens) * trainer.accumulate_grad_batches
    return trainer, module, data


def check_spread(config: PalimpsestConfig, data: Any, layout: Layout) -> None:
    """Raise ValueError where heads or tokens cannot be shared as `layout` says; the line names the key."""
    if layout.tensor > 1:
        check_split(config, layout.tensor)
    if layout.context > 1:
        check_heads(config, layout.context, layout.tensor)
        check_tokens(data.micro_batch_size * data.sequence_length, layout.context)
        check_tokens(data.validation_batch_tokens(1), layout.context)


def check_settings(cfg: DictConfig) -> None:
    """Raise ValueError for a setting of no group that cannot work; the line names its key."""
    for key in ("max_tokens", "log_every_tokens", "validate_every_tokens", "checkpoint_every_tokens"):
        check_whole(key, cfg[key], 1)
    if cfg.validation_tokens is not None:
        check_whole("validation_tokens", cfg.validation_tokens, 1)
    check_whole("seed", cfg.seed, 0, 2**32 - 1)
    if not isinstance(cfg.compile, bool):
        raise ValueError(f"compile={cfg.compile} is neither true nor false")
    check_policy(cfg.activation_checkpointing)
    if cfg.trainer.precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={cfg.trainer.precision} is not supported: give {', '.join(PRECISIONS)}")
    clip = cfg.trainer.gradient_clip_val
    if clip is not None and (not isinstance(clip, int | float) or clip < 0):
        raise ValueError(f"trainer.gradient_clip_val={clip} is not a norm: give a number above 0, or null for no limit")


def build_trainer(cfg: DictConfig, module: Pretraining, strategy: Strategy, folder: Path) -> lightning.Trainer:
    """The Trainer of a configuration, without its loggers.

    Raises:
        ValueError: the devices asked for are not there.
    """
    environment = launched.cluster_environment()
    callbacks = [hydra.utils.instantiate(callback, _convert_="all") for callback in cfg.callbacks.values() if callback]
    try:
        trainer = lightning.Trainer(
            **cfg.trainer,
            strategy=strategy,
            max_steps=math.ceil(cfg.max_tokens / module.batch_tokens),
            max_epochs=-1,
            check_val_every_n_epoch=None,
            callbacks=[*callbacks, checkpoints.RandomState(), first_failure(folder)],
            plugins=[environment] if environment else None,
            logger=False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # the data module gives each rank its part of a global batch
            num_sanity_val_steps=0,
            inference_mode=False,  # samples are generated in a validation, by modules that may be compiled
            log_every_n_steps=1,  # nothing is logged through Lightning: this only keeps it from warning
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ValueError(f"trainer: {error}") from error
    if trainer.world_size > 1 and launched.ranks().alone and HydraConfig.get().mode == RunMode.MULTIRUN:
        # Lightning starts the others with the same command, and each would be a sweep of its own
        raise ValueError(
            f"trainer.devices={cfg.trainer.devices}: a sweep's (-m) runs on this machine have one device each: give "
            "trainer.devices=1, or -m hydra/launcher=slurm"
        )
    return trainer


def first_failure(folder: Path) -> LambdaCallback:
    """Writes down an error in training at once: what Lightning does next ends the other ranks, who would seem first."""
    return LambdaCallback(on_exception=lambda trainer, module, error: failures.record(folder, error))


def build_strategy(cfg: DictConfig, config: PalimpsestConfig) -> Strategy:
    """The configured strategy, or the one that the model's size and the devices call for.

    Raises:
        ValueError: the devices asked for are not there.
    """
    if cfg.strategy._target_:
        return hydra.utils.instantiate(cfg.strategy)
    with torch.device("meta"):
        parameters = count_parameters(PalimpsestForCausalLM(config)).total
    try:
        return choose(cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes, parameters)
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ValueError(f"trainer: {error}") from error


def adopt_tokenizer(data: Any, module: Pretraining) -> None:
    """Take the tokenizer's special tokens into the model's configuration, so that its export generates as it should.

    Raises:
        ValueError: the tokenizer has tokens that the model has no embedding for.
    """
    rows, needed = module.model.config.vocab_size, data.manifest["vocab_size"]
    if needed > rows:
        raise ValueError(
            f"model.vocab_size={rows} is smaller than the tokenizer's {needed} tokens: "
            f"give model.vocab_size={needed} or more"
        )
    for config in (module.model.config, module.model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(data.hf_tokenizer, name))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Keep the tokenizer in the run's folder, so that the run can generate by itself."""
    if not folder.is_dir():
        beside = folder.with_name(".tokenizer")
        tokenizer.save_pretrained(beside)
        beside.rename(folder)


def add_loggers(
    trainer: lightning.Trainer, cfg: DictConfig, folder: Path, config: dict[str, Any], checkpoint: Path | None
) -> None:
    """Give the trainer metrics.csv and the configured loggers, which go on where the checkpoint stands."""
    if not trainer.is_global_zero:
        return
    metrics = MetricsCsv(folder)
    step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    metrics.resume_from(step)
    settings = {**config, "commit": runs.commit(), "ranks": ranks(trainer)}
    # the settings name targets themselves, which Hydra must not build: given after it
    others = [hydra.utils.instantiate(logger, _partial_=True) for logger in cfg.logger.values()]
    trainer.loggers = [metrics, *(logger(folder=folder, settings=settings) for logger in others)]


def describe(trainer: lightning.Trainer, module: Pretraining, data: Any) -> str:
    """What is about to be trained, in three lines."""
    tokens = trainer.max_steps * module.batch_tokens
    passes = tokens / (data.train_sequences * data.sequence_length)
    return (
        f"model: {count(module.parameter_count.active)} parameters and "
        f"{count(module.parameter_count.embedding)} in the input embedding\n"
        f"text: {count(data.train_sequences * data.sequence_length)} tokens in sequences of {data.sequence_length}; "
        f"{count(tokens)} tokens to train on, {passes:.2f} passes\n"
        f"steps: {trainer.max_steps} of {count(module.batch_tokens)} tokens, "
        f"{trainer.accumulate_grad_batches} x {data.micro_batch_size} sequences on each of {trainer.world_size} "
        f"{trainer.accelerator.__class__.__name__.removesuffix('Accelerator')}, {trainer.precision}"
    )


def finish(
    trainer: lightning.Trainer, module: Pretraining, trained: PalimpsestForCausalLM, data: Any, folder: Path
) -> None:
    """Export the trained model, write summary.json, and print what came out."""
    export(trained, data.hf_tokenizer, folder / "export")
    found = module.validation
    summary: dict[str, Any] = {
        "tokens": trainer.global_step * module.batch_tokens,
        "steps": trainer.global_step,
        "parameters": module.parameter_count.total,
        "parameters_without_embedding": module.parameter_count.active,
        "skipped_steps": module.skipped_steps,
        "validation_loss": found.loss,
        "validation_perplexity": math.exp(min(found.loss, 700.0)),
        "validation_tokens": found.tokens,
        "commit": runs.commit(),
    }
    if data.validation_bytes:
        bits = found.loss * found.tokens / math.log(2) / data.validation_bytes
        summary |= {"bits_per_byte": bits, "validation_bytes": data.validation_bytes, **data.yardsticks()}
    if found.components:
        summary["validation_by_component"] = by_component(found.components, data.component_bytes)
        picture(trainer, summary, folder / "figures" / "validation_by_component.png")
    for logger in trainer.loggers:
        logger.log_metrics({f"final/{k}": v for k, v in summary.items() if isinstance(v, float)}, trainer.global_step)
    runs.write_summary(folder, summary)
    log.info(report(summary, trainer, folder))


def by_component(found: dict[str, tuple[float, int]], held_out: dict[str, int]) -> dict[str, dict[str, float]]:
    """Loss, tokens, and bits for each of its held-out bytes, of each component of a mixture."""
    return {
        name: {
            "loss": loss,
            "tokens": tokens,
            "bytes": held_out[name],
            "bits_per_byte": loss * tokens / math.log(2) / held_out[name],
        }
        for name, (loss, tokens) in found.items()
    }


@losing_what_the_disk_refuses()
def picture(trainer: lightning.Trainer, summary: dict[str, Any], path: Path) -> None:
    """Draw the bits per byte of each component."""
    bits = {name: found["bits_per_byte"] for name, found in summary["validation_by_component"].items()}
    draw_held_out(list(bits), list(bits.values()), summary["bits_per_byte"], path)
    show(trainer, "validation_by_component", path)


def export(model: PalimpsestForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the model and its tokenizer in Hugging Face format, whole or not at all."""
    if folder.is_dir():  # a run that was killed after this, which has the same weights at its end
        return
    beside = folder.with_name(".export")
    export_pretrained(model, beside)
    tokenizer.save_pretrained(beside)
    beside.rename(folder)


def report(summary: dict[str, Any], trainer: lightning.Trainer, folder: Path) -> str:
    """What came out of a run, for the terminal."""
    lines = ["", f"held-out text: loss {summary['validation_loss']:.4f} nats per token"]
    if "bits_per_byte" in summary:
        rows = [
            ("this model", summary["bits_per_byte"]),
            ("xz -9 (of the same text)", summary["xz_bits_per_byte"]),
            ("token unigram model", summary["unigram_bits_per_byte"]),
        ]
        lines.append(f"bits per byte of the {count(summary['validation_bytes'])} held-out bytes:")
        lines += [f"  {name:<26}{value:.3f}" for name, value in rows if value is not None]
    if "validation_by_component" in summary:
        lines.append("of this model, by component:")
        lines += [f"  {n:<26}{found['bits_per_byte']:.3f}" for n, found in summary["validation_by_component"].items()]
    samples = sample_of(trainer)
    if samples:
        lines += ["", "a sample of its writing:", *(f"  | {line}" for line in samples.splitlines())]
    lines += [
        "",
        f"pictures: {folder}/figures/",
        f"model:    {folder}/export/ (Hugging Face format)",
        f'write on: palimpsest job=generate checkpoint={folder} prompt="Returns the"',
    ]
    return "\n".join(lines)


def sample_of(trainer: lightning.Trainer) -> str | None:
    """The last sample that the run wrote, with its prompt."""
    for callback in trainer.callbacks:
        if getattr(callback, "texts", None):
            return callback.prompts[-1] + callback.texts[-1]
    return None
