"""`job=sync`: send the wandb data of offline runs from disk.

Each start of a run creates a folder in `<run>/wandb/`: `offline-run-...`, or `run-...` if it could send at once. All
are parts of one wandb run and share its id. `wandb sync` sends the parts of a run in order of their start, appends each
after the existing rows, and marks a sent part with a `.wandb.synced` file. A part whose remaining data wandb did not
take at the end has the file `unsent`; it is sent from its start, so rows that had arrived appear twice, identical at
the same step. A part that was killed while sending online is left alone: all but its last seconds have arrived, and the
resumed run repeats those.
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

from common.settings import SettingError
from lit_modules.launching import run_folder

RUN_ID = "run-id.txt"  # in <run>/wandb: the id of the wandb run
RUN_URL = "run-url.txt"  # beside it: the page of the wandb run, once it was online
UNSENT_MARK = "unsent"  # in a part's folder
# Most retries of a request. wandb's own numbers suit a run that lasts hours: it would retry for many minutes.
FEW_TRIES = {f"WANDB__{kind}_RETRY_MAX": "4" for kind in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}


def run(cfg: DictConfig) -> None:
    """Send the unsent parts of all runs below `runs_dir`, or of the run's folder `run`, and print the result.

    A run that is still running is skipped: wandb would take its current part as complete.

    Raises:
        ValueError: `run` is not a run's folder, `runs_dir` does not exist, or there is no key for wandb.
        RunFailed: wandb's server does not answer, or did not take everything.
    """
    waiting = {folder: parts for folder in run_folders(cfg.run, cfg.runs_dir) if (parts := unsent_parts(folder))}
    for folder in [folder for folder in waiting if run_folder.is_locked(folder)]:
        print(f"{folder}: is going on; left for later")
        del waiting[folder]
    if not waiting:
        print(f"nothing to send in {cfg.run or cfg.runs_dir}")
        return
    if (missing := missing_key_message()) is not None:
        raise SettingError("logger", "wandb", f"{missing}; nothing was sent")
    if (silent := no_answer_message()) is not None:
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
    """Return the folders of the runs with wandb data, by name.

    Raises:
        ValueError: `run` has no wandb data, or `runs_dir` does not exist.
    """
    if run is not None:
        if not (Path(run) / "wandb" / RUN_ID).is_file():
            raise SettingError("run", run, "give the folder of a run that had logger=wandb", f"has no wandb/{RUN_ID}")
        return [Path(run)]
    if not Path(runs_dir).is_dir():
        raise SettingError(
            "runs_dir", runs_dir, "give the folder of all runs, or run=FOLDER for one of them", "is not there"
        )
    return sorted(found.parent.parent for found in Path(runs_dir).rglob(f"wandb/{RUN_ID}"))


def run_id(folder: Path) -> str:
    """Return the id of the wandb run for a run's folder."""
    return (folder / "wandb" / RUN_ID).read_text(encoding="utf-8").strip()


def unsent_parts(folder: Path) -> list[Path]:
    """Return the parts of a run that wandb lacks or has only in part, in order of their start.

    A part killed before wandb wrote any record holds a few bytes, and is left out.
    """
    offline = folder.glob("wandb/offline-run-*")
    online = (mark.parent for mark in folder.glob(f"wandb/run-*/{UNSENT_MARK}"))
    parts = [part for part in (*offline, *online) if holds_records(part) and not is_synced(part)]
    return sorted(parts, key=lambda part: part.name.removeprefix("offline-"))


def holds_records(part: Path) -> bool:
    """Return whether the part's file holds more than its header."""
    return any(file.stat().st_size > 7 for file in part.glob("*.wandb"))


def is_synced(part: Path) -> bool:
    """Return whether `wandb sync` has sent the part."""
    return any(part.glob("*.wandb.synced"))


def send(parts: list[Path]) -> list[Path]:
    """Run `wandb sync`, which orders the parts, and return those that could not be sent. Its output goes to stderr."""
    if not parts:
        return []
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(str, parts)]
    with tempfile.TemporaryDirectory() as logs:  # otherwise wandb leaves its logs in the current folder
        environment = {**FEW_TRIES, **os.environ, "WANDB_MODE": "online", "WANDB_DIR": logs}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=False)  # sent parts are marked
    return [part for part in parts if not is_synced(part)]


def server_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def missing_key_message() -> str | None:
    """Return the error message if there is no key for wandb's server, else None."""
    host = urllib.parse.urlsplit(server_url()).hostname or ""
    if os.environ.get("WANDB_API_KEY"):
        return None
    try:
        if netrc.netrc().authenticators(host) is not None:  # written by `wandb login`
            return None
    except (OSError, netrc.NetrcParseError):
        pass
    return f"there is no key for {host} (`wandb login`, or WANDB_API_KEY)"


def no_answer_message() -> str | None:
    """Return the error message if wandb's server does not answer within seconds, else None."""
    try:
        # wandb itself would wait for minutes; urllib uses the environment's proxies as wandb does
        urllib.request.urlopen(server_url(), timeout=5).close()
    except urllib.error.HTTPError as error:
        # a client error is an answer; a 5xx may come from a proxy in front of a server that is down
        return None if error.code < 500 else f"{server_url()} does not answer ({error})"
    except (OSError, ValueError) as error:
        return f"{server_url()} does not answer ({error})"
    return None
