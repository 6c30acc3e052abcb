"""Tasks of a phase as datatrove runs them; the phase's folder keeps each task's log, error and resource use."""

import contextlib
import errno
import json
import logging
import os
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import dill
import loguru
from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.utils.stats import PipelineStats

from common.atomic_files import write_atomic
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.progress import PhaseProgress

FULL: dict[int | None, str] = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def phase_folder(logs: Path, index: int, phase: Phase) -> Path:
    """Return a phase's log folder; raise ValueError if it was started with another number of tasks."""
    folder = logs.absolute() / f"{index:02d}-{phase.name}"
    begun = folder / "phase.json"
    if begun.exists():
        tasks = json.loads(begun.read_text(encoding="utf-8"))["tasks"]
        if tasks != phase.tasks:
            raise ValueError(f"{folder}: started with {tasks} tasks, now {phase.tasks}: give {tasks}, or a new folder")
    else:
        write_atomic(begun, json.dumps({"name": phase.name, "tasks": phase.tasks}) + "\n")
    return folder


@contextlib.contextmanager
def full_disk_in_one_line(place: str) -> Iterator[None]:
    """Turn a full-disk error, or an error it caused, into a ValueError that starts with `place`."""
    try:
        yield
    except Exception as error:
        full = _disk_full(error)
        if full is None:
            raise
        file = f" at {full.filename}" if full.filename else ""
        raise ValueError(
            f"{place}: {FULL[full.errno]}{file}: free some space and run the same command again, it goes on with what "
            "is missing"
        ) from error


class TaskRecords(PipelineExecutor):
    """Additions to datatrove's executors: a mixin, to be listed before one of them.

    A task logs only to logs/task_<task>.log, never to the terminal. A successful task writes resources/<task>.json
    ("peak_rss_bytes", "seconds", "processor_seconds"); a failed one writes errors/<task>.txt, one line.
    """

    def describe(self, phase: Phase, place: str) -> None:
        """Set the phase, and the start of the full-disk line, `place` ("corpus.output=corpora/x")."""
        self.phase_name, self.place = phase.name, place

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        """Run a task as datatrove does; raise a one-line ValueError if disk or memory is exhausted."""
        if self.is_rank_completed(rank):
            return PipelineStats()
        try:
            with full_disk_in_one_line(self.place):
                _forget_peak()
                begun, worked = time.perf_counter(), time.process_time()
                with _quiet():
                    stats = super()._run_for_rank(rank, local_rank, node_rank)
                took = {
                    "peak_rss_bytes": _peak(),
                    "seconds": round(time.perf_counter() - begun, 3),
                    "processor_seconds": round(time.process_time() - worked, 3),
                }
                write_atomic(self._path("resources", rank, "json"), json.dumps(took) + "\n")
        except Exception as error:
            raised = self._explained(error, rank)
            self.write_error(rank, raised)
            if raised is error:
                raise
            raise raised from error
        self._path("errors", rank, "txt").unlink(missing_ok=True)
        return stats

    def write_error(self, rank: int, error: Exception) -> None:
        """Write a line with the reason of the failure; on a full disk there may be none."""
        words = f"task {rank} of phase {self.phase_name}: {type(error).__name__}: {' '.join(str(error).split())}\n"
        with contextlib.suppress(OSError):
            write_atomic(self._path("errors", rank, "txt"), words.encode(errors="replace"))

    def _path(self, kind: str, rank: int, ending: str) -> Path:
        return Path(self.logging_dir.path, kind, f"{rank:05d}.{ending}")

    def _explained(self, error: Exception, rank: int) -> Exception:
        """Return the error to raise in the driver: one that pickles, with a message about what is needed."""
        if isinstance(error, MemoryError):
            return ValueError(
                f"{self.place}: task {rank} of phase {self.phase_name} needs more memory than there is: "
                "lower executor.workers, or give each task more"
            )
        if not isinstance(error, ValueError):
            log = Path(self.logging_dir.path, "logs", f"task_{rank:05d}.log")
            error.add_note(f"in task {rank} of phase {self.phase_name}; its log is {log}")
        return error if _pickles(error) else RuntimeError(f"{type(error).__name__}: {error}")


class LocalTasks(TaskRecords, LocalPipelineExecutor):
    """A phase whose tasks run one by one, in any process; `pickled` transports it there."""

    def __init__(self, phase: Phase, folder: Path, place: str) -> None:
        super().__init__(phase.steps, tasks=phase.tasks, logging_dir=str(folder))
        self.describe(phase, place)

    def pickled(self) -> bytes:
        """Return the bytes that `run_task` takes."""
        return dill.dumps(self)


def run_in_order(
    phases: list[Phase], logs: Path, place: str, each: Callable[[LocalTasks, list[int]], Iterator[None]]
) -> None:
    """Run the unfinished tasks of the phases. `each` runs some tasks of a phase, and yields whenever one finishes."""
    with full_disk_in_one_line(place):
        for index, phase in enumerate(phases):
            tasks = LocalTasks(phase, phase_folder(logs, index, phase), place)
            ranks = tasks.get_incomplete_ranks()
            with PhaseProgress(index, len(phases), phase, ranks) as progress:
                for _ in each(tasks, ranks):
                    progress.advance()


def run_task(task: tuple[bytes, int]) -> None:
    """Run one task, (`LocalTasks.pickled`, rank), with a fresh copy of the steps; errors of the task pass through."""
    tasks, rank = task
    dill.loads(tasks)._run_for_rank(rank)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send the libraries' logs and warnings to datatrove's log of the task, and discard what they print."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = [_ToTaskLog()]
    root.setLevel(logging.INFO)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            logging.captureWarnings(True)
            yield
    finally:
        logging.captureWarnings(False)
        loguru.logger.remove()  # datatrove has re-enabled its terminal output
        root.handlers = handlers
        root.setLevel(level)


class _ToTaskLog(logging.Handler):
    """Handler that forwards records to loguru, which datatrove points at the task's log."""

    def emit(self, record: logging.LogRecord) -> None:
        def place(line: "loguru.Record") -> None:
            line["name"], line["function"], line["line"] = record.name, record.funcName, record.lineno

        level = record.levelname if hasattr(logging, record.levelname) else record.levelno
        loguru.logger.patch(place).opt(exception=record.exc_info).log(level, "{}", record.getMessage())


def _disk_full(error: BaseException | None) -> OSError | None:
    """Return the full-disk OSError among an error and its causes, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _pickles(error: Exception) -> bool:
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), type(error))
    except Exception:  # an error's own __reduce__ or __init__ may raise anything
        return False


def _forget_peak() -> None:
    """Reset the process's peak memory counter, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    """Return the peak resident memory of this process, in bytes, since `_forget_peak`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
