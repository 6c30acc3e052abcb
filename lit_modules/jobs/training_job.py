"""Common steps of every training job: settings, Trainer, run folder, resuming, loggers."""

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import hydra
import lightning
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from safetensors import SafetensorError

from common.atomic_files import replace_atomically
from common.quantities import count
from common.setting_nodes import plain_dict
from common.setting_types import check_type
from common.settings import SettingError, check_choice, check_number, check_switch, check_whole
from data_pipeline.tokens.token_data import TokenData
from lit_modules import checkpoints
from lit_modules.callbacks.device_stats import describe_ranks
from lit_modules.callbacks.preemption import handle_signals
from lit_modules.callbacks.watchdog import report_culprit
from lit_modules.jobs import starts
from lit_modules.language_modelling import Training, check_optimizer
from lit_modules.launching import failures, run_folder
from lit_modules.launching import process as launched
from lit_modules.launching.value_types import check_arguments, check_node
from lit_modules.loggers.csv import MetricsCsv
from lit_modules.parallel.recomputing import check_policy
from lit_modules.planning import out_of_memory
from lit_modules.trainer_parts import rank_strategy

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
Module = TypeVar("Module", bound=Training)
GROUPS = ("tokenizer", "model", "linearization", "data", "optimizer", "schedule", "strategy", "callbacks", "logger")


class TrainingParts(NamedTuple, Generic[Module]):
    """What a job builds before it reads any text; the module is that of the job."""

    trainer: lightning.Trainer
    module: Module
    data: TokenData


def train(
    cfg: DictConfig,
    build: Callable[[DictConfig, Path], TrainingParts[Module]],
    adopt: Callable[[DictConfig, Module, TokenData, Path], None],
    finish: Callable[[DictConfig, TrainingParts[Module], Path], None],
) -> None:
    """Check the configuration, prepare the text, train (or resume training), and write an evaluated model.

    All checks of settings come before any data is read.

    Args:
        build: builds the parts of the training and refuses bad settings; reads no text.
        adopt: fits the module to the prepared data; may take long, and a run killed during it can be resumed.
        finish: exports and reports the result; every rank calls it.

    Raises:
        ValueError: a setting cannot work; the line names its key.
        RunFailed: the run could not continue, for a reason that no setting caused.
    """
    if not cfg.job.makes_a_run:
        raise SettingError("job.makes_a_run", False, "leave it true, a training needs a run's folder")
    folder = Path(HydraConfig.get().runtime.output_dir)
    check_settings(cfg)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    quieten_libraries()
    parts = build(cfg, folder)
    trainer, module, data = parts
    refuse_local_sweep(trainer)
    lock = run_folder.lock_folder(folder) if trainer.is_global_zero else None
    config = run_folder.resolved_config(folder, cfg)
    # newest_intact reads the whole checkpoint
    find = checkpoints.newest_intact if trainer.is_global_zero else checkpoints.newest_checkpoint
    checkpoint = find(folder / "checkpoints")
    add_loggers(trainer, cfg, folder, config, checkpoint)
    log.info("run: %s%s", folder, describe_start(folder, checkpoint))

    data.resumed = checkpoints.data_fingerprint(folder / "checkpoints")
    data.prepare()
    with run_folder.write_initial_config(folder, config) if trainer.is_global_zero else contextlib.nullcontext():
        adopt(cfg, module, data, folder)
    module.data_fingerprint = data.fingerprint
    module.components = tuple(data.component_bytes)
    module.phase_starts = stages_and_phases(module.phase_starts, data.phase_starts)
    if trainer.is_global_zero:
        save_tokenizer(data.hf_tokenizer, folder / "tokenizer")
    log.info(describe_training(trainer, module, data))
    if trainer.is_global_zero:
        starts.record_start(trainer, folder, config, checkpoint)
    exit_code = 1
    try:
        with handle_signals(trainer, module):
            fit_and_measure(trainer, module, data, checkpoint)
            finish(cfg, parts, folder)
        exit_code = 0
    except (OSError, SafetensorError) as error:
        raise run_folder.RunFailed(f"{folder}: {error}; resume=auto goes on from the last checkpoint") from error
    finally:
        for logger in trainer.loggers:
            if hasattr(logger, "close"):
                logger.close(exit_code)
        if lock is not None:
            lock.close()


