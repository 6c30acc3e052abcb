"""Pictures in the loggers that take them, and what happens when the disk does not."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import lightning

log = logging.getLogger(__name__)


@contextlib.contextmanager
def ignore_disk_errors() -> Iterator[None]:
    """A picture or a sample that cannot be written costs a line in the log, not the run."""
    try:
        yield
    except OSError as error:
        log.error(f"{error.filename or 'a file'} could not be written ({error.strerror or error}); training goes on")


def show(trainer: lightning.Trainer, key: str, path: Path) -> None:
    """Log the PNG at `path` as `figures/<key>` wherever the logger has a place for images (wandb)."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(f"figures/{key}", [str(path)], step=trainer.global_step)
