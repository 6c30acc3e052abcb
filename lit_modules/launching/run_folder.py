"""The folder of a run: where it is, whether it is finished, who holds it, and what may change when it is resumed.

`runs/<experiment>/<timestamp>/` holds `.hydra/`, `config.yaml` (what the run began with, resolved), `tokenizer/`,
`checkpoints/`, `metrics.csv`, `figures/`, `export/`, `logs/` (of the ranks but the first) and, once the run has
finished, `summary.json`.
Only the standard library and OmegaConf are imported here, since every start of the command passes through.
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
from common.settings import differences

CONFIG = "config.yaml"
SUMMARY = "summary.json"
LOCK = ".lock"

# What a resumed run may do differently: everything that changes neither the weights' shapes, nor the data, nor the
# mathematics of a step. Everything else must be as the run began.
MAY_CHANGE = (
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
    # where text lies, whose content is compared by its fingerprint
    "data.source.path",
    "data.source.paths",
    "data.path",
    "data.corpus",
)


class RunFailed(RuntimeError):
    """A run that ends early for a reason that no setting caused (it diverged, its disk is full): exit status 1."""


class SilentExit(Exception):
    """The end of a process whose reason another has told the user, or this one already has. `status`: to exit with."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def choose_run(makes_a_run: bool, runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """The folder of this run: a new one, or with `resume` one that is there.

    Args:
        makes_a_run: whether the job leaves a folder; for others it is the current one.
        runs_dir: the folder of all runs.
        experiment: the experiment's name, as in `experiment=fox/fox_pro_360m`; None where none is chosen.
        resume: None (a new run), "auto" (the newest unfinished run of this experiment that no process holds, or a
            new one), or a run's folder.

    Raises:
        ValueError: `resume` names a folder that is no run, or one that has finished.
    """
    if not makes_a_run:
        return "."
    if resume is not None and resume != "auto":
        folder = Path(resume)
        if not (folder / CONFIG).is_file():
            sweep = " (that is a sweep's: give one of its runs, or -m)" if runs_in(folder) else ""
            raise ValueError(
                f"resume={resume} is not a run's folder: it has no {CONFIG}; give one below {runs_dir}/{sweep}"
            )
        if (folder / SUMMARY).is_file():
            raise ValueError(f"resume={resume} has finished: it has a {SUMMARY}; start a new run without resume")
        return str(folder)
    parent = Path(runs_dir) / (experiment or "default")
    if resume == "auto":
        found = newest_unfinished(parent)
        if found is not None:
            return str(found)
    return str(new_folder(parent))


def choose_sweep(runs_dir: str, experiment: str | None, resume: str | None) -> str:
    """The folder of a sweep (`-m`), in which its runs are 0, 1, 2, ...: a new one, or with `resume` one that is there.

    Args:
        runs_dir: the folder of all runs.
        experiment: as for `choose_run`.
        resume: None (a new sweep), "auto" (the sweep of the newest unfinished run of this experiment, or a new one), a
            sweep's folder, or a run's, which is then a sweep of one (see `sweep_run`).

    Raises:
        ValueError: `resume` names a folder without a run, or one in which every run has finished.
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
        raise ValueError(f"resume={resume} is not the folder of a run or of a sweep: give one below {runs_dir}/")
    if all((run / SUMMARY).is_file() for run in begun):
        raise ValueError(f"resume={resume} has finished: it has a {SUMMARY}; start a new run without resume")
    return str(folder)


def sweep_run(sweep: str, number: int) -> str:
    """The folder of a sweep's run, below the sweep's: its number; "." where `sweep` is itself a run that is resumed.

    Raises:
        ValueError: it is one run, and the sweep has several.
    """
    if not (Path(sweep) / CONFIG).is_file():
        return str(number)
    if number > 0:
        raise ValueError(f"resume: {sweep} is one run, and this sweep (-m) has several: give the settings of that run")
    return "."


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder: itself, or those of a sweep, which has none of its own."""
    if (folder / CONFIG).is_file():
        return [folder]
    found = [each for each in folder.iterdir() if each.name.isdecimal() and each.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def newest_unfinished(parent: Path) -> Path | None:
    """The newest run below `parent`, in sweeps too, that has begun, has not finished, and is not running now; None if
    there is none."""
    if not parent.is_dir():
        return None
    for folder in sorted((f for f in parent.iterdir() if f.is_dir()), key=lambda f: f.name, reverse=True):
        for run in runs_in(folder):
            if (run / CONFIG).is_file() and not (run / SUMMARY).is_file() and not is_held(run):
                return run
    return None


def new_folder(parent: Path) -> Path:
    """Create and return `parent/<timestamp>`; runs that start in the same second get -2, -3, ... behind it."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)  # fails if it exists: whoever makes it, has it
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"runs_dir: {parent} cannot be written ({error.strerror or error})") from error
        return folder
    raise ValueError(f"{parent} holds 1000 runs of the second {stamp}: wait a second and start again")


def choose_hydra(makes_a_run: bool, folder: str) -> str | None:
    """Where Hydra writes what it composed: `.hydra`, and for a resumed run a folder of its own inside, so that what
    the run began with stays. None for a job that leaves no folder."""
    if not makes_a_run:
        return None
    if (Path(folder) / ".hydra").is_dir():
        return f".hydra/resumed-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return ".hydra"


def hold(folder: Path) -> TextIO:
    """Lock the run's folder for this process, as long as the returned file is open (the lock dies with the process).

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
        return handle  # a file system without locks: nothing can be known of other processes
    os.register_at_fork(after_in_child=handle.close)  # data workers would hold it on after a kill of this process
    return handle


def is_held(folder: Path) -> bool:
    """Whether a process that is alive holds the run's folder."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not see each other
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def begun(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """Write the resolved configuration of a new run: from then on it can be resumed. Taken back for a ValueError, by
    which a run is refused."""
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
    """The resolved configuration as plain containers; for a resumed run, checked against what the run began with.

    Raises:
        ValueError: a key differs that a resumed run may not change; the line names it.
    """
    now = OmegaConf.to_container(cfg, resolve=True)
    path = folder / CONFIG
    if not path.is_file():
        return now
    began = with_current_targets(OmegaConf.to_container(OmegaConf.load(path)))
    for key, (before, after) in differences(began, now).items():
        if before is None and after is False:  # a switch that the version which began the run did not have
            continue
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE):
            raise ValueError(
                f"{key}={after} differs from the run that is resumed, which has {key}={before} ({folder}): "
                f"give {key}={before}, or start a new run without resume"
            )
    return now


def discard_unbegun(folder: Path) -> None:
    """Remove what Hydra wrote for a run that was refused before it began, and its folder if nothing else is in it."""
    if (folder / CONFIG).is_file():
        return
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (folder / ".hydra" / name).unlink(missing_ok=True)
    ours = ("palimpsest.log", LOCK, ".meeting", "started.json", "failed.json")
    for name in (*ours, "softmax_layers.json", ".softmax_layers.json.lock"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for empty in (folder / ".hydra", folder):
        with contextlib.suppress(OSError):  # a folder that holds what is not ours stays
            empty.rmdir()


def commit() -> str | None:
    """The commit of the checkout that runs, with "-dirty" when files differ from it; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, perhaps below somebody else's checkout
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, which says that the run has finished."""
    write_atomic(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
