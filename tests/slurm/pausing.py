"""Callback that holds a run at a step, so that a test can disturb it there."""

import os
import time
from pathlib import Path
from typing import Any

import lightning

SECONDS = 120  # that a test may take


class Pauses(lightning.Callback):
    """At the beginning of a step of an attempt of a job: says in `folder` that it waits, until a test says go.

    Args:
        folder: where `waits-<rank>` appears, and `go` is waited for; in the second attempt `waits-<rank>-1` and `go-1`.
        step: how many steps are whole by then; a list of them for the first attempts.
        rank: the one that waits; null for all.
    """

    def __init__(self, folder: str, step: int | list[int], rank: int | None = None) -> None:
        self.folder, self.rank = Path(folder), rank
        self.steps = [step] if isinstance(step, int) else step

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        mark = f"-{attempt}" if attempt else ""
        waits = self.folder / f"waits-{trainer.global_rank}{mark}"
        if waits.exists() or attempt >= len(self.steps) or self.rank not in (None, trainer.global_rank):
            return
        if trainer.global_step != self.steps[attempt]:
            return
        waits.write_text(str(os.getpid()))
        deadline = time.monotonic() + SECONDS
        while not (self.folder / f"go{mark}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
