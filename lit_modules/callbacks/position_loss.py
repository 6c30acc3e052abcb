"""The loss over tokens trained, and over tokens of context: how well a model uses distant context."""

import csv
import io
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from common.atomic_files import write_atomic
from common.settings import SettingError, check_whole
from lit_modules.callbacks.pictures import ignore_disk_errors, log_picture
from lit_modules.loggers.figures import draw_loss, draw_position_loss
from lit_modules.trainer_parts import data_module


class PositionLoss(Callback):
    """Callback that draws `figures/loss.png` and `figures/position_loss.png`, with a table, after each validation.

    Positions count the tokens that the model sees: those of the same document within the same sequence.

    Args:
        window: tokens of the moving average (101 in the paper's figure 2); odd.

    Raises:
        ValueError: the window is even or not positive.
    """

    def __init__(self, window: int = 101) -> None:
        check_whole("callbacks.position_loss.window", window, 1)
        if window % 2 == 0:
            problem = "has no middle"
            raise SettingError("callbacks.position_loss.window", window, "give an odd number of tokens", problem)
        self.window = window

    @ignore_disk_errors()
    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / "figures"
        found = module.validation
        table = io.StringIO(newline="")
        rows = enumerate(zip(found.position_loss, found.position_tokens, strict=True), 1)
        csv.writer(table).writerows(
            [("context_tokens", "loss", "tokens"), *((i, f"{loss:.6f}", int(n)) for i, (loss, n) in rows)]
        )
        write_atomic(folder / "position_loss.csv", table.getvalue())
        path = folder / "position_loss.png"
        length = data_module(trainer).sequence_length
        draw_position_loss(found.position_loss, found.position_tokens, self.window, length, path)
        log_picture(trainer, "position_loss", path)
        train, held_out = loss_curves(Path(trainer.default_root_dir) / "metrics.csv")
        if train:
            log_picture(trainer, "loss", draw_loss(train, held_out, folder / "loss.png"))


def loss_curves(metrics: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (tokens, loss) of training and of the held-out text, from a run's `metrics.csv`."""
    if not metrics.is_file():
        return [], []
    with open(metrics, encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))

    def curve(key: str) -> list[tuple[float, float]]:
        return [(float(row["tokens"]), float(row[key])) for row in rows if row.get(key)]

    return curve("train/loss"), curve("validation/loss")
