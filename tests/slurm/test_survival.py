"""Runs on two nodes that are requeued, warned of the time limit, hung, or lose a node: each resumes automatically, and
ends with the losses of an undisturbed run."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.long

SCRIPT = f"""#!/bin/sh
#SBATCH --partition=cpu --nodes=2 --ntasks-per-node=1 --mem=2G --time=20 --requeue --open-mode=append
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 WANDB_MODE=offline PYTHONPATH={ROOT}
exec srun --kill-on-bad-exit=1 {sys.executable} {ROOT}/palimpsest.py "$@"
"""
# Twelve steps, training losses at 1, 5, 10 and 12; checkpoints at 4, 8 and 12, and after the validations at 6 and 12.
SHORT = (
    "max_tokens=6144",
    "validate_every_tokens=3072",
    "checkpoint_every_tokens=2048",
    "log_every_tokens=2560",
    "callbacks.samples.prompts=[]",
)


SECONDS = 180  # that an attempt may take on a busy machine, and a requeued job waits before it


class Job:
    """Job of the tiny run on both nodes, in a separate folder."""

    def __init__(self, slurm: Cluster, command: Command, folder: Path, *overrides: str) -> None:
        folder.mkdir()
        self.slurm, self.folder = slurm, folder
        (folder / "job.sh").write_text(SCRIPT)
        own = Command(command.folder, folder / "runs")
        call = [
            "sbatch",
            "--parsable",
            f"--output={folder}/out",
            f"{folder}/job.sh",
            *own.arguments(*SHORT, *overrides),
        ]
        self.number = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def run(self) -> Path:
        (found,) = (self.folder / "runs" / "default").iterdir()
        return found

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def log(self) -> str:
        return (self.run / "palimpsest.log").read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fail early if the job fails."""

        def met() -> bool:
            assert self.slurm.states(self.number) not in (["FAILED"], ["CANCELLED"], ["TIMEOUT"]), self.words()
            return condition()

        until(met, self.words, SECONDS)

    def ends(self) -> None:
        """Wait until all attempts have ended."""
        self.until(lambda: self.slurm.states(self.number) == ["COMPLETED"])

    def words(self) -> str:
        return self.slurm.ask("scontrol", "show", "job", self.number) + self.out

    def losses(self) -> tuple[list[tuple[str, ...]], float]:
        """Return training and held-out loss by step, and the final held-out loss over all the text."""
        with open(self.run / "metrics.csv", newline="") as handle:
            rows = [(row["step"], row["train/loss"], row["validation/loss"]) for row in csv.DictReader(handle)]
        summary = json.loads((self.run / "summary.json").read_text())
        return [row for row in rows if any(row[1:])], summary["validation_loss"]


@pytest.fixture(scope="module")
def alone(slurm: Cluster, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run without disturbance."""
    folder = tmp_path_factory.mktemp("alone")
    job = Job(slurm, Command(workplace, folder), folder / "job")
    job.ends()
    return job


@pytest.fixture
def start(slurm: Cluster, command: Command, tmp_path: Path) -> Callable[..., Job]:
    """Start a run that pauses at a step, and return it when paused."""

    def call(*overrides: str, step: int | list[int] = 6, rank: int | None = None) -> Job:
        pauses = ("_target_=tests.slurm.pausing.Pauses", f"folder={tmp_path}", f"step={step}")
        pauses += () if rank is None else (f"rank={rank}",)
        job = Job(slurm, command, tmp_path / "job", *overrides, *(f"+callbacks.pauses.{setting}" for setting in pauses))
        waits = [tmp_path / f"waits-{one}" for one in ((0, 1) if rank is None else (rank,))]
        job.until(lambda: all(file.exists() for file in waits))
        return job

    return call


def test_a_rank_that_is_killed_is_named_and_the_run_restarts_and_one_that_is_requeued_saves(
    alone: Job, start, tmp_path: Path
) -> None:
    job = start(step=[6, 8])
    job.until(lambda: (job.run / "checkpoints" / "step_00000006").is_dir())  # it is written beside the training
    os.kill(int((tmp_path / "waits-1").read_text()), signal.SIGKILL)
    (tmp_path / "go").touch()
    job.until(lambda: all((tmp_path / f"waits-{rank}-1").exists() for rank in (0, 1)))
    assert spoken(job.out) == [
        f"palimpsest: rank 1 of 2 on node2 was killed (out of memory?); SLURM job {job.number} is queued again and "
        f"goes on from the last checkpoint; its log is {job.run}/logs/rank_00001.log"
    ]
    job.slurm.ask("scontrol", "requeue", job.number)
    (tmp_path / "go-1").touch()
    job.ends()
    assert job.losses() == alone.losses()
    log = job.log()
    assert ", resumed from step_00000006" in log
    assert f"preempted (SIGTERM) after step 9: the checkpoint is {job.run}/checkpoints/step_00000009;" in log
    assert f"where SLURM queues job {job.number} again it goes on from there" in log
    assert ", resumed from step_00000009" in log


def test_a_run_warned_of_the_time_limit_requeues_itself(alone: Job, start, tmp_path: Path) -> None:
    job = start(step=5)  # the validation of step 6 is left to the next attempt
    job.slurm.ask("scancel", "--signal=USR1", job.number)
    (tmp_path / "go").touch()
    job.ends()
    assert job.losses() == alone.losses()
    log = job.log()
    assert f"preempted (SIGUSR1) after step 6: the checkpoint is {job.run}/checkpoints/step_00000006;" in log
    assert f"SLURM job {job.number} is queued again" in log
    assert ", resumed from step_00000006" in log


def test_a_rank_that_hangs_is_named_and_the_run_restarts_without_it_hanging(alone: Job, start) -> None:
    job = start("callbacks.watchdog.seconds=8", rank=1)
    job.ends()
    assert job.losses() == alone.losses()
    assert "palimpsest: rank 1 of 2 on node2 failed first: hangs: " in job.out
    assert f"SLURM job {job.number} is queued again and goes on from the last checkpoint" in job.out
    assert "in on_train_batch_start" in (job.run / "logs" / "rank_00001.log").read_text()
    assert ", resumed from step_00000006" in job.log()
    assert json.loads((job.run / "failed-1.json").read_text())["host"] == "node2"


def test_a_run_that_loses_a_node_goes_on_when_the_node_is_back(alone: Job, start, tmp_path: Path) -> None:
    job = start()
    job.until(lambda: (job.run / "checkpoints" / "step_00000006").is_dir())  # it is written beside the training
    kill_node(job.slurm, int((tmp_path / "waits-1").read_text()))
    (tmp_path / "go").touch()
    job.until(lambda: job.slurm.states(job.number) != ["RUNNING"])
    job.slurm.start_node("node2")
    job.ends()
    assert job.losses() == alone.losses()
    assert "palimpsest: rank 1 of 2 on node2 failed first: no longer answers: killed" in job.out
    assert ", resumed from step_00000006" in job.log()


def kill_node(slurm: Cluster, rank: int) -> None:
    """Kill node2's daemon, its rank, that rank's task and SLURM's step process, as in a power failure."""
    task = parent_of(rank)
    step = parent_of(task)
    slurm.daemons["node2"].kill()
    slurm.daemons["node2"].wait()
    for process in (step, task, rank):
        with contextlib.suppress(ProcessLookupError):  # a rank ends with the task above it
            os.kill(process, signal.SIGKILL)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def spoken(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("palimpsest: ")]
