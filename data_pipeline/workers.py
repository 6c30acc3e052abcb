"""Worker processes whose results arrive in the order of the work, for any number of processes.

With `multiprocessing`, each worker would import the caller's main module again (seconds, if that imports Lightning),
and every script would need a main guard; a forked worker would inherit half-dead threads. These workers are plain
Python processes: they read pickled items from a pipe, import what those need, and exit when the pipe closes, so none
outlives a killed parent.
"""

import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

SERVE = "from data_pipeline.workers import serve; serve()"


def available_processes() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """Return the upper limit for a number of processes, on this machine or a larger one that jobs are submitted to."""
    return max(256, 4 * available_processes())


def ordered_map(make_worker: Callable[[], Callable], items: Iterable, processes: int) -> Iterator:
    """Yield `make_worker()(item)` for each item, in order; each process makes its worker once.

    `make_worker`, items and results must pickle. Few items are in flight at any time, so neither a long iterable nor
    slow consumption costs memory. `processes=1` works in this process.

    Raises:
        RuntimeError: a worker was killed. Errors that a worker raises are raised here.
    """
    if processes == 1:
        yield from map(make_worker(), items)
        return
    workers = [Worker(make_worker) for _ in range(processes)]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def work(item: object) -> object:
        worker = idle.get()
        try:
            return worker(item)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(processes)  # each thread waits for one process
    try:
        items = iter(items)
        pending = deque(threads.submit(work, item) for item in itertools.islice(items, 4 * processes))
        while pending:
            result = pending.popleft().result()
            pending.extend(threads.submit(work, item) for item in itertools.islice(items, 1))
            yield result
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()
        threads.shutdown()


class Worker:
    """A process, and the pipes to it."""

    def __init__(self, make_worker: Callable[[], Callable]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # one core per worker
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=pipe, stdout=pipe, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._make_worker: Callable | None = make_worker

    def __call__(self, item: object) -> object:
        try:
            if self._make_worker is not None:
                pickle.dump(self._make_worker, self._requests)
                self._make_worker = None
            pickle.dump(item, self._requests)
            self._requests.flush()
            succeeded, result = pickle.load(self._answers)
        except (EOFError, BrokenPipeError) as error:
            status = self._process.wait()
            raise RuntimeError(f"a worker process ended with status {status} (out of memory?)") from error
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Run a worker: read `make_worker`, then items, from standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    requests = sys.stdin.buffer
    worker = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            if worker is None:
                worker = request()
                continue
            answer = (True, worker(request))
        except Exception as error:
            answer = (False, error)
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
