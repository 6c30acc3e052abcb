"""When checkpoints are written, and which are kept."""

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from common.settings import check_whole
from lit_modules.checkpoints.folders import clear_partials, folder_name, link_best, remove_older
from lit_modules.checkpoints.strategy import CheckpointsTensors
from lit_modules.checkpoints.writing import WriteOutcome

log = logging.getLogger(__name__)


class Checkpoints(Checkpoint):
    """Callback that saves every `every_tokens`, and keeps the last few and the best by validation loss.

    Training continues while a checkpoint is written, and waits only if the next one is due earlier. An older checkpoint
    is removed only after a newer one is complete. If one cannot be written (a full disk), an error is logged, earlier
    ones remain, and training continues. The strategy must be a `CheckpointsTensors`.

    Args:
        every_tokens: tokens between two checkpoints; rounded to whole steps, at least one.
        keep_last: number of newest checkpoints to keep.

    Attributes:
        checkpoint_seconds: total time that training waited for checkpoints.

    Raises:
        ValueError: `keep_last` is under 1, or `every_tokens` is not positive.
    """

    def __init__(self, every_tokens: int, keep_last: int = 2) -> None:
        check_whole("callbacks.checkpoints.every_tokens", every_tokens, 1)
        check_whole("callbacks.checkpoints.keep_last", keep_last, 1)
        self.every_tokens = every_tokens
        self.keep_last = keep_last
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.due = False
        self.checkpoint_seconds = 0.0
        self.saved_step: int | None = None  # of the last or the pending checkpoint
        self._best_before: tuple[float | None, int | None] = (None, None)  # restored if the pending one is not written
        self._waited = 0.0  # for the pending one

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]

    def on_fit_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            clear_partials(checkpoints_folder(trainer))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not module.ends_step(batch_idx):
            return
        step = trainer.global_step
        self.due = self.due or step % module.steps_for_tokens(self.every_tokens) == 0 or step == trainer.max_steps
        assert trainer.val_check_batch is not None
        if self.due and (batch_idx + 1) % trainer.val_check_batch != 0:
            self.save(trainer)  # else on_validation_end saves; a kill before it repeats the validation

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.due or self.is_best(module.validation.loss):
            self.wait(trainer)  # which one is the best depends on whether the previous one was written
            self.save(trainer, module.validation.loss)

    def is_best(self, loss: float) -> bool:
        """Return whether no checkpoint has a lower validation loss."""
        return math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.due:
            self.save(trainer)
        self.wait(trainer)

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        try:
            self.wait(trainer)
        except Exception as error:  # the first error must remain visible
            log.error("the checkpoint under way could not be finished: %s", error)

    def save(self, trainer: lightning.Trainer, loss: float | None = None) -> None:
        """Start writing this step's checkpoint, after the previous one is complete. Every rank takes part.

        Args:
            loss: of the validation at this step, if there was one.
        """
        self.due = False
        if self.saved_step == trainer.global_step:
            return
        self.wait(trainer)
        began = time.perf_counter()
        self._best_before = self.best_loss, self.best_step
        best = loss is not None and self.is_best(loss)
        if best:  # set before saving: the checkpoint itself records that it is the best
            self.best_loss, self.best_step = loss, trainer.global_step
        self.saved_step = trainer.global_step
        path = checkpoints_folder(trainer) / folder_name(trainer.global_step)
        trainer.save_checkpoint(path, storage_options=partial(self.remove_unneeded, path, trainer.global_step, best))
        self._waited = time.perf_counter() - began

    def wait(self, trainer: lightning.Trainer) -> Path | None:
        """Wait until the pending checkpoint is written. Every rank takes part.

        Returns:
            Its path; None if none was pending or it could not be written.
        """
        began = time.perf_counter()
        assert isinstance(trainer.strategy, CheckpointsTensors)
        outcome = trainer.strategy.wait_for_checkpoint()
        if outcome is None:
            return None
        if outcome.error is not None:
            self.saved_step = None
            self.best_loss, self.best_step = self._best_before
        self.log_duration(trainer, outcome, self._waited + time.perf_counter() - began)
        return outcome.path if outcome.error is None else None

    def log_duration(self, trainer: lightning.Trainer, outcome: WriteOutcome, waited: float) -> None:
        """Log the time that a checkpoint took."""
        self.checkpoint_seconds += waited
        module: Any = trainer.lightning_module
        metrics: dict[str, float] = {
            "tokens": trainer.global_step * module.batch_tokens,
            "checkpoint/waited_seconds": waited,
            "checkpoint/write_seconds": outcome.seconds,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)

    def remove_unneeded(self, path: Path, step: int, best: bool) -> None:
        """Link a complete checkpoint as the best if it is, and remove those that are no longer kept."""
        if best:
            link_best(path)
        remove_older(path.parent, self.keep_last, step)


def checkpoints_folder(trainer: lightning.Trainer) -> Path:
    """Return the run's `checkpoints/`."""
    return Path(trainer.default_root_dir) / "checkpoints"
