"""The folder of a run: its path, lock, completion, and the settings that a resume may change.

`runs/<experiment>/<timestamp>/` holds `.hydra/`, `config.yaml` (the initial configuration, resolved), `tokenizer/`,
`checkpoints/`, `metrics.csv`, `figures/`, `export/`, `logs/` (of all ranks except 0) and, once the run has finished,
`summary.json`. Only the standard library and OmegaConf are imported here, since every command imports this.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from common.atomic_files import write_atomic
from common.moved_targets import with_current_targets
from common.settings import SettingError, differences, shown

CONFIG = "config.yaml"
SUMMARY = "summary.json"
LOCK = ".lock"
ROOT = Path(__file__).resolve().parents[2]  # of the code that runs

# Settings that a resumed run may change: those that affect neither the weights' shapes nor the training data. The last
# digits may change with them, and schedule=plateau. All others must be as in the original run.
CHANGEABLE_KEYS = (
    "job",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "strategy",
    "callbacks",
    "logger",
    "resume",
    "debug",
    "dry_run",
    "compile",
    "activation_checkpointing",
    "runs_dir",
    "data_dir",
    "log_every_tokens",
    "validate_every_tokens",
    "validation_tokens",
    "checkpoint_every_tokens",
    "data.data_dir",
    "data.micro_batch_size",
    "data.num_workers",
    "data.processes",
    "data.strict",
    "data.most_skipped",
    # locations of text; its content is compared by fingerprint
    "data.source.path",
    "data.source.paths",
    "data.path",
    "data.corpus",
)


class RunFailed(RuntimeError):
    """Error that ends a run early for a reason that no setting caused (divergence, a full disk): exit status 1."""


class SilentExit(Exception):
    """Silent exit with `status`: the reason was already printed, here or by another rank."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def choose_run_folder(makes_a_run: bool, runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """Return the folder of this run: a new one, or an existing one for `resume`.

    Args:
        makes_a_run: whether the job writes a run folder; other jobs use the current folder.
        runs_dir: the folder of all runs.
        experiment: the experiment's name, as in `experiment=fox/fox_pro_360m`; None without one.
        resume: None (a new run), "auto" (the newest unfinished run of this experiment that no process holds, else a new
            one), or a run's folder.

    Raises:
        ValueError: `resume` names a folder without a run, or a finished run.
    """
    if not makes_a_run:
        return "."
    if resume is not None and resume != "auto":
        folder = Path(resume)
        if not (folder / CONFIG).is_file():
            sweep = " (that is a sweep's: give one of its runs, or -m)" if runs_in(folder) else ""
            raise SettingError(
                "resume", resume, f"it has no {CONFIG}; give one below {runs_dir}/{sweep}", "is not a run's folder"
            )
        if (folder / SUMMARY).is_file():
            raise _finished_error(resume)
        return str(folder)
    parent = Path(runs_dir) / (experiment or "default")
    if resume == "auto":
        found = newest_unfinished(parent)
        if found is not None:
            return str(found)
    return str(new_folder(parent))


def choose_sweep_folder(runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """Return the folder of a sweep (`-m`), whose runs are 0, 1, 2, ...: a new one, or an existing one for `resume`.

    Args:
        runs_dir: the folder of all runs.
        experiment: as for `choose_run_folder`.
        resume: None (a new sweep), "auto" (the sweep of the newest unfinished run of this experiment, else a new one),
            a sweep's folder, or a run's folder, which is then a sweep of one (see `sweep_run`).

    Raises:
        ValueError: `resume` names a folder without runs, or one whose runs have all finished.
    """
    parent = Path(runs_dir) / (experiment or "default")
    if resume is None or resume == "auto":
        found = None if resume is None else newest_unfinished(parent)
        if found is None:
            return str(new_folder(parent))
        return str(found if found.parent == parent else found.parent)
    folder = Path(resume)
    begun = [run for run in runs_in(folder) if (run / CONFIG).is_file()]
    if not begun:
        raise SettingError("resume", resume, f"give one below {runs_dir}/", "is not the folder of a run or of a sweep")
    if all((run / SUMMARY).is_file() for run in begun):
        raise _finished_error(resume)
    return str(folder)


def _finished_error(resume: str) -> SettingError:
    return SettingError("resume", resume, f"it has a {SUMMARY}; start a new run without resume", "has finished")


def sweep_run(sweep: str, number: int) -> str:
    """Return a run's folder relative to its sweep's: its number, or "." if `sweep` is itself a resumed run.

    Raises:
        ValueError: `sweep` is one run, but the sweep has several.
    """
    if not (Path(sweep) / CONFIG).is_file():
        return str(number)
    if number > 0:
        raise ValueError(f"resume: {sweep} is one run, and this sweep (-m) has several: give the settings of that run")
    return "."


def runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder: the folder itself if it is a run, else the runs of a sweep."""
    if (folder / CONFIG).is_file():
        return [folder]
    found = [each for each in folder.iterdir() if each.name.isdecimal() and each.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def newest_unfinished(parent: Path) -> Path | None:
    """Return the newest run below `parent`, including sweeps, that is unfinished and not running; None without one."""
    if not parent.is_dir():
        return None
    for folder in sorted((f for f in parent.iterdir() if f.is_dir()), key=lambda f: f.name, reverse=True):
        for run in runs_in(folder):
            if (run / CONFIG).is_file() and not (run / SUMMARY).is_file() and not is_locked(run):
                return run
    return None


def new_folder(parent: Path) -> Path:
    """Create and return `parent/<timestamp>`, with suffix -2, -3, ... for runs that start in the same second."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)  # fails if it exists, so only one process gets it
        except FileExistsError:
            continue
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
            raise SettingError("runs_dir", parent, "give another folder", problem) from error
        return folder
    raise ValueError(f"{parent} holds 1000 runs of the second {stamp}: wait a second and start again")


def choose_hydra_folder(makes_a_run: bool, folder: str) -> str | None:
    """Return the folder for Hydra's files: `.hydra`, or a new subfolder for a resumed run, to keep the original files.

    None for a job without a run folder.
    """
    if not makes_a_run:
        return None
    if (Path(folder) / ".hydra").is_dir():
        return f".hydra/resumed-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return ".hydra"


def lock_folder(folder: Path) -> TextIO:
    """Lock the run's folder while the returned file is open; the lock ends with the process.

    Raises:
        ValueError: another process runs in this folder.
    """
    handle = open(folder / LOCK, "w")  # noqa: SIM115 (it stays open as long as the run lasts)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ValueError(f"{folder} is in use by another process: wait for it, or start a new run") from None
    except OSError:
        return handle  # a file system without locks cannot show other processes
    os.register_at_fork(after_in_child=handle.close)  # else workers keep the lock after a kill of this process
    return handle


def is_locked(folder: Path) -> bool:
    """Return whether a live process holds the run's folder."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent checks do not see each other
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def write_initial_config(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """Write the resolved configuration of a new run, which makes it resumable.

    Remove it if the run raises ValueError.
    """
    path = folder / CONFIG
    is_new = not path.is_file()
    if is_new:
        write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(config)))
    try:
        yield
    except ValueError:
        if is_new:
            path.unlink(missing_ok=True)
        raise