def describe_start(folder: Path, checkpoint: Path | None) -> str:
    """Describe where a resumed run starts; empty for a new run."""
    if checkpoint is not None:
        return f", resumed from {checkpoint.name}"
    began = (folder / run_folder.CONFIG).is_file()
    return f", which has no checkpoint in {folder}/checkpoints: it starts from step 0" if began else ""


def stages_and_phases(stages: dict[int, str], phases: dict[int, str]) -> dict[int, str]:
    """Return the names of the stages and phases that start at each optimizer step."""
    steps = sorted({*stages, *phases})
    return {step: ", ".join(name for part in (stages, phases) if (name := part.get(step))) for step in steps}


def fit_and_measure(trainer: lightning.Trainer, module: Training, data: TokenData, checkpoint: Path | None) -> None:
    """Train to the end, then evaluate on all the held-out text unless the last validation did.

    Raises:
        KeyboardInterrupt: the user interrupted the training; Lightning itself would only exit.
        Preempted: a signal ended the run, which has a checkpoint.
        SilentExit: another rank caused this one's end, and has reported it.
        RunFailed: the held-out loss is not a number.
    """
    with report_culprit(trainer):
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            if trainer.interrupted:
                raise KeyboardInterrupt("; resume=auto goes on from the last checkpoint") from None
            raise
        if module.measured_whole != trainer.global_step:
            trainer.limit_val_batches = 1.0
            trainer.validate(module, datamodule=data, verbose=False)
    assert module.validation is not None  # if the last one in training did not suffice, this one was
    if not math.isfinite(module.validation.loss):
        raise run_folder.RunFailed(
            f"{trainer.default_root_dir}: the held-out loss at the end is {module.validation.loss}, so nothing is "
            "exported, and the checkpoints stay: a lower optimizer.lr, a longer schedule.warmup_tokens or "
            "trainer.precision=32-true may fix it in a new run"
        )


def quieten_libraries() -> None:
    """Silence messages of libraries that repeat ours or that a user cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # importing Lightning sets its own level
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)  # only a name
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # a single process is intended
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # rows are memory-mapped


def check_settings(cfg: DictConfig) -> None:
    """Check the settings outside the groups, and the types of those in groups.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    for key in ("max_tokens", "log_every_tokens", "validate_every_tokens", "checkpoint_every_tokens"):
        check_whole(key, cfg[key], 1)
    check_whole("validation_tokens", cfg.validation_tokens, 1, null=True)
    check_whole("seed", cfg.seed, 0, 2**32 - 1)
    check_switch("compile", cfg.compile)
    check_type("data_dir", cfg.data_dir, str)
    check_policy(cfg.activation_checkpointing)
    check_arguments(cfg, GROUPS)
    check_choice("trainer.accelerator", cfg.trainer.accelerator, ACCELERATORS)
    check_choice("trainer.precision", cfg.trainer.precision, PRECISIONS)
    check_node("trainer", cfg.trainer, lightning.Trainer)
    check_optimizer(plain_dict(cfg.optimizer))
    if cfg.data.batch_tokens > cfg.max_tokens:
        problem = f"is more than the run's max_tokens={cfg.max_tokens}"
        raise SettingError("data.batch_tokens", cfg.data.batch_tokens, "lower the first, or raise the second", problem)
    check_number("trainer.gradient_clip_val", cfg.trainer.gradient_clip_val, least=0, null=True)


