"""SLURM jobs of a run: submit, record and query them."""

import json
import logging
import shutil
import subprocess
from pathlib import Path

from common import slurm
from common.atomic_files import write_atomic

log = logging.getLogger(__name__)

JOBS = "submitted.json"  # {"jobs": [{"phase", "job", "tasks"}]}

# Words in sbatch's error messages, and the setting to change; the first match counts.
SETTINGS = {
    "partition": "executor.partition",
    "account": "executor.sbatch_args.account",
    "qos": "executor.sbatch_args.qos",
    "time": "executor.time",
    "array": "executor.max_array_size",
    "memory": "executor.mem_per_cpu_gb",
    "cpu": "executor.cpus_per_task",
    "node configuration": "executor.cpus_per_task, executor.mem_per_cpu_gb",
    "node name": "executor.sbatch_args",
    "option": "executor.sbatch_args",
}


def submit(script: Path, *arguments: str) -> str:
    """Submit a script to sbatch and return the job's number; raise ValueError with sbatch's message if it refuses."""
    answer = _ask("sbatch", "--parsable", *arguments, str(script))
    if answer.returncode != 0:
        raise ValueError(f"{slurm.refusal(answer.stderr, SETTINGS, 'executor')}; its script is {script}")
    return answer.stdout.strip().partition(";")[0]  # a cluster's name may follow


def refuse_if_never_starts(job: str) -> None:
    """Raise ValueError if SLURM has accepted a job that asks for more than its partition allows."""
    answer = _ask("squeue", "--noheader", "--format=%r", f"--jobs={job}")
    reason = next(filter(slurm.never_starts, _lines(answer.stdout)), None)
    if reason is not None:
        raise ValueError(
            "executor.time, executor.cpus_per_task, executor.mem_per_cpu_gb: SLURM would never start the jobs "
            f"({reason}): ask for less, or of another executor.partition (`scontrol show partition` has the limits)"
        )


def cancel(jobs: list[str]) -> None:
    """Cancel jobs; finished ones are ignored."""
    if jobs:
        _ask("scancel", *jobs)


def write_submitted(logs: Path, jobs: list[dict]) -> None:
    """Record the submitted jobs: [{"phase", "job", "tasks"}]."""
    write_atomic(logs / JOBS, json.dumps({"jobs": jobs}, indent=1) + "\n")


def refuse_while_submitted(logs: Path) -> None:
    """Raise ValueError while jobs that an earlier command submitted for this folder are queued or running.

    Only warns if there is no squeue, as after the folder has moved to another machine.
    """
    if not (logs / JOBS).exists():
        return
    jobs = [job["job"] for job in json.loads((logs / JOBS).read_text(encoding="utf-8"))["jobs"]]
    if shutil.which("squeue") is None:
        log.warning("%s: jobs were submitted to SLURM, and there is no squeue to see whether they run", logs / JOBS)
        return
    alive = sorted(set(_queued(jobs, logs)), key=lambda job: (len(job), job))
    if alive:
        raise ValueError(
            f"{logs / JOBS}: SLURM jobs {', '.join(alive)} of this folder are queued or running: wait for them, or "
            f"cancel them (scancel {' '.join(alive)})"
        )


def _queued(jobs: list[str], logs: Path) -> list[str]:
    answer = _ask("squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}")  # %F: without an array's index
    if answer.returncode == 0:
        return _lines(answer.stdout)
    if "Invalid job id" in answer.stderr:  # the answer for a single job that SLURM has forgotten
        return []
    raise ValueError(f"{logs / JOBS}: squeue does not say whether its jobs run: {'; '.join(_lines(answer.stderr))}")


def _ask(*command: str) -> subprocess.CompletedProcess:
    return slurm.ask(*command, key="executor=slurm", instead=", or use executor=local")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
