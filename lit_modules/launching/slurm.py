"""Hydra's callback around `-m hydra/launcher=slurm`. submitit is imported only where that launcher is used."""

import importlib.metadata
import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ThroughSlurm(Callback):
    """Puts our way of submitting in the place of submitit's before the launcher of hydra-submitit-launcher uses it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not config.hydra.launcher._target_.endswith(".SlurmLauncher"):
            return
        try:
            importlib.metadata.version("hydra-submitit-launcher")
        except importlib.metadata.PackageNotFoundError:
            print(
                "palimpsest: hydra/launcher=slurm: the package hydra-submitit-launcher is not installed; it belongs to "
                "an extra: run `pip install 'palimpsest-lm[slurm]'`, or -e '.[slurm]' in a checkout",
                file=sys.stderr,
            )
            sys.exit(2)  # Hydra only warns of a callback's exception
        from lit_modules.launching.submission import take_over

        take_over(config)