def resolved_config(folder: Path, cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain containers; check a resumed run's against the original.

    Raises:
        ValueError: a key differs that a resumed run must not change; the line names it.
    """
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    path = folder / CONFIG
    if not path.is_file():
        return now
    began = with_current_targets(OmegaConf.to_container(OmegaConf.load(path)))
    for key, (before, after) in differences(began, now).items():
        if before is None and after is False:  # a switch that the original run's version did not have
            continue
        if not any(key == free or key.startswith(f"{free}.") for free in CHANGEABLE_KEYS):
            problem = f"differs from the run that is resumed, which has {key}={shown(before)} ({folder})"
            raise SettingError(key, after, f"give {key}={shown(before)}, or start a new run without resume", problem)
    return now


def discard_unstarted(folder: Path) -> None:
    """Remove Hydra's files of a run that was refused before its start, and the folder if nothing else is in it."""
    if (folder / CONFIG).is_file():
        return
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (folder / ".hydra" / name).unlink(missing_ok=True)
    ours = ("palimpsest.log", LOCK, ".meeting", "started.json", "failed.json")
    for name in (*ours, "softmax_layers.json", ".softmax_layers.json.lock"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for empty in (folder / ".hydra", folder):
        with contextlib.suppress(OSError):  # a folder with other files remains
            empty.rmdir()


def code_commit() -> str | None:
    """Return the commit of the running checkout, with "-dirty" for local changes; None outside a git checkout."""
    if not (ROOT / ".git").exists():  # installed, possibly inside another project's checkout
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, which marks the run as finished."""
    write_atomic(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
