"""Hydra callback for `-m hydra/launcher=slurm`; imports submitit only if that launcher is used."""

import importlib.metadata
import sys
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SlurmLaunching(Callback):
    """Hydra callback that replaces submitit's executor by ours before hydra-submitit-launcher uses it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse the launcher without -m: Hydra would ignore it and train on the login node."""
        if is_slurm(config):
            exit_with(
                "it needs -m: palimpsest -m ... hydra/launcher=slurm; leave the launcher out to run on this machine"
            )

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_slurm(config):
            return
        try:
            importlib.metadata.version("hydra-submitit-launcher")
        except importlib.metadata.PackageNotFoundError:
            exit_with(
                "the package hydra-submitit-launcher is not installed; it belongs to an extra: run "
                "`pip install 'palimpsest-lm[slurm]'`"
            )
        from lit_modules.launching.slurm_submission import replace_executor

        replace_executor(config)


def is_slurm(config: DictConfig) -> bool:
    """Return whether the configured launcher submits to SLURM."""
    return config.hydra.launcher._target_.endswith(".SlurmLauncher")


def exit_with(line: str) -> NoReturn:
    """Exit with one line; Hydra only warns about exceptions in a callback."""
    print(f"palimpsest: hydra/launcher=slurm: {line}", file=sys.stderr)
    sys.exit(2)
