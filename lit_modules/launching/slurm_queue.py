"""Queries to SLURM about jobs by squeue and scontrol; not sacct, since many clusters keep no accounting."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common import slurm

ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)

# Words of sbatch's errors and the launcher setting to fix; the first match counts.
SETTINGS = {
    "account": "account",  # first, since sbatch says "account or account/partition"
    "partition": "partition",
    "qos": "qos",
    "time": "time",
    "memory": "mem_gb",
    "cpu": "cpus_per_task",
    "gres": "gpus_per_node",
    "gpu": "gpus_per_node",
    "array": "array_parallelism",
    "node count": "nodes",
    "node configuration": "tasks_per_node",
    "option": "additional_parameters",
}


@dataclass(frozen=True)
class JobState:
    """State of a job: SLURM's word, the reason for waiting, and the exit ("exit status 1")."""

    word: str
    reason: str = ""
    exit: str = ""


def submission_error(words: str, settings: Mapping[str, object]) -> str:
    """Return one line for sbatch's error about a job with these launcher settings."""
    keys = {word: f"hydra.launcher.{name}={settings.get(name)}" for word, name in SETTINGS.items()}
    return slurm.refusal(words, keys, "hydra.launcher")


def job_states(jobs: list[str]) -> dict[str, JobState] | None:
    """Return the states of jobs ("12", or "12_3" of an array), without those that SLURM has forgotten.

    None if SLURM does not answer, which happens on busy clusters and is harmless.
    """
    numbers = sorted({job.partition("_")[0] for job in jobs})
    answer = run_slurm_command(
        "squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={','.join(numbers)}"
    )
    if answer.returncode != 0 and "nvalid job id" not in answer.stderr:
        return None
    rows = (line.strip().split("|", 2) for line in answer.stdout.splitlines() if line.count("|") >= 2)
    found = {row[0]: JobState(row[1], row[2]) for row in rows}
    for job in jobs:
        if job not in found or found[job].word in ENDED:
            known = controller_state(job)
            if known is not None:
                found[job] = known
    return {job: state for job, state in found.items() if job in jobs}


def controller_state(job: str) -> JobState | None:
    """Return scontrol's state of a job that left the queue; None if SLURM has forgotten it."""
    words = run_slurm_command("scontrol", "show", "job", "--oneliner", job).stdout
    state = re.search(r"\bJobState=(\S+)", words)
    if state is None:
        return None
    code = re.search(r"\bExitCode=(\d+):(\d+)", words)
    status, signal = code.groups() if code is not None else ("0", "0")
    end = f"signal {signal}" if signal != "0" else f"exit status {status}" if status != "0" else ""
    return JobState(state[1], exit=end)


def cancel_unsatisfiable(jobs: list[str], settings: Mapping[str, object], seconds: float = 2.0) -> None:
    """Cancel the jobs if SLURM accepted a request that the partition can never satisfy.

    SLURM reports this only when it first considers a job, so poll for `seconds`.

    Raises:
        ValueError: the jobs were cancelled; the line names their settings.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = job_states(jobs) or {}
        reasons = [s.reason for s in found.values() if s.word == "PENDING"]
        reason = next(filter(slurm.never_starts, reasons), None)
        if reason is not None:
            names = ("partition", "nodes", "tasks_per_node", "gpus_per_node", "time")
            given = ", ".join(f"hydra.launcher.{n}={settings[n]}" for n in names if settings.get(n) is not None)
            run_slurm_command("scancel", *sorted({job.partition("_")[0] for job in jobs}))
            raise ValueError(
                f"{given}: SLURM would never start the job ({reason}): ask for less, or of another partition "
                "(`scontrol show partition` has the limits)"
            )
        if time.monotonic() > deadline or any(state.word != "PENDING" for state in found.values()):
            return
        time.sleep(0.5)


def wait_for_jobs(
    jobs: list[str],
    changed: Callable[[str, JobState], None],
    finished: Callable[[str], bool],
    pause: float = 1.0,
) -> dict[str, JobState]:
    """Wait until every job has ended or left the queue, and return the final states.

    SLURM is polled less and less often, down to every 15 s.

    Args:
        changed: called at each change of a state.
        finished: whether a job has left its result; decides between COMPLETED and FAILED for a forgotten job.
    """
    seen: dict[str, JobState] = {}
    while True:
        found = job_states(jobs)
        for job in jobs:
            if found is None or (job in seen and seen[job].word in ENDED):
                continue
            state = found.get(job) or JobState(
                "COMPLETED" if finished(job) else "FAILED", exit="SLURM has forgotten it"
            )
            if job not in seen or state.word != seen[job].word:
                changed(job, state)
            seen[job] = state
        if len(seen) == len(jobs) and all(state.word in ENDED for state in seen.values()):
            return seen
        time.sleep(pause)
        pause = min(15.0, 1.1 * pause)


def run_slurm_command(*command: str) -> subprocess.CompletedProcess:
    """Run a SLURM command.

    Raises:
        ValueError: it is not installed.
    """
    return slurm.ask(*command, key="hydra/launcher=slurm")
