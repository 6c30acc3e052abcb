"""Phases on a Ray cluster.

datatrove's own executor does not report errors that a step raises, runs tasks in a pool that waits forever for a killed
one, and keeps the logs of all users and phases in one folder of the node.
"""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import loguru

from common.settings import SettingError, check_number
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.submitted import refuse_while_submitted
from data_pipeline.executors.tasks import LocalTasks, run_in_order, run_task

log = logging.getLogger(__name__)

SECONDS_FOR_AN_ANSWER = 10
RETRIES = 3  # for a task whose process or node is lost


class Ray:
    """Executor on a Ray cluster that sees the code, the inputs and the output in shared folders.

    Args:
        workers: tasks at a time (None: as many as the cluster has room for).
        address: of the cluster (None: the one that RAY_ADDRESS names or that runs on this machine; without either, one
            is started here for the run).
        cpus_per_task, mem_per_cpu_gb: what Ray reserves for a task.
    """

    def __init__(
        self,
        workers: int | None = None,
        address: str | None = None,
        cpus_per_task: int = 1,
        mem_per_cpu_gb: float = 2,
    ) -> None:
        for name, value in (("workers", 1 if workers is None else workers), ("cpus_per_task", cpus_per_task)):
            check_number(f"executor.{name}", value, least=1)
        check_number("executor.mem_per_cpu_gb", mem_per_cpu_gb, above=0)
        self.workers, self.address = workers, address
        self.resources = {"CPU": cpus_per_task, "memory": int(cpus_per_task * mem_per_cpu_gb * 2**30)}

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Run the unfinished tasks of the phases, in order; return True when all have finished.

        Arguments and errors as for `Local.run`; a task whose process or node is lost is first retried a few times.
        """
        import ray

        loguru.logger.remove()
        logs = logs.absolute()
        place = place or str(logs.parent)
        refuse_while_submitted(logs)
        ours = not ray.is_initialized()
        if ours:
            self._connect()
        try:
            self._expect_room()
            run_in_order(phases, logs, place, self._each)
        finally:
            if ours:
                ray.shutdown()
        return True

    def _connect(self) -> None:
        import ray

        address = self.address or os.environ.get("RAY_ADDRESS", "")
        _expect_answer(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here sends no usage reports
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            words = " ".join(str(error).split())
            raise SettingError("executor.address", address or None, f"no Ray cluster can be used: {words}") from error

    def _expect_room(self) -> None:
        """Warn if no node is large enough for a task: Ray would wait for one without a message."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= need for name, need in self.resources.items()) for node in nodes):
            log.warning(
                "no node of the Ray cluster has room for a task now (%d CPUs and %.1f GB: executor.cpus_per_task, "
                "executor.mem_per_cpu_gb): waiting for one",
                self.resources["CPU"],
                self.resources["memory"] / 2**30,
            )

    def _each(self, tasks: LocalTasks, ranks: list[int]) -> Iterator[None]:
        """Run the tasks; yield whenever one has finished. Raises the first error; the others are killed."""
        import ray

        remote = ray.remote(_run_on_node).options(
            num_cpus=self.resources["CPU"], memory=self.resources["memory"], max_retries=RETRIES
        )
        pickled = ray.put(tasks.pickled())
        waiting, running = iter(ranks), {}
        try:
            while True:
                for rank in waiting:
                    running[remote.remote(pickled, rank, os.getcwd())] = rank
                    if len(running) == (self.workers or tasks.world_size):
                        break
                if not running:
                    return
                (ended,), _ = ray.wait(list(running), num_returns=1)
                self._result(ended, tasks, running.pop(ended))
                yield
        finally:
            for task in running:
                ray.cancel(task, force=True)

    def _result(self, ended: object, tasks: LocalTasks, rank: int) -> None:
        """Raise the task's own error, or ValueError if its process was lost."""
        import ray

        try:
            ray.get(ended)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            words = " ".join(str(error).split())
            lost = ValueError(
                f"executor.mem_per_cpu_gb: task {rank} of phase {tasks.phase_name} was lost {1 + RETRIES} times (out "
                f"of memory?): give it more, and run the same command again: it goes on with what is missing; Ray "
                f"says: {words}"
            )
            tasks.write_error(rank, lost)
            raise lost from error


def _expect_answer(address: str) -> None:
    """Raise ValueError if nothing listens at "host:port": Ray would try for minutes, then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_FOR_AN_ANSWER).close()
    except (OSError, OverflowError) as error:
        fix = (
            f"no Ray cluster answers there ({error}): give the address that `ray start --head` prints, or "
            "null for the one on this machine"
        )
        raise SettingError("executor.address", address, fix) from error


def _run_on_node(pickled: bytes, rank: int, folder: str) -> None:
    """Run a task in the command's working directory, so that relative paths mean the same."""
    os.chdir(folder)
    run_task((pickled, rank))
