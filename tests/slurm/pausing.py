"""A callback with which tests hold a run at a step, so that something happens to it just then."""

import os
import time
from pathlib import Path
from typing import Any

import lightning

SECONDS = 120  # that a test may take


class Pauses(lightning.Callback):
    """At the beginning of a step, in the first attempt of a job: says in `folder` that it waits, until a test says go.

    Args:
        folder: where `waits-<rank>` appears, and `go` is waited for.
        step: how many steps are whole by then.
        rank: the one that waits; null for all.
    """

    def __init__(self, folder: str, step: int, rank: int | None = None) -> None:
        self.folder, self.step, self.rank = Path(folder), step, rank

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        waits = self.folder / f"waits-{trainer.global_rank}"
        again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0" or waits.exists()
        if again or trainer.global_step != self.step or self.rank not in (None, trainer.global_rank):
            return
        waits.write_text(str(os.getpid()))
        deadline = time.monotonic() + SECONDS
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
