"""Phases on this machine: so many tasks side by side, each in a process.

datatrove's own pool would wait for ever for a task that the system killed, and has every other task end before it
tells of one that failed, in the words of two libraries.
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
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.submitted import refuse_while_submitted
from data_pipeline.executors.tasks import LocalTasks, run_in_order, run_task
from data_pipeline.workers import Worker, available_processes

PRINTED = "processes.log"
SECONDS_BETWEEN_LOOKS = 0.5  # for the process that began this one


class Local:
    """Runs phases on this machine, `workers` tasks at a time (None: one a core); 1 runs them in this process.

    A process is kept for all the tasks that it runs, of every phase.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"executor.workers={workers}: give at least 1, or null for one a core")
        self.workers = workers or available_processes()

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Run what of the phases has not ended yet, in order. Returns True: all have ended.

        `logs`: each phase's log folder is in it. `place`: the setting that says where the output is, with its value,
        for the line that says that its disk is full. What a task raises is raised here as soon as it is, and the
        others are killed: they begin anew in the next run. Raises ValueError when a task is killed.
        """
        loguru.logger.remove()  # datatrove's lines go to the logs of the tasks
        place = place or str(logs.parent)
        refuse_while_submitted(logs)
        processes = _Processes(self.workers, logs.absolute() / PRINTED)
        try:
            run_in_order(phases, logs, place, partial(self._each, processes))
        finally:
            processes.end()
        return True

    def _each(self, processes: "_Processes", tasks: LocalTasks, ranks: list[int]) -> Iterator[None]:
        """Run the tasks, and yield whenever one has ended."""
        if not ranks:
            return
        pickled = tasks.pickled()
        if self.workers == 1:
            for rank in ranks:
                yield run_task((pickled, rank))
            return
        try:
            yield from processes.each([(pickled, rank) for rank in ranks])
        except TaskKilled as killed:
            _expect_room(Path(tasks.logging_dir.path))  # Arrow ends the process on some full disks
            rank = killed.task[1]
            error = ValueError(
                f"executor.workers={self.workers}: task {rank} of phase {tasks.phase_name}: {killed}: lower "
                "executor.workers, and run the same command again: it goes on with what is missing; what its process "
                f"printed is in {processes.printed}"
            )
            tasks.write_error(rank, error)
            raise error from killed


class TaskKilled(Exception):
    """The process of `task` came to an end that it did not choose."""

    def __init__(self, task: tuple[bytes, int], words: str) -> None:
        super().__init__(words)
        self.task = task


class _Processes:
    """Up to `count` worker processes, started when they are first needed. What they print is added to `printed`."""

    def __init__(self, count: int, printed: Path) -> None:
        self.count, self.printed = count, printed
        self._workers: list[Worker] = []

    def each(self, tasks: list[tuple[bytes, int]]) -> Iterator[None]:
        """Run tasks, and yield whenever one has ended. Raises the first error there is, and TaskKilled."""
        while len(self._workers) < min(self.count, len(tasks)):
            self._workers.append(Worker(partial(task_runner, self.printed)))
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)
        threads = ThreadPoolExecutor(len(self._workers))  # each waits for one process
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
        if isinstance(error.__cause__, EOFError | BrokenPipeError):  # the worker's end, and not an error of the task's
            raise TaskKilled(task, str(error)) from error
        raise
    finally:
        idle.put(worker)


def task_runner(printed: Path) -> Callable[[tuple[bytes, int]], None]:
    """Return `run_task`, in a process that ends with the one that began it, even in the middle of a task."""
    with printed.open("ab") as file:
        for stream in (1, 2):  # of libraries in C, too
            os.dup2(file.fileno(), stream)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    return run_task


def _expect_room(folder: Path) -> None:
    """Raise OSError where the disk is full."""
    probe = folder / "probe"
    try:
        write_atomic(probe, bytes(2**20))
    finally:
        probe.unlink(missing_ok=True)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
