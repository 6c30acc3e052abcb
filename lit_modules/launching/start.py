"""Start of a run on each of its ranks: its folder, whether work is left, and its log."""

import contextlib
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.atomic_files import write_atomic
from common.setting_types import check_type
from common.settings import SettingError, check_switch
from lit_modules.launching import consistency, failures, rank_logs, rendezvous, restarts, supervision
from lit_modules.launching.choices import choices
from lit_modules.launching.process import ProcessInfo, this_process
from lit_modules.launching.run_folder import (
    SUMMARY,
    choose_hydra_folder,
    choose_run_folder,
    choose_sweep_folder,
    sweep_run,
)

log = logging.getLogger(__name__)

START_FILE = "started.json"  # {"job", "attempt", "at"}: the start that a requeue continues


def register_resolvers() -> None:
    """Register the resolvers by which conf/ chooses folders and files, with the same result on all ranks.

    They are cached, so that each choice is made once.
    """
    for function in (
        run_folder,
        sweep_folder,
        sweep_run,
        hydra_folder,
        rank_logs.log_file,
        gpus_per_node,
        choices,
    ):
        OmegaConf.register_new_resolver(function.__name__, function, use_cache=True, replace=True)


def run_folder(makes_a_run: bool, runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """Return choose_run's folder on all ranks; a requeued start continues in its own folder."""
    check_switch("job.makes_a_run", makes_a_run)
    check_type("runs_dir", runs_dir, str)
    check_type("resume", resume, str | None)
    if not makes_a_run:
        return "."
    here = this_process()

    def choose() -> str:
        began = find_requeued_folder(here, Path(runs_dir) / (experiment or "default"))
        return str(began) if began else choose_run_folder(makes_a_run, runs_dir, experiment, resume)

    return choose() if here.launcher == "lightning" else rendezvous.agree_on_folder(choose)


def sweep_folder(runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """Return choose_sweep's folder on all ranks."""
    check_type("runs_dir", runs_dir, str)
    return rendezvous.agree_on_folder(lambda: choose_sweep_folder(runs_dir, experiment, resume))


def hydra_folder(makes_a_run: bool, folder: str) -> str | None:
    """Return choose_hydra's folder; None on all ranks except 0, which alone writes Hydra's files."""
    return choose_hydra_folder(makes_a_run, folder) if this_process().rank == 0 else None


def gpus_per_node(accelerator: str, devices: Any) -> Any:
    """Return the GPUs per node that a launcher requests: one per device, or None on CPUs."""
    return None if accelerator == "cpu" else devices


def find_requeued_folder(here: ProcessInfo, parent: Path) -> Path | None:
    """Return the newest run below `parent` that this start created before its requeue; None without one."""
    if here.job is None or here.attempt == 0 or not parent.is_dir():
        return None
    for folder in sorted((each for each in parent.iterdir() if each.is_dir()), key=lambda f: f.name, reverse=True):
        if start_of_folder(folder) == here.job:
            return folder
    return None


def start_of_folder(folder: Path) -> str | None:
    """Return the name (`ProcessInfo.job`) of the start that last ran here; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / START_FILE).read_text(encoding="utf-8")).get("job")
    return None


def check_switches(cfg: DictConfig) -> None:
    """Raise ValueError for a switch of the command that is neither true nor false."""
    for key in ("debug", "dry_run"):
        check_switch(key, cfg[key])


def prepare_rank(cfg: DictConfig, folder: Path) -> bool:
    """Prepare this rank for its job: check consistency, set the trainer's sizes, and open its log.

    Returns:
        Whether work is left; False for a finished run that was requeued or belongs to a resumed sweep.

    Raises:
        ValueError: the ranks cannot run together, or their number differs from the one asked for.
        run_folder.SilentExit: another rank reports the mistake.
    """
    here = this_process()
    supervision.send_folder(folder)
    if cfg.dry_run:
        raise SettingError("dry_run", True, "give -m hydra/launcher=slurm as well", "prints the script of a launcher")
    if here.launcher == "lightning" and here.rank > 0:
        rank_logs.redirect_to_log_file(folder, here)
        return True
    consistency.check_consistency(cfg, folder)
    rank_logs.redirect_to_log_file(folder, here)
    if (here.attempt > 0 or cfg.resume is not None) and (folder / SUMMARY).is_file():
        if here.rank == 0:
            log.info("run: %s has finished; nothing is left to do", folder)
        return False
    if here.rank == 0:
        failures.archive_failure(folder)
        if here.attempt == 0:
            restarts.reset_count(folder)
        if here.job is not None:
            when = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            write_atomic(folder / START_FILE, json.dumps({"job": here.job, "attempt": here.attempt, "at": when}) + "\n")
    return True
