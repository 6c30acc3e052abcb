"""Pictures in the loggers that take them."""

from pathlib import Path

import lightning


def show(trainer: lightning.Trainer, key: str, path: Path) -> None:
    """Log the PNG at `path` as `figures/<key>` wherever the logger has a place for images (wandb)."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(f"figures/{key}", [str(path)], step=trainer.global_step)
