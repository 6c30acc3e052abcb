"""Parts of a run's Trainer that Lightning sets without declaring their types."""

from typing import TypeVar

import lightning
from lightning.pytorch.callbacks import Callback

from data_pipeline.tokens.token_data import TokenData
from lit_modules.parallel.strategies import RankStrategy

AnyCallback = TypeVar("AnyCallback", bound=Callback)


def data_module(trainer: lightning.Trainer) -> TokenData:
    """Return the data module that the trainer reads."""
    return trainer.datamodule  # type: ignore[attr-defined]  # set as fit and validate start


def find_callback(trainer: lightning.Trainer, kind: type[AnyCallback]) -> AnyCallback | None:
    """Return the trainer's first callback of a class; None without one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by the constructor
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def rank_strategy(trainer: lightning.Trainer) -> RankStrategy:
    """Return the trainer's strategy, which a job has built."""
    return trainer.strategy  # type: ignore[return-value]  # Lightning declares only the base class
