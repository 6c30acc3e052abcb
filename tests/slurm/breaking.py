"""Callback that makes one rank of a run fail."""

import os
from typing import Any

import lightning


class Breaks(lightning.Callback):
    """Raises on one rank at the end of a step, in the first attempt of a start."""

    def __init__(self, rank: int, step: int = 3) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            raise ArithmeticError("the third step is too much")
