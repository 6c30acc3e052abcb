"""Log the results of a measurement to the wandb run of the checkpoint's training."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.setting_nodes import plain_dict
from lit_modules.launching import run_folder
from lit_modules.loggers.csv import MetricsCsv
from lit_modules.loggers.wandb_sync import RUN_ID

log = logging.getLogger(__name__)


def log_to_run(run: Path, values: Mapping[str, float], pictures: Mapping[str, Path]) -> None:
    """Log values and figures at the run's last step, if it has a wandb run; only warn if the run is still running."""
    if not (run / "wandb" / RUN_ID).is_file():
        return
    if run_folder.is_locked(run):
        log.warning("%s is going on, so its wandb run is left alone: the same command logs to it later", run)
        return
    from lit_modules.loggers.wandb import Wandb

    logger = Wandb(run, {}, **settings(run))
    step = last_step(run)
    logger.log_metrics(values, step)
    for name, path in pictures.items():
        logger.log_image(name, [str(path)], step)
    logger.close(0)


def settings(run: Path) -> dict[str, Any]:
    """Return the wandb settings (project and so on) of the run's configuration."""
    given = plain_dict(OmegaConf.load(run / run_folder.CONFIG), resolve=False).get("logger") or {}
    return {key: value for key, value in given.get("wandb", {}).items() if key != "_target_"}


def last_step(run: Path) -> int:
    """Return the optimizer step of the last row of the run's metrics; 0 if there are none."""
    rows = MetricsCsv(run).rows()[1:]
    return int(rows[-1][0]) if rows else 0
