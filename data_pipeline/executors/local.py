"""Phases on this machine: several tasks at a time, each in a process.

datatrove's own pool waits forever for a task that the system killed. It reports a failed task only after all others
have finished, with a message from two libraries.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import loguru

from common.atomic_files import write_atomic
from common.settings import check_whole
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.submitted import refuse_while_submitted
from data_pipeline.executors.tasks import LocalTasks, run_in_order, run_task
from data_pipeline.workers import Worker, available_processes

PRINTED = "processes.log"
SECONDS_BETWEEN_LOOKS = 0.5  # polling interval for the end of the parent process


class Local:
    """Executor on this machine, `workers` tasks at a time (None: one per core); 1 runs them in this process.

    The same processes run the tasks of all phases.
    """

    def __init__(self, workers: int | None = None) -> None:
        check_whole("executor.workers", workers, 1, null=True)
        self.workers = workers or available_processes()

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Run the unfinished tasks of the phases, in order; return True when all have finished.

        An error of a task is raised at once, and the other tasks are killed: the next run restarts them.

        Args:
            logs: parent of each phase's log folder.
            place: output setting with its value, for the error line about a full disk.

        Raises:
            ValueError: a task was killed.
        """
        loguru.logger.remove()  # datatrove logs only to the tasks' logs
        place = place or str(logs.parent)
        refuse_while_submitted(logs)
        processes = _Processes(self.workers, logs.absolute() / PRINTED)
        try:
            run_in_order(phases, logs, place, partial(self._each, processes))
        finally:
            processes.end()
        return True

    def _each(self, processes: "_Processes", tasks: LocalTasks, ranks: list[int]) -> Iterator[None]:
        """Run the tasks; yield whenever one has finished."""
        if not ranks:
            return
        pickled = tasks.pickled()
        if self.workers == 1:
            for rank in ranks:
                run_task((pickled, rank))
                yield
            return
        try:
            yield from processes.each([(pickled, rank) for rank in ranks])
        except TaskKilled as killed:
            _expect_room(Path(tasks.logging_dir.path))  # on some full disks Arrow ends the process
            rank = killed.task[1]
            error = ValueError(
                f"executor.workers={self.workers}: task {rank} of phase {tasks.phase_name}: {killed}: lower "
                "executor.workers, and run the same command again: it goes on with what is missing; what its process "
                f"printed is in {processes.printed}"
            )
            tasks.write_error(rank, error)
            raise error from killed


class TaskKilled(Exception):
    """Death of the process of `task`: killed or crashed."""

    def __init__(self, task: tuple[bytes, int], words: str) -> None:
        super().__init__(words)
        self.task = task


class _Processes:
    """Up to `count` worker processes, started on first use. Their output is appended to `printed`."""

    def __init__(self, count: int, printed: Path) -> None:
        self.count, self.printed = count, printed
        self._workers: list[Worker] = []

    def each(self, tasks: list[tuple[bytes, int]]) -> Iterator[None]:
        """Run tasks; yield whenever one has finished. Raises the first error, or TaskKilled."""
        while len(self._workers) < min(self.count, len(tasks)):
            self._workers.append(Worker(partial(task_runner, self.printed)))
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)
        threads = ThreadPoolExecutor(len(self._workers))  # each thread waits for one process
        try:
            for ended in as_completed([threads.submit(_in_process, idle, task) for task in tasks]):
                yield ended.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """Kill the processes, whatever they are doing."""
        for worker in self._workers:
            worker.end()
        self._workers = []


def _in_process(idle: "queue.SimpleQueue[Worker]", task: tuple[bytes, int]) -> None:
    worker = idle.get()
    try:
        worker(task)
    except RuntimeError as error:
        if isinstance(error.__cause__, EOFError | BrokenPipeError):  # the worker died; not an error of the task
            raise TaskKilled(task, str(error)) from error
        raise
    finally:
        idle.put(worker)


def task_runner(printed: Path) -> Callable[[tuple[bytes, int]], None]:
    """Return `run_task` for a worker process, which ends with its parent process even in the middle of a task."""
    with printed.open("ab") as file:
        for stream in (1, 2):  # redirects C libraries, too
            os.dup2(file.fileno(), stream)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    return run_task


def _expect_room(folder: Path) -> None:
    """Raise OSError if the disk is full."""
    probe = folder / "probe"
    try:
        write_atomic(probe, bytes(2**20))
    finally:
        probe.unlink(missing_ok=True)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
