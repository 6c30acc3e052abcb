"""Phases on a SLURM cluster: one job array per phase, which starts when the previous phase has succeeded."""

import json
import logging
import math
import shlex
import sys
from pathlib import Path

import dill
import loguru
from datatrove.executor import SlurmPipelineExecutor

from common.atomic_files import write_atomic
from common.settings import SettingError, check_number
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.submitted import (
    cancel,
    refuse_if_never_starts,
    refuse_while_submitted,
    submit,
    write_submitted,
)
from data_pipeline.executors.tasks import TaskRecords, full_disk_in_one_line, phase_folder

log = logging.getLogger(__name__)


class Slurm:
    """Executor on a SLURM cluster that sees the code, the inputs and the output in shared folders.

    Args:
        time: limit of one job, as sbatch takes it.
        workers: jobs of a phase at a time (None: all).
        cpus_per_task, mem_per_cpu_gb: of a task.
        python: the interpreter on the nodes (None: this one).
        setup: shell lines before it.
        sbatch_args: further options of sbatch, without their dashes.
        max_array_size: the cluster's limit; if a phase has more tasks, a job runs several in sequence.
    """

    def __init__(
        self,
        partition: str,
        time: str,
        workers: int | None = None,
        cpus_per_task: int = 1,
        mem_per_cpu_gb: int = 2,
        python: str | None = None,
        setup: list[str] | None = None,
        sbatch_args: dict[str, object] | None = None,
        max_array_size: int = 1001,
    ) -> None:
        if not partition:
            raise ValueError("executor.partition: give the SLURM partition that runs the jobs (sinfo lists them)")
        if not isinstance(time, str):
            raise SettingError("executor.time", time, 'give it in quotes, such as "24:00:00": YAML makes it a number')
        numbers = {"cpus_per_task": cpus_per_task, "mem_per_cpu_gb": mem_per_cpu_gb, "max_array_size": max_array_size}
        for name, value in {**numbers, "workers": 1 if workers is None else workers}.items():
            check_number(f"executor.{name}", value, least=1)
        self.max_array_size = max_array_size
        self.python, self.setup = python or sys.executable, list(setup or [])
        self.settings = {
            "partition": partition,
            "time": time,
            "workers": -1 if workers is None else workers,
            "cpus_per_task": cpus_per_task,
            "mem_per_cpu_gb": mem_per_cpu_gb,
            "sbatch_args": {"kill-on-invalid-dep": "yes", **(sbatch_args or {})},
        }

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Submit the unfinished tasks of the phases; return False, or True if nothing is left to do.

        When a task fails, the phases after its own are cancelled; the next run submits what is missing.

        Args:
            logs: in a folder that all nodes see; holds each phase's log folder, and submitted.json with the jobs.
            place: as for `Local.run`.

        Raises:
            ValueError: jobs of an earlier run are queued or running, or sbatch refuses.
        """
        loguru.logger.remove()
        logs = logs.absolute()
        place = place or str(logs.parent)
        with full_disk_in_one_line(place):
            refuse_while_submitted(logs)
            jobs: list[dict] = []
            try:
                for index, phase in enumerate(phases):
                    tasks = self._tasks(phase, phase_folder(logs, index, phase), place)
                    ranks = tasks.get_incomplete_ranks()
                    if ranks:
                        number = tasks.submit(ranks, self.python, after=jobs[-1]["job"] if jobs else None)
                        jobs.append({"phase": phase.name, "job": number, "tasks": len(ranks)})
                        write_submitted(logs, jobs)
                if jobs:
                    refuse_if_never_starts(jobs[0]["job"])  # the others ask for the same resources, and wait for it
            except BaseException:
                cancel([job["job"] for job in jobs])
                raise
        if not jobs:
            return True
        for job in jobs:
            log.info("submitted %s: job %s, tasks: %d", job["phase"], job["job"], job["tasks"])
        log.info(
            "follow with: squeue --jobs=%s; a task that fails leaves a line in %s, one that SLURM ends in slurm_logs "
            "beside it, and the same command then goes on with what is missing",
            ",".join(job["job"] for job in jobs),
            logs / "*" / "errors",
        )
        return False

    def _tasks(self, phase: Phase, folder: Path, place: str) -> "SlurmTasks":
        tasks = SlurmTasks(
            phase.steps,
            tasks=phase.tasks,
            logging_dir=str(folder),
            job_name=f"{folder.parent.parent.name}-{phase.name}",
            env_command="\n".join(self.setup),
            qos=None,
            with_srun=False,
            max_array_size=self.max_array_size,
            tasks_per_job=math.ceil(phase.tasks / self.max_array_size),
            **self.settings,
        )
        tasks.describe(phase, place)
        return tasks


class SlurmTasks(TaskRecords, SlurmPipelineExecutor):
    """A phase as datatrove's job array, with a different way of submitting it.

    datatrove's `submit` would hide sbatch's message, make the next phase wait only for the last of several arrays, and
    add a statistics job per phase.
    """

    def submit(self, ranks: list[int], python: str, after: str | None) -> str:
        """Submit the tasks `ranks`, to start when job `after` has succeeded; return the job's number."""
        folder = Path(self.logging_dir.path)
        write_atomic(folder / "executor.pik", dill.dumps(self, fmode=dill.CONTENTS_FMODE))
        write_atomic(folder / "ranks_to_run.json", json.dumps(ranks))
        # exec: a signal to the job reaches the tasks, which requeue it.
        command = shlex.join([python, "-m", "datatrove.tools.launch_pickled_pipeline", str(folder / "executor.pik")])
        options = self.get_sbatch_args(math.ceil(len(ranks) / self.tasks_per_job))
        script = folder / "launch_script.slurm"
        write_atomic(script, self.get_launch_file_contents(options, f"exec {command}"))
        return submit(script, *([f"--dependency=afterok:{after}"] if after else []))
