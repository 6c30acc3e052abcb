"""`job=pretrain`: train a causal language model from scratch on blocks of text."""

import functools
from pathlib import Path
from typing import Any

import hydra
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from common.settings import SettingError
from data_pipeline.tokens.token_data import TokenData
from data_pipeline.tokens.tokenizer import add_document_start, set_special_tokens
from lit_modules.jobs.summary import measured_values, write_and_print
from lit_modules.jobs.training_job import TrainingParts, build_trainer, check_on_other_machine, set_lengths, train
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, export_pretrained
from lit_modules.networks.counting import planned_parameters
from lit_modules.parallel.choosing import check_memory, choose_strategy
from lit_modules.parallel.context import check_heads, check_tokens
from lit_modules.parallel.gathering import gather_model
from lit_modules.parallel.layout import RankLayout
from lit_modules.parallel.recomputing import check_policy
from lit_modules.parallel.strategies import Sharded
from lit_modules.parallel.tensor import check_split
from lit_modules.planning import out_of_memory
from lit_modules.pretraining import Pretraining
from lit_modules.trainer_parts import rank_strategy


def run(cfg: DictConfig) -> None:
    """Train (or resume training), and write an evaluated model; see lit_modules.jobs.training_job.train."""
    with out_of_memory.explain_out_of_memory(cfg):
        train(cfg, build, adopt_tokenizer, write_results)


def check_run(cfg: DictConfig, folder: Path) -> None:
    """Raise ValueError for settings that `run` would refuse, without its devices, data and memory."""
    check_on_other_machine(cfg, folder, functools.partial(build, weights=False))


def build(cfg: DictConfig, folder: Path, weights: bool = True) -> TrainingParts[Pretraining]:
    """Return trainer, module and data module of a configuration; nothing is read from disk yet.

    Args:
        cfg: the configuration.
        folder: the run's folder.
        weights: False builds the network without memory for its weights, for checks.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    data = hydra.utils.instantiate(cfg.data)  # first: the model takes its vocabulary from the tokenizer
    model_config = hydra.utils.instantiate(cfg.model, _convert_="all")
    schedule = hydra.utils.instantiate(cfg.schedule)
    check_policy(cfg.activation_checkpointing, model_config.num_layers)
    strategy = build_strategy(cfg, model_config)
    if weights:
        check_memory(model_config, cfg, strategy)
    module = Pretraining(
        model_config,
        optimizer=hydra.utils.instantiate(cfg.optimizer, _convert_="all"),
        schedule=schedule,
        batch_tokens=cfg.data.batch_tokens,
        sequence_length=cfg.data.sequence_length,
        compile=cfg.compile,
        activation_checkpointing=cfg.activation_checkpointing,
        weights_later=not weights or isinstance(strategy, Sharded),
    )
    trainer = build_trainer(cfg, module, strategy, folder)
    check_spread(model_config, data, rank_strategy(trainer).layout)
    set_lengths(cfg, trainer, module, data)
    return TrainingParts(trainer, module, data)


def check_spread(config: PalimpsestConfig, data: TokenData, layout: RankLayout) -> None:
    """Raise ValueError if heads or tokens cannot be split as `layout` says; the line names the key."""
    if layout.tensor > 1:
        check_split(config, layout.tensor)
    if layout.context > 1:
        check_heads(config, layout.context, layout.tensor)
        check_tokens(data.micro_batch_size * data.sequence_length, layout.context)
        check_tokens(data.validation_batch_tokens(1), layout.context)


def build_strategy(cfg: DictConfig, config: PalimpsestConfig) -> Strategy:
    """Return the configured strategy, or one chosen by the model's size and the devices.

    Raises:
        ValueError: the requested devices are not available.
    """
    if cfg.strategy._target_:
        return hydra.utils.instantiate(cfg.strategy)
    parameters = planned_parameters(config)
    return choose_strategy(cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes, parameters)


def adopt_tokenizer(cfg: DictConfig, module: Pretraining, data: TokenData, folder: Path) -> None:
    """Make model and tokenizer agree on special tokens, so that the export generates as it was trained.

    The tokenizer adds the start token if training documents had one.

    Raises:
        ValueError: the tokenizer has more tokens than the model has embeddings.
    """
    rows, needed = module.model.config.vocab_size, data.manifest["vocab_size"]
    if needed > rows:
        problem = f"is smaller than the tokenizer's {needed} tokens"
        raise SettingError("model.vocab_size", rows, f"give model.vocab_size={needed} or more", problem)
    if data.documents_have_start:
        add_document_start(data.hf_tokenizer)
    set_special_tokens(module.model, data.hf_tokenizer)


def write_results(cfg: DictConfig, parts: TrainingParts[Pretraining], folder: Path) -> None:
    """Export the trained model, write summary.json, and print the results."""
    trainer, module, data = parts
    trained = gather_model(module.model, rank_strategy(trainer))
    if trained is None or not trainer.is_global_zero:
        return
    export(trained, data.hf_tokenizer, folder / "export")
    closing = [
        f"model:    {folder}/export/ (Hugging Face format)",
        f'write on: palimpsest job=generate checkpoint={folder} prompt="Returns the"',
    ]
    write_and_print(trainer, measured_values(trainer, module, data), folder, closing)


def export(model: PalimpsestForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the model and its tokenizer in Hugging Face format, atomically."""
    if not folder.is_dir():  # else written by a run killed after this point: the same final weights
        export_pretrained(model, folder, tokenizer)
