"""Failure reports: the first rank that fails alone writes failed.json and informs the user."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_modules.launching import run_folder
from lit_modules.launching.process import this_process
from lit_modules.launching.rank_logs import print_on_terminal, write_traceback

# {"rank", "world_size", "host", "error", "mistake", "log"}; for a killed rank also "killed"
FAILURE_FILE = "failed.json"


def mistake_message(error: BaseException) -> str | None:
    """Return the message of a user's mistake, which library code raises as ValueError; None for any other error."""
    return str(error) if isinstance(error, ValueError) else None


@contextlib.contextmanager
def report_first_failure(
    folder: Path, debug: bool, mistake: Callable[[Exception], str | None] = mistake_message
) -> Iterator[None]:
    """Wrap the job of each rank: the first rank that fails reports it in one line, the others exit silently.

    A single process is left alone. With `debug` every rank shows its traceback.

    Args:
        mistake: returns the message of a user's mistake, None for other errors.

    Raises:
        run_folder.SilentExit: the failure is reported; the status is 2 for a user's mistake, else 1.
    """
    try:
        yield
    except Exception as error:
        # after Lightning has dropped its ranks, this process counts as alone; failed.json may still name one of them
        if isinstance(error, run_folder.SilentExit) or (this_process().alone and first_failure(folder) is None):
            raise
        record_failure(folder, error, mistake, aloud=not debug)
        if debug:
            raise
        write_traceback(error)
        raise run_folder.SilentExit(1 if mistake(error) is None else 2) from error


def record_failure(
    folder: Path, error: BaseException, mistake: Callable[[Exception], str | None] = mistake_message, aloud: bool = True
) -> None:
    """Write failed.json for this rank's error unless the file exists; then inform the user.

    Whoever creates the file is the first: no clock is read. If the folder is missing, rank 0 discarded it and has
    reported why. Interrupts and exits are not failures and are ignored, as is a single process.
    """
    here = this_process()
    if here.alone or isinstance(error, run_folder.SilentExit) or not isinstance(error, Exception):
        return
    words = mistake(error)
    if words is None:
        words = str(error) if isinstance(error, run_folder.RunFailed) else f"{type(error).__name__}: {error}"
    found = {
        "rank": here.rank,
        "world_size": here.world_size,
        "host": host_name(),
        "error": " ".join(words.split()),
        "mistake": mistake(error) is not None,
        "log": str(folder / here.log),
    } | getattr(error, "culprit", {})  # another rank, if the watchdog knows it to be the cause
    try:
        handle = os.open(folder / FAILURE_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except (FileExistsError, FileNotFoundError):
        return
    except OSError:  # e.g. a full disk: two reports are better than none
        pass
    else:
        with contextlib.suppress(OSError), open(handle, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(found, indent=2) + "\n")
    if aloud:
        print_on_terminal(f"palimpsest: {describe_failure(found)}")


def describe_failure(found: dict[str, Any]) -> str:
    """Format a record of failed.json as one line."""
    where = f"rank {found['rank']} of {found['world_size']} on {found['host']}"
    if found.get("killed"):
        return f"{where} {found['error']}; its log is {found['log']}"
    if not found["mistake"]:
        return f"{where} failed first: {found['error']}; its log is {found['log']}"
    return found["error"] if found["rank"] == 0 else f"{found['error']} ({where})"


def first_failure(folder: Path) -> str | None:
    """Return the line for the rank that failed first; None if no failure is recorded."""
    try:
        return describe_failure(json.loads((folder / FAILURE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):  # no record, or one cut short by a full disk
        return None


def archive_failure(folder: Path) -> None:
    """Rename the failure of an earlier attempt: failed-1.json, failed-2.json, ..."""
    if (folder / FAILURE_FILE).is_file():
        number = 1 + sum(1 for _ in folder.glob("failed-*.json"))
        os.rename(folder / FAILURE_FILE, folder / f"failed-{number}.json")


def host_name() -> str:
    """Return this node's name as SLURM knows it, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
