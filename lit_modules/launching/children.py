"""Launcher for the ranks that Lightning starts on one machine, which names a rank that is killed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lit_modules.launching.supervision import watch_children


class WatchingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher with our `watch_children`: Lightning's own silently kills rank 0 when another rank ends."""

    over = False  # whether this process is ending the other ranks itself

    def launch(
        self, function: Callable, *arguments: Any, trainer: lightning.Trainer | None = None, **settings: Any
    ) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        assert trainer is not None  # every strategy gives it
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            folder = Path(trainer.default_root_dir)
            threading.Thread(target=watch_children, args=(self.procs, folder, lambda: self.over), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*arguments, **settings)

    def kill(self, signum: int) -> None:
        self.over = True
        super().kill(signum)


class WatchesRanks(Strategy):
    """Mixin that makes a multi-process strategy use `WatchingLauncher`; put it before the strategy in the bases."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        theirs = self._launcher
        if isinstance(theirs, _SubprocessScriptLauncher):
            self._launcher = WatchingLauncher(theirs.cluster_environment, theirs.num_processes, theirs.num_nodes)
