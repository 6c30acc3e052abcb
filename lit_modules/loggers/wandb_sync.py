"""`job=sync`: send to wandb what runs without a network have kept on the disk.

A run leaves a folder in `<run>/wandb/` each time it starts: `offline-run-...`, or `run-...` where it could send at
once. All of them have the id of the one wandb run that they are parts of. `wandb sync` sends the parts of a run in the
order in which they began, each one behind the rows that are there, and writes `.wandb.synced` beside what it has sent.
A part that was being sent, and of which wandb did not take the rest at the end, has the file `unsent`; it is sent from
its beginning, so that rows which had arrived are there twice, the same at the same step. A part that was killed while
it was being sent is left as it is: all but its last seconds have arrived, and the resumed run does these again.
"""

import netrc
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from omegaconf import DictConfig

from lit_modules.launching import run_folder

RUN_ID = "run-id.txt"  # in <run>/wandb: the id of the wandb run
UNSENT = "unsent"  # in a part's folder
# Tries of a request. wandb's own numbers are meant for a run, which has hours: it would go on for many minutes.
FEW_TRIES = {f"WANDB__{kind}_RETRY_MAX": "4" for kind in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}


def run(cfg: DictConfig) -> None:
    """Send the unsent parts of all runs below `runs_dir`, or of the one run's folder `run`, and print what was sent.

    A run that is going on is left for later: wandb would take the part that is there for the whole.

    Raises:
        ValueError: `run` is no run's folder, there is no `runs_dir`, or no key for wandb.
        RunFailed: wandb's server does not answer, or did not take everything.
    """
    waiting = {folder: parts for folder in run_folders(cfg.run, cfg.runs_dir) if (parts := unsent_parts(folder))}
    for folder in [folder for folder in waiting if run_folder.is_held(folder)]:
        print(f"{folder}: is going on; left for later")
        del waiting[folder]
    if not waiting:
        print(f"nothing to send in {cfg.run or cfg.runs_dir}")
        return
    if (missing := no_key()) is not None:
        raise ValueError(f"logger=wandb: {missing}; nothing was sent")
    if (silent := no_answer()) is not None:
        raise run_folder.RunFailed(f"logger=wandb: {silent}; nothing was sent")
    left = send([part for parts in waiting.values() for part in parts])
    for folder, parts in waiting.items():
        sent = len([part for part in parts if part not in left])
        print(f"{folder}: {sent} of {len(parts)} parts sent to the wandb run {run_id(folder)}")
    if left:
        raise run_folder.RunFailed(
            f"{len(left)} parts were not sent, as wandb says above: the same command sends them later"
        )


def run_folders(run: str | None, runs_dir: str) -> list[Path]:
    """The folders of the runs that have something of wandb's, by name.

    Raises:
        ValueError: `run` has nothing of wandb's, or `runs_dir` is not there.
    """
    if run is not None:
        if not (Path(run) / "wandb" / RUN_ID).is_file():
            raise ValueError(f"run={run} has no wandb/{RUN_ID}: give the folder of a run that had logger=wandb")
        return [Path(run)]
    if not Path(runs_dir).is_dir():
        raise ValueError(
            f"runs_dir={runs_dir} is not there: give the folder of all runs, or run=FOLDER for one of them"
        )
    return sorted(found.parent.parent for found in Path(runs_dir).rglob(f"wandb/{RUN_ID}"))


def run_id(folder: Path) -> str:
    """The id of the wandb run of a run's folder."""
    return (folder / "wandb" / RUN_ID).read_text(encoding="utf-8").strip()


def unsent_parts(folder: Path) -> list[Path]:
    """The parts of a run that wandb does not have, or not whole, in the order in which they began.

    A part that was killed before wandb wrote anything holds a few bytes, and is left out.
    """
    offline = folder.glob("wandb/offline-run-*")
    online = (mark.parent for mark in folder.glob(f"wandb/run-*/{UNSENT}"))
    parts = [part for part in (*offline, *online) if holds_records(part) and not is_synced(part)]
    return sorted(parts, key=lambda part: part.name.removeprefix("offline-"))


def holds_records(part: Path) -> bool:
    """Whether anything stands behind the head of the part's record."""
    return any(file.stat().st_size > 7 for file in part.glob("*.wandb"))


def is_synced(part: Path) -> bool:
    """Whether `wandb sync` has sent the part."""
    return any(part.glob("*.wandb.synced"))


def send(parts: list[Path]) -> list[Path]:
    """Call `wandb sync`, which puts the parts in order, and return those that could not be sent. What it says goes to
    stderr."""
    if not parts:
        return []
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(str, parts)]
    with tempfile.TemporaryDirectory() as logs:  # of its own, which it would leave in the current folder
        environment = {**FEW_TRIES, **os.environ, "WANDB_MODE": "online", "WANDB_DIR": logs}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=False)  # what it has sent, it marks
    return [part for part in parts if not is_synced(part)]


def server_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def no_key() -> str | None:
    """What to say where there is no key for wandb's server; None where there is one."""
    host = urllib.parse.urlsplit(server_url()).hostname or ""
    if os.environ.get("WANDB_API_KEY"):
        return None
    try:
        if netrc.netrc().authenticators(host) is not None:  # where `wandb login` puts it
            return None
    except (OSError, netrc.NetrcParseError):
        pass
    return f"there is no key for {host} (`wandb login`, or WANDB_API_KEY)"


def no_answer() -> str | None:
    """What to say where wandb's server does not answer within seconds; None where it does."""
    try:
        # wandb itself would wait for minutes; proxies in the environment are used as wandb uses them
        urllib.request.urlopen(server_url(), timeout=5).close()
    except urllib.error.HTTPError as error:
        # an answer, if not to this question; but what stands in front of a server answers for one that is down
        return None if error.code < 500 else f"{server_url()} does not answer ({error})"
    except (OSError, ValueError) as error:
        return f"{server_url()} does not answer ({error})"
    return None
