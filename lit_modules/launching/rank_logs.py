"""The log of each rank: rank 0 speaks on the terminal and in palimpsest.log, each other one in logs/rank_*.log."""

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from lit_modules.launching.process import ProcessInfo, this_process

_terminal: int | None = None  # a descriptor of the terminal's stderr, once this process's own goes into a log


def log_file(folder: str, job_name: str) -> str:
    """The log of this process below a run's folder; `job_name` is the command's, after which rank 0's is named."""
    here = this_process()
    return f"{folder}/{job_name}.log" if here.rank == 0 else f"{folder}/{here.log}"


class DropsWhatDiskRefuses:
    """Comes before a handler of the logging module among the bases of a class: a message that its file or terminal does
    not take is lost, without the traceback that Python prints. Whoever writes what matters reports a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Terminal(DropsWhatDiskRefuses, logging.StreamHandler):
    """The terminal's handler; its output may be redirected to a file."""


class LogFile(DropsWhatDiskRefuses, logging.FileHandler):
    """A file handler that makes the file's folder when it has something to write, and not before."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file could not be opened
            self.handleError(record)

    def _open(self) -> TextIO:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def log_to_own_file(folder: Path, here: ProcessInfo) -> None:
    """From now on, what a rank but the first says, on whatever way, is in its log: prints, warnings and tracebacks, and
    what libraries that are not Python's write."""
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


def say_on_terminal(line: str) -> None:
    """Write a line where the user reads, also from a rank that has a log of its own."""
    if _terminal is None:
        print(line, file=sys.stderr, flush=True)
    else:
        os.write(_terminal, f"{line}\n".encode())


def write_traceback(error: BaseException) -> None:
    """Put an error with its traceback into this process's log file, and not on the terminal."""
    record = logging.LogRecord(
        "palimpsest", logging.ERROR, __file__, 0, "the run failed", None, (type(error), error, error.__traceback__)
    )
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
