"""`job=pretrain`: train a causal language model from scratch on blocks of text."""

from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, count_parameters, export_pretrained
from lit_modules.parallel.choosing import choose
from lit_modules.parallel.context import check_heads, check_tokens
from lit_modules.parallel.gathering import gathered
from lit_modules.parallel.layout import Layout
from lit_modules.parallel.strategies import Sharded
from lit_modules.parallel.tensor import check_split
from lit_modules.pretraining import Pretraining
from lit_modules.results import conclude, measured
from lit_modules.trainer import Parts, build_trainer, set_lengths, train


def run(cfg: DictConfig) -> None:
    """Train (or go on training), and leave a measured model; see lit_modules.trainer.train."""
    train(cfg, build, adopt_tokenizer, finish)


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
    check_spread(model_config, data, trainer.strategy.layout)
    set_lengths(cfg, trainer, module, data)
    return trainer, module, data


def check_spread(config: PalimpsestConfig, data: Any, layout: Layout) -> None:
    """Raise ValueError where heads or tokens cannot be shared as `layout` says; the line names the key."""
    if layout.tensor > 1:
        check_split(config, layout.tensor)
    if layout.context > 1:
        check_heads(config, layout.context, layout.tensor)
        check_tokens(data.micro_batch_size * data.sequence_length, layout.context)
        check_tokens(data.validation_batch_tokens(1), layout.context)


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


def adopt_tokenizer(cfg: DictConfig, module: Pretraining, data: Any, folder: Path) -> None:
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


def finish(cfg: DictConfig, parts: Parts, folder: Path) -> None:
    """Export the trained model, write summary.json, and print what came out."""
    trainer, module, data = parts
    trained = gathered(module.model, trainer.strategy)
    if not trainer.is_global_zero:
        return
    export(trained, data.hf_tokenizer, folder / "export")
    closing = [
        f"model:    {folder}/export/ (Hugging Face format)",
        f'write on: palimpsest job=generate checkpoint={folder} prompt="Returns the"',
    ]
    conclude(trainer, measured(trainer, module, data), folder, closing)


def export(model: PalimpsestForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the model and its tokenizer in Hugging Face format, whole or not at all."""
    if folder.is_dir():  # a run that was killed after this, which has the same weights at its end
        return
    beside = folder.with_name(".export")
    export_pretrained(model, beside)
    tokenizer.save_pretrained(beside)
    beside.rename(folder)
