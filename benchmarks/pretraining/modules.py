"""The module of `job=pretrain`, for benchmarks that train it for a few steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from lit_modules.pretraining import Pretraining

CONF = Path(__file__).resolve().parents[2] / "conf"


def compose(*overrides: str) -> DictConfig:
    """Compose the command's configuration with these overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def pretraining(
    model: str, device: torch.device, tokens: int, length: int, overrides: Sequence[str] = (), **settings: Any
) -> Pretraining:
    """Build a model of `conf/model` on `device`, not yet sharded or compiled.

    AdamW (fused on a GPU) has a learning rate that leaves the weights unchanged.

    Args:
        tokens: per optimizer step.
        length: tokens of a sequence.
        settings: further arguments of Pretraining.
    """
    fused = ["+optimizer.fused=true"] * torch.cuda.is_available()
    cfg = compose(f"model={model}", "optimizer.lr=1e-7", *fused, *overrides)
    with device:
        return Pretraining(
            hydra.utils.instantiate(cfg.model, _convert_="all"),
            optimizer=hydra.utils.instantiate(cfg.optimizer, _convert_="all"),
            schedule=lambda seen: 1.0,
            batch_tokens=tokens,
            sequence_length=length,
            **settings,
        )
