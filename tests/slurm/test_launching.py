"""Runs on a real SLURM cluster and under torchrun: one folder, a log of each rank, failures, what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_modules.launching import slurm_queue
from tests.conftest import ROOT, Command, Finished
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.long

LAUNCHER = (
    "-m",
    "hydra/launcher=slurm",
    "hydra.launcher.partition=cpu",
    "hydra.launcher.time=0:20:00",
    "hydra.launcher.mem_gb=2",
    f"hydra.launcher.setup=['export PYTHONPATH={ROOT}']",
)
BREAKS = ("+callbacks.breaks._target_=tests.slurm.breaking.Breaks", "+callbacks.breaks.rank=1")
SHORT = ("max_tokens=2560", "schedule.warmup_tokens=0", "callbacks.samples.prompts=[]", "validate_every_tokens=2560")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of job tasks and torchrun processes: gloo's network interface, and the path of the tests."""
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def under(command: Command, *launcher: str, overrides: tuple[str, ...] = ()) -> Finished:
    """Run the command under a launcher such as srun."""
    call = [*launcher, str(ROOT / "palimpsest.py"), *command.arguments(*overrides)]
    done = subprocess.run(call, cwd=command.folder, env=os.environ, capture_output=True, text=True, timeout=240)
    return Finished(done.returncode, done.stdout, done.stderr)


def spoken(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("palimpsest: ")]


def loss(folder: Path) -> float:
    return json.loads((folder / "summary.json").read_text())["validation_loss"]