def build_trainer(cfg: DictConfig, module: Training, strategy: Strategy, folder: Path) -> lightning.Trainer:
    """Build the Trainer of a configuration, without its loggers.

    Raises:
        ValueError: the requested devices are not available.
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
            callbacks=[*callbacks, checkpoints.RandomState(), failure_recorder(cfg, folder)],
            plugins=[environment] if environment else None,
            logger=False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # the data module gives each rank its part of a global batch
            num_sanity_val_steps=0,
            inference_mode=False,  # validation generates samples with modules that may be compiled
            log_every_n_steps=1,  # nothing is logged through Lightning; this only avoids a warning
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ValueError(f"trainer: {error}") from error
    return trainer


def refuse_local_sweep(trainer: lightning.Trainer) -> None:
    """Raise ValueError for a local sweep (-m) over several devices.

    Lightning would start the other ranks with the same command, and each would run the sweep itself.
    """
    if trainer.world_size > 1 and launched.this_process().alone and HydraConfig.get().mode == RunMode.MULTIRUN:
        problem = "is not for a sweep (-m) on this machine, whose runs have one device each"
        raise SettingError("trainer.devices", trainer.num_devices, "give 1, or -m hydra/launcher=slurm", problem)


def check_on_other_machine(cfg: DictConfig, folder: Path, build: Callable[[DictConfig, Path], TrainingParts]) -> None:
    """Raise ValueError for settings that `train` would refuse on the run's own machines.

    Args:
        cfg: the configuration, with trainer.devices and trainer.num_nodes as the launcher starts them.
        folder: the run's folder; it need not exist.
        build: as for `train`.
    """
    check_settings(cfg)
    quieten_libraries()
    here = copy.deepcopy(cfg)
    here.trainer.accelerator = "cpu"  # this machine may have no GPU, or fewer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about this machine, which will not run it
        build(here, folder)
    run_folder.resolved_config(folder, cfg)


def set_lengths(cfg: DictConfig, trainer: lightning.Trainer, module: Training, data: TokenData) -> None:
    """Set accumulation and the interval and length of validation, in micro-batches for this number of ranks."""
    readers = rank_strategy(trainer).layout.data
    trainer.accumulate_grad_batches = data.accumulation(readers)
    if cfg.validation_tokens is not None:
        trainer.limit_val_batches = math.ceil(cfg.validation_tokens / data.validation_batch_tokens(readers))
    trainer.val_check_interval = module.steps_for_tokens(cfg.validate_every_tokens) * trainer.accumulate_grad_batches


def failure_recorder(cfg: DictConfig, folder: Path) -> LambdaCallback:
    """Return a callback that records a training error at once.

    Lightning then ends the other ranks, which would otherwise appear to have failed first.
    """

    def record(trainer: lightning.Trainer, module: Training, error: BaseException) -> None:
        failures.record_failure(folder, out_of_memory.explain_error(cfg, error))

    return LambdaCallback(on_exception=record)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer in the run's folder, so that the run can generate without other files."""
    if not folder.is_dir():
        with replace_atomically(folder) as partial:
            tokenizer.save_pretrained(partial)


def add_loggers(
    trainer: lightning.Trainer, cfg: DictConfig, folder: Path, config: dict[str, Any], checkpoint: Path | None
) -> None:
    """Add metrics.csv and the configured loggers to the trainer; they continue at the checkpoint's step."""
    if not trainer.is_global_zero:
        return
    metrics = MetricsCsv(folder)
    step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    metrics.resume_from(step)
    settings = {**config, "commit": run_folder.code_commit(), "ranks": describe_ranks(trainer)}
    # passed after instantiation: Hydra must not build the targets that the settings name
    others = [hydra.utils.instantiate(logger, _partial_=True) for logger in cfg.logger.values()]
    trainer.loggers = [metrics, *(logger(folder=folder, settings=settings) for logger in others)]


def describe_training(trainer: lightning.Trainer, module: Training, data: TokenData) -> str:
    """Describe the training in three lines."""
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
