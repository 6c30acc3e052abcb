"""Checkpoints that appear whole or not at all, that are checked before they are loaded, and that bring everything back.

A checkpoint is one file, written beside, flushed to the disk and renamed. Torch's files are zip archives with a CRC-32
for every tensor, so a file that was cut short or damaged is recognised without a second file beside it.
"""

import logging
import os
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d+)\.ckpt")
BEST = "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin with a write that a kill, a crash or a full disk cannot leave half done.

    A disk that does not take the file is no reason to lose the run: a line says so, `failed` keeps the path, what was
    there before stays. (Raising on the one rank that writes would leave the others waiting for it.)
    """

    failed: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` at `path`, whole or not at all."""
        path = Path(path)
        beside = path.with_name(f".{path.name}.partial")
        self.failed = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(beside, "wb") as handle:
                torch.save(checkpoint, handle)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(beside, path)
            flush_folder(path.parent)
        except (OSError, RuntimeError) as error:
            # torch's writer answers the disk's error with one of its own
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if not isinstance(cause, OSError):
                raise
            self.failed = path
            log.error(f"{path} could not be written ({cause.strerror or cause}); the checkpoints before it are intact")
        finally:
            beside.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step, oldest first: (optimizer step, file)."""
    return sorted((step_of(f), f) for f in Path(folder).glob("step_*.ckpt") if STEP.fullmatch(f.name))


def step_of(path: Path) -> int:
    """The optimizer step of a checkpoint's file name."""
    return int(STEP.fullmatch(path.name).group(1))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, or None if every part of it matches its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
            return None if part is None else f"{part} does not match its checksum"
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return str(error)


def newest_whole(folder: Path) -> Path | None:
    """The newest undamaged checkpoint in a run's `checkpoints/`; each damaged one is named in the log and passed over.

    Raises:
        ValueError: there are checkpoints, and every one is damaged.
    """
    files = step_files(folder)
    for _, path in reversed(files):
        wrong = damage(path)
        if wrong is None:
            return path
        log.warning(f"{path} is truncated or damaged ({wrong}): trying the checkpoint before it")
    if files:
        raise ValueError(
            f"{folder} has no undamaged checkpoint to go on from: start a new run without resume "
            f"(job=generate reads {BEST}, if that is whole)"
        )
    return None


class Checkpoints(Checkpoint):
    """Save every `every_tokens`, keep the last few and the best by validation loss.

    An older checkpoint is removed only after a newer one is safely written. When one cannot be written (a full disk),
    a line says so, the ones before it stay, and training goes on to the next.

    Args:
        every_tokens: tokens between two checkpoints; rounded to whole steps, at least one.
        keep_last: how many of the newest to keep.

    Raises:
        ValueError: `keep_last` is under 1, or `every_tokens` not positive.
    """

    def __init__(self, every_tokens: int, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"callbacks.checkpoints.keep_last={keep_last} keeps no checkpoint: give 1 or more")
        if every_tokens <= 0:
            raise ValueError(f"checkpoint_every_tokens={every_tokens} is not positive: give a number of tokens")
        self.every_tokens = every_tokens
        self.keep_last = keep_last
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.due = False

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not module.ends_step(batch_idx):
            return
        step = trainer.global_step
        self.due = self.due or step % module.steps_of(self.every_tokens) == 0 or step == trainer.max_steps
        if self.due and (batch_idx + 1) % trainer.val_check_batch != 0:
            self.save(trainer)  # else after the validation: a run killed while it validates does it again

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        before, loss = (self.best_loss, self.best_step), module.validation.loss
        better = self.best_loss is None or loss < self.best_loss
        if better:  # before any checkpoint is written: it has to know of itself that it is the best
            self.best_loss, self.best_step = loss, trainer.global_step
        if self.due:
            self.save(trainer)
        if better and not self.save_best(trainer):
            self.best_loss, self.best_step = before

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.due:
            self.save(trainer)

    def save(self, trainer: lightning.Trainer) -> None:
        """Write the checkpoint of this step, then remove those that are no longer kept."""
        self.due = False
        path = folder_of(trainer) / f"step_{trainer.global_step:08d}.ckpt"
        if write(trainer, path) and trainer.is_global_zero:
            for _, old in step_files(path.parent)[: -self.keep_last]:
                old.unlink()

    def save_best(self, trainer: lightning.Trainer) -> bool:
        """Write `best.ckpt`: another name for this step's checkpoint where there is one. False if it failed."""
        best = folder_of(trainer) / BEST
        same = best.with_name(f"step_{trainer.global_step:08d}.ckpt")
        linked = trainer.is_global_zero and same.is_file() and link(same, best)
        return trainer.strategy.broadcast(linked) or write(trainer, best)


def folder_of(trainer: lightning.Trainer) -> Path:
    """The run's `checkpoints/`."""
    return Path(trainer.default_root_dir) / "checkpoints"


def write(trainer: lightning.Trainer, path: Path) -> bool:
    """Write one checkpoint of the trainer's state (every rank takes part); False if the disk did not take it."""
    trainer.save_checkpoint(path)
    # rank 0 wrote, and alone knows: ranks that went on with different answers would wait for each other for ever
    return trainer.strategy.broadcast(trainer.strategy.checkpoint_io.failed != path)


def link(path: Path, name: Path) -> bool:
    """Give the file at `path` the further name `name`, in place of what had it; False where there are no links."""
    beside = name.with_name(f".{name.name}.partial")
    try:
        beside.unlink(missing_ok=True)
        os.link(path, beside)
        os.replace(beside, name)
    except OSError:
        return False
    return True


class RandomState(Callback):
    """The state of every random generator, which Lightning does not save: dropout and sampling go on as they would."""

    def __init__(self) -> None:
        self.restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, has_gauss, cached = np.random.get_state()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state  # what comes between loading and the first step may draw numbers: set at the first step

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.restored is None:
            return
        torch.set_rng_state(self.restored["torch"].cpu())
        name, keys, position, has_gauss, cached = self.restored["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        version, internal, gauss = self.restored["python"]
        random.setstate((version, tuple(internal), gauss))
        states = self.restored.get("cuda", [])
        if torch.cuda.is_available() and len(states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in states])
        self.restored = None