def test_two_nodes_share_a_run_and_end_with_the_loss_of_one_process(
    slurm: Cluster, command: Command, run: Callable[..., Finished]
) -> None:
    found = run(*LAUNCHER, "hydra.launcher.nodes=2")
    assert found.status == 0, found.err
    (sweep,) = command.runs()
    folder = sweep / "0"
    job = json.loads((folder / "started.json").read_text())["job"].removeprefix("slurm ").partition(".")[0]
    for words in (f"submitted to SLURM: job {job}", f"job {job}: run {folder}", f"job {job}: completed"):
        assert words in found.out
    assert slurm.states(job) == ["COMPLETED"]
    assert sorted(path.name for path in (folder / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert "held-out text: loss" in (folder / "palimpsest.log").read_text()
    assert [path.name for path in (folder / "logs").iterdir()] == ["rank_00001.log"]
    other = (folder / "logs" / "rank_00001.log").read_text()
    assert f"run: {folder}" in other
    assert "held-out text: loss" not in other
    alone = run()
    assert alone.status == 0, alone.err
    assert loss(folder) == pytest.approx(loss(command.runs()[-1]), rel=1e-4)


def test_a_sweep_is_an_array_and_the_runs_that_fail_are_named_and_resumed(
    slurm: Cluster, command: Command, run: Callable[..., Finished]
) -> None:
    overrides = (*LAUNCHER, *SHORT, "checkpoint_every_tokens=512", BREAKS[0], "+callbacks.breaks.rank=0,1")
    found = run(*overrides)
    assert found.status == 1
    (sweep,) = command.runs()
    assert [(sweep / str(number) / "summary.json").is_file() for number in range(2)] == [False, True]
    (line,) = spoken(found.err)
    assert line.startswith("palimpsest: 1 of 2 runs failed: job ")
    assert "rank 0 of 1 on node" in line
    assert f"ArithmeticError: the third step is too much; its log is {sweep}/0/palimpsest.log" in line
    job = line.split("job ")[1].partition("_")[0]
    assert sorted(slurm.states(job)) == ["COMPLETED", "FAILED"]
    found = run(*overrides, "+callbacks.breaks.step=99", "resume=auto")
    assert found.status == 0, found.err
    assert command.runs() == [sweep]
    assert ", resumed from step_0000000" in (sweep / "0" / "palimpsest.log").read_text()
    assert (sweep / "0" / "summary.json").is_file()
    assert "has finished; nothing is left to do" in (sweep / "1" / "palimpsest.log").read_text()


def test_under_srun_the_first_rank_that_fails_speaks_alone(slurm: Cluster, command: Command) -> None:
    found = under(command, "srun", "--nodes=2", "--ntasks=2", sys.executable, overrides=(*SHORT, *BREAKS))
    assert found.status == 1
    (folder,) = command.runs()
    (line,) = spoken(found.err)
    assert line == (
        "palimpsest: rank 1 of 2 on node2 failed first: ArithmeticError: the third step is too much; its log is "
        f"{folder}/logs/rank_00001.log"
    )
    assert "Traceback" not in found.err + found.out
    record = json.loads((folder / "failed.json").read_text())
    assert (record["rank"], record["host"]) == (1, "node2")
    assert "in on_train_batch_end" in (folder / "logs" / "rank_00001.log").read_text()


def test_torchrun_goes_on_in_the_same_folder_when_it_starts_the_ranks_again(command: Command) -> None:
    overrides = (*SHORT, *BREAKS, "trainer.devices=2", "checkpoint_every_tokens=512")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    found = under(command, *torchrun, overrides=overrides)
    assert found.status == 0, found.err
    (folder,) = command.runs()
    assert json.loads((folder / "failed-1.json").read_text())["error"] == "ArithmeticError: the third step is too much"
    assert not (folder / "failed.json").exists()
    assert (folder / "summary.json").is_file()
    assert ", resumed from step_0000000" in (folder / "palimpsest.log").read_text()
    (line,) = spoken(found.err)
    assert "rank 1 of 2 on " in line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("hydra.launcher.partition=nowhere",),
            "hydra.launcher.partition=nowhere: sbatch refuses the job: invalid partition specified: nowhere",
        ),
        (("hydra.launcher.nodes=3", "data.batch_tokens=768"), "hydra.launcher.nodes=3, "),
        (("hydra.launcher.time=2:00:00",), "hydra.launcher.time=2:00:00: SLURM would never start the job (Partition"),
        (("hydra.launcher.nodes=2", "trainer.num_nodes=3"), "trainer.num_nodes=3 is not hydra.launcher.nodes=2"),
    ],
)
def test_what_slurm_would_not_run_is_refused_in_one_line_and_leaves_nothing(
    slurm: Cluster, command: Command, run: Callable[..., Finished], overrides, line
) -> None:
    given = {override.partition("=")[0] for override in overrides}
    found = run(*(option for option in LAUNCHER if option.partition("=")[0] not in given), *overrides)
    assert found.status == 2
    assert found.err.count("\n") == 1
    assert line in found.err
    assert command.runs() == []
    assert not slurm.ask("squeue", "-h").strip()


def test_a_dry_run_prints_the_script_and_leaves_nothing(
    slurm: Cluster, command: Command, run: Callable[..., Finished]
) -> None:
    found = run(*LAUNCHER, "hydra.launcher.nodes=2", "hydra.launcher.account=physics", "seed=1,2", "dry_run=true")
    assert found.status == 0, found.err
    for words in (
        "#SBATCH --account=physics",
        "#SBATCH --array=0-1%2",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --time=0:20:00",
        f"export PYTHONPATH={ROOT}",
        "--kill-on-bad-exit=1",
    ):
        assert words in found.out
    assert "gpus" not in found.out, "the processors are asked for"
    assert not command.runs_dir.exists()
    assert not slurm.ask("squeue", "-h").strip()


def test_ctrl_c_leaves_the_jobs_and_says_how_to_follow_and_cancel_them(
    slurm: Cluster, command: Command, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_queue, "wait_for_jobs", interrupted)
    found = run(*LAUNCHER, "hydra.launcher.setup=['sleep 60']")
    (job,) = slurm.ask("squeue", "-h", "-o", "%i").split()
    slurm.ask("scancel", job)
    slurm.wait(job)
    assert found.status == 130
    assert f"the jobs go on: follow them with squeue --jobs={job}, cancel them with scancel {job}" in found.err
