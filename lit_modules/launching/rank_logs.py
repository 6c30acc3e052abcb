"""The log of each rank: rank 0 uses the terminal and palimpsest.log, the others logs/rank_*.log."""

import logging
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from lit_modules.launching.process import ProcessInfo, this_process

_terminal: int | None = None  # descriptor of the terminal's stderr, once this process's stderr goes to a log


def log_file(folder: str, job_name: str) -> str:
    """Return the path of this process's log; rank 0's is named after the command's `job_name`."""
    here = this_process()
    return f"{folder}/{job_name}.log" if here.rank == 0 else f"{folder}/{here.log}"


class IgnoresDiskErrors(logging.Handler):
    """Mixin for a logging handler that drops messages which its file or terminal refuses, without a traceback.

    Put it before the handler in the bases. Code that writes important files reports a full disk itself.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Terminal(IgnoresDiskErrors, logging.StreamHandler):
    """The terminal's handler; its output may be redirected to a file."""


class LogFile(IgnoresDiskErrors, logging.FileHandler):
    """A file handler that creates the file's folder on the first message."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file could not be opened
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def redirect_to_log_file(folder: Path, here: ProcessInfo) -> None:
    """Redirect stdout and stderr of a rank other than 0 to its log, including output of native libraries."""
    global _terminal
    if here.rank == 0:
        return
    path = folder / here.log
    path.parent.mkdir(parents=True, exist_ok=True)
    for handler in list(logging.root.handlers):
        if isinstance(handler, Terminal):
            logging.root.removeHandler(handler)
    sys.stdout.flush()
    sys.stderr.flush()
    _terminal = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def print_on_terminal(line: str) -> None:
    """Write a line to the user's terminal, even from a rank whose stderr goes to a log."""
    if _terminal is None:
        print(line, file=sys.stderr, flush=True)
    else:
        os.write(_terminal, f"{line}\n".encode())


def write_traceback(error: BaseException) -> None:
    """Write an error with its traceback to this process's log file, but not to the terminal."""
    record = logging.LogRecord(
        "palimpsest", logging.ERROR, __file__, 0, "the run failed", None, (type(error), error, error.__traceback__)
    )
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
