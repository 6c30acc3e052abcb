"""The first rank of a run that failed: it alone writes failed.json, and it alone tells the user."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_modules.launching import run_folder
from lit_modules.launching.process import this_process
from lit_modules.launching.rank_logs import say_on_terminal, write_traceback

FAILED = "failed.json"  # {"rank", "world_size", "host", "error", "mistake", "log"}, of a killed rank also "killed"


def mistake(error: BaseException) -> str | None:
    """The words of a user's mistake, as library code raises it; None for any other error."""
    return str(error) if isinstance(error, ValueError) else None


@contextlib.contextmanager
def report_first_failure(
    folder: Path, debug: bool, mistake: Callable[[Exception], str | None] = mistake
) -> Iterator[None]:
    """Around the job of each rank of a run: the first that fails says so in one line, the others end without a word.

    A process alone is left as it is. With `debug` every rank shows its traceback. `mistake`: as the one above.

    Raises:
        run_folder.SilentExit: the line has been said; its status is 2 for a user's mistake, else 1.
    """
    try:
        yield
    except Exception as error:
        # a process that Lightning has let go again is alone, and the failure of one that it had started stands there
        if isinstance(error, run_folder.SilentExit) or (this_process().alone and first_failed(folder) is None):
            raise
        record(folder, error, mistake, aloud=not debug)
        if debug:
            raise
        write_traceback(error)
        raise run_folder.SilentExit(1 if mistake(error) is None else 2) from error


def record(
    folder: Path, error: BaseException, mistake: Callable[[Exception], str | None] = mistake, aloud: bool = True
) -> None:
    """Write failed.json for an error of this rank unless another, or this one, has; then tell the user.

    Whoever creates the file is the first: no clock is read. A folder that has gone was discarded by rank 0, which has
    said why. Ends that are no failures (an interrupt, an exit) are left out, and so is a process alone.
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
        "host": host(),
        "error": " ".join(words.split()),
        "mistake": mistake(error) is not None,
        "log": str(folder / here.log),
    } | getattr(error, "culprit", {})  # another rank, where the watchdog knows it to be the cause
    try:
        handle = os.open(folder / FAILED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except (FileExistsError, FileNotFoundError):
        return
    except OSError:  # a full disk, say: better said twice than not at all
        pass
    else:
        with contextlib.suppress(OSError), open(handle, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(found, indent=2) + "\n")
    if aloud:
        say_on_terminal(f"palimpsest: {told(found)}")


def told(found: dict[str, Any]) -> str:
    """A record in one line."""
    where = f"rank {found['rank']} of {found['world_size']} on {found['host']}"
    if found.get("killed"):
        return f"{where} {found['error']}; its log is {found['log']}"
    if not found["mistake"]:
        return f"{where} failed first: {found['error']}; its log is {found['log']}"
    return found["error"] if found["rank"] == 0 else f"{found['error']} ({where})"


def first_failed(folder: Path) -> str | None:
    """The line of the rank of a run that failed first; None where none has said so."""
    try:
        return told(json.loads((folder / FAILED).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):  # none, or one that the disk did not take
        return None


def set_aside(folder: Path) -> None:
    """Rename the failure of an earlier attempt: failed-1.json, failed-2.json, ..."""
    if (folder / FAILED).is_file():
        number = 1 + sum(1 for _ in folder.glob("failed-*.json"))
        os.rename(folder / FAILED, folder / f"failed-{number}.json")


def host() -> str:
    """This node's name, as SLURM calls it, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
