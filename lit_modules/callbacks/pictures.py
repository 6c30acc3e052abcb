"""Pictures for loggers that support them, and tolerance of a full disk."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import lightning

log = logging.getLogger(__name__)


@contextlib.contextmanager
def ignore_disk_errors() -> Iterator[None]:
    """Log an OSError instead of raising it: a picture or sample that cannot be written must not end the run."""
    try:
        yield
    except OSError as error:
        log.error("%s could not be written (%s); training goes on", error.filename or "a file", error.strerror or error)


def log_picture(trainer: lightning.Trainer, key: str, path: Path) -> None:
    """Log the PNG at `path` as `figures/<key>` to loggers with image support (wandb)."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(f"figures/{key}", [str(path)], step=trainer.global_step)
