"""Disturbed runs against an undisturbed one: `python -m benchmarks.pretraining.survival`.

The tiny model on two nodes of a SLURM cluster simulated on this machine (slurmctld, two slurmd; gloo): requeued, warned
of its time limit, hung, and deprived of a node, as in tests/slurm/test_survival.py. Reported: the difference of each
run's losses from the undisturbed run's, and the seconds from the disturbance to the next attempt's start and to its
first optimizer step.
"""

import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from common.atomic_files import write_figure
from tests.conftest import Command, write_text
from tests.slurm.cluster import Cluster, cluster, missing, until
from tests.slurm.test_survival import Job, kill_node


def train_losses(job: Job) -> dict[int, float]:
    """Return the training loss of each optimizer step."""
    with open(job.run / "metrics.csv", newline="") as handle:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(handle) if row["train/loss"]}


def paused(slurm: Cluster, command: Command, folder: Path, *overrides: str, rank: int | None = None) -> Job:
    """Start a run and return it when it is paused at step 6."""
    folder.mkdir()
    pauses = ["_target_=tests.slurm.pausing.Pauses", f"folder={folder}", "step=6"]
    pauses += [] if rank is None else [f"rank={rank}"]
    job = Job(slurm, command, folder / "job", *overrides, *(f"+callbacks.pauses.{each}" for each in pauses))
    job.until(lambda: all((folder / f"waits-{one}").exists() for one in ((0, 1) if rank is None else (rank,))))
    job.until(lambda: (job.run / "checkpoints" / "step_00000006").is_dir())
    return job


def disturbances(slurm: Cluster) -> dict[str, tuple[Callable[[Job, Path], None], int | None, tuple[str, ...]]]:
    """Return by name: the action on a paused run, the paused rank (None: both), and the run's settings."""

    def requeue(job: Job, folder: Path) -> None:
        slurm.ask("scontrol", "requeue", job.number)
        (folder / "go").touch()

    def warn(job: Job, folder: Path) -> None:
        slurm.ask("scancel", "--signal=USR1", job.number)
        (folder / "go").touch()

    def lose(job: Job, folder: Path) -> None:
        kill_node(slurm, int((folder / "waits-1").read_text()))
        (folder / "go").touch()
        job.until(lambda: slurm.states(job.number) != ["RUNNING"])
        slurm.start_node("node2")

    return {
        "requeued (scontrol requeue)": (requeue, None, ()),
        "warned of its time limit (SIGUSR1)": (warn, None, ()),
        "one rank hangs (watchdog of 8 s)": (lambda job, folder: None, 1, ("callbacks.watchdog.seconds=8",)),
        "a node is lost and comes back": (lose, None, ()),
    }


def measure(slurm: Cluster, command: Command, place: Path) -> tuple[list[list[object]], dict[str, dict[int, float]]]:
    """Return a line of the table for each disturbance, and all curves by name."""
    (place / "alone").mkdir()
    alone = Job(slurm, command, place / "alone" / "job")
    alone.ends()
    curves, rows = {"left alone": train_losses(alone)}, []
    for number, (name, (disturb, rank, settings)) in enumerate(disturbances(slurm).items()):
        folder = place / str(number)
        job = paused(slurm, command, folder, *settings, rank=rank)
        done, began = len(train_losses(job)), time.perf_counter()
        disturb(job, folder)
        until(lambda job=job: ", resumed from " in job.log(), job.words, 300)
        again = time.perf_counter() - began
        until(lambda job=job, done=done: len(train_losses(job)) > done + 1, job.words, 300)
        step = time.perf_counter() - began
        job.ends()
        curves[name] = train_losses(job)
        apart = max(abs(loss - curves["left alone"][step]) for step, loss in curves[name].items())
        held_out = abs(job.losses()[1] - alone.losses()[1])
        rows.append([name, len(curves[name]), f"{apart:.1e}", f"{held_out:.1e}", f"{again:.0f}", f"{step:.0f}"])
        print(rows[-1], flush=True)
    return rows, curves


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Plot the curves over each other, each narrower than the previous one."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for number, (name, losses) in enumerate(curves.items()):
        axes.plot(list(losses), list(losses.values()), linewidth=9 - 2 * number, label=name, solid_capstyle="round")
    axes.axvline(6.5, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="optimizer step (disturbed after 6)", ylabel="training loss, nats per token")
    axes.legend(frameon=False)
    write_figure(path, figure)


def main() -> int:
    """Measure, and write a page and a plot; return the exit status."""
    arguments = CommandLine(__doc__).parse_args()
    if missing():
        print(f"SLURM is not installed here (no {missing()}): apt-get install slurm-wlm munge", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder)) as slurm:
        place = Path(folder) / "runs"
        place.mkdir()
        write_text(place / "text")
        os.environ.update({name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")})
        rows, curves = measure(slurm, Command(place, place / "unused"), place)
    header = ["", "steps", "losses apart", "held-out loss apart", "next attempt, s", "first new step, s"]
    machine = "two nodes of a SLURM cluster on one machine with 2 cores, gloo"
    text = page(
        "Runs that survive",
        f"{measured_on('torch', machine=machine)}. By `python -m benchmarks.pretraining.survival`.",
        table(header, rows),
        "Apart: the largest difference, over all steps, from the run that is left alone. Seconds are from the "
        "disturbance; most of them are the command's start on both nodes, and what SLURM keeps a requeued job waiting.",
        "![loss curves](survival.png)",
    )
    draw(curves, arguments.output / "survival.png")
    publish(arguments.output / "survival.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
