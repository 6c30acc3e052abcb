"""Hydra's callback around `-m hydra/launcher=slurm`. submitit is imported only where that launcher is used."""

import importlib.metadata
import sys
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ThroughSlurm(Callback):
    """Puts our way of submitting in the place of submitit's before the launcher of hydra-submitit-launcher uses it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse the launcher without -m: Hydra would not use it, and the run would train on the login node."""
        if is_slurm(config):
            refuse("it needs -m: palimpsest -m ... hydra/launcher=slurm; leave the launcher out to run on this machine")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_slurm(config):
            return
        try:
            importlib.metadata.version("hydra-submitit-launcher")
        except importlib.metadata.PackageNotFoundError:
            refuse(
                "the package hydra-submitit-launcher is not installed; it belongs to an extra: run "
                "`pip install 'palimpsest-lm[slurm]'`"
            )
        from lit_modules.launching.slurm_submission import take_over

        take_over(config)


def is_slurm(config: DictConfig) -> bool:
    """Whether the configured launcher submits to SLURM."""
    return config.hydra.launcher._target_.endswith(".SlurmLauncher")


def refuse(line: str) -> NoReturn:
    """End the command with one line. An exception would not do: Hydra only warns of a callback's."""
    print(f"palimpsest: hydra/launcher=slurm: {line}", file=sys.stderr)
    sys.exit(2)
