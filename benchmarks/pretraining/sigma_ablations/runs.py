r"""Train the ablations of DiffQKV side by side on one GPU, the most important first, and gather their losses.

    python -m benchmarks.pretraining.sigma_ablations.runs --folder ablations --text 'text/*.jsonl' --processes 4 \
        --minutes 9

Each run is an ordinary `palimpsest experiment=sigma/ablation_small` in --folder, with a log beside it, and a line of
sigma_ablations.csv in --output once it has finished. The same command goes on with what neither the folder nor the file
has. The first run prepares the text of all; runs share a cache of compiled kernels. What follows `--` are overrides for
every run. Then `python -m benchmarks.pretraining.sigma_ablations.report`.
"""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.records import append
from benchmarks.measuring.report import CommandLine
from benchmarks.measuring.tables import read_csv
from benchmarks.pretraining.sigma_ablations.cases import CASES, EXPERIMENT, Case
from benchmarks.pretraining.sigma_ablations.records import FILE, Result, overrides_of, results_of
from common.settings import instead
from lit_modules.launching.run_folder import CONFIG, ROOT, SUMMARY

STARTS = "starts.jsonl"  # is there once a run has its text
LAST_LINES = 5  # of a failed run's log
PAUSE = 0.2  # seconds between two looks at the processes


@dataclass(frozen=True, eq=False)
class Training:
    """One run that is wanted."""

    case: Case
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.case.name}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """Its output."""
        return self.folder.with_suffix(".log")

    @property
    def is_finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()

    def settings(self, options: Namespace) -> list[str]:
        """Return the overrides that decide the result, the case's own last."""
        return [*options.overrides, *self.case.overrides]

    def command(self, options: Namespace) -> list[str]:
        """Return the command line; a killed run begins again in its folder: checkpoints would take gigabytes."""
        begun = [f"resume={self.folder}"] if (self.folder / CONFIG).is_file() else []
        places = [
            f"data.source.path={options.text}",
            f"data_dir={options.folder / 'data'}",
            f"hydra.run.dir={self.folder}",
        ]
        own = [*self.settings(options), f"seed={self.seed}", "callbacks.checkpoints=null"]
        return [sys.executable, str(ROOT / "palimpsest.py"), f"experiment={EXPERIMENT}", *places, *own, *begun]


class Runner:
    """Trainings side by side.

    Args:
        options: of the command line.
    """

    def __init__(self, options: Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.running: dict[Training, tuple[subprocess.Popen, float]] = {}
        self.longest = 0.0  # seconds of a training that has ended
        self.failed: list[Training] = []

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self.began

    def environment(self) -> dict[str, str]:
        """Return the environment of the runs: one cache of compiled kernels, and a share of the cores each."""
        cache = self.options.folder / "compiled"
        cores = max(1, len(os.sched_getaffinity(0)) // self.options.processes)
        return {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(cores),
            "OMP_NUM_THREADS": str(cores),
        }

    def start(self, training: Training) -> None:
        """Start a training in a process of its own."""
        training.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(training.log, "a") as log:
            process = subprocess.Popen(
                training.command(self.options), env=self.environment(), stdout=log, stderr=subprocess.STDOUT
            )
        self.running[training] = process, self.seconds()

    def run(self, trainings: Sequence[Training]) -> None:
        """Run trainings in their order, as many at once as there are processes, until the time is over."""
        waiting = list(trainings)
        self.run_first(waiting)
        while waiting or self.running:
            self.collect()
            over = self.seconds() + self.longest > 60 * self.options.minutes
            while waiting and not over and len(self.running) < self.options.processes:
                self.start(waiting.pop(0))
            if over and not self.running:
                break
            time.sleep(PAUSE)
        if waiting:
            print(f"[{self.seconds():4.0f} s] the time is over: {len(waiting)} runs are left", flush=True)

    def run_first(self, waiting: list[Training]) -> None:
        """Start the first training alone and wait until it has prepared the text, unless an earlier run has."""
        if not waiting or not self.options.minutes or any(self.options.folder.glob(f"runs/*/*/{STARTS}")):
            return
        first = waiting.pop(0)
        self.start(first)
        process, _ = self.running[first]
        while process.poll() is None:
            if (first.folder / STARTS).is_file():
                return
            time.sleep(PAUSE)
        self.collect()
        if self.failed:
            waiting.clear()  # the others would fail alike

    def collect(self) -> None:
        """Take the results of the trainings that have ended."""
        ended = [training for training, (process, _) in self.running.items() if process.poll() is not None]
        for training in ended:
            process, began = self.running.pop(training)
            taken = self.seconds() - began
            if process.returncode:
                self.failed.append(training)
                lines = training.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
                print(
                    f"[{self.seconds():4.0f} s] {training.name} failed: {training.log}",
                    *lines,
                    sep="\n    ",
                    flush=True,
                )
                continue
            self.longest = max(self.longest, taken)
            for found in gather(self.options, [training]):
                loss = f"{found.held_out_loss:.4f} nats per token"
                print(f"[{self.seconds():4.0f} s] {found.case}, seed {found.seed}: {loss}, {taken:.0f} s", flush=True)


def wanted(options: Namespace) -> list[Training]:
    """Return the trainings that were asked for, in the order of their importance: tier, seed, place.

    Raises:
        ValueError: a case is not known.
    """
    names = [case.name for case in CASES]
    for name in options.cases or ():
        if name not in names:
            raise ValueError(f"--cases {name} is not known: {instead(name, names)}")
    chosen = [case for case in CASES if case.tier < options.tiers and case.name in (options.cases or names)]
    ordered = sorted(
        ((case, seed) for case in chosen for seed in options.seeds), key=lambda each: (each[0].tier, each[1])
    )
    return [Training(case, seed, options.folder / "runs" / case.folder / str(seed)) for case, seed in ordered]


def unrecorded(options: Namespace, trainings: Sequence[Training]) -> list[Training]:
    """Return the trainings that neither have finished nor are in the file, with the same overrides.

    Raises:
        ValueError: a finished run of the folder had other overrides.
    """
    known = {(result.case, result.seed, result.overrides) for result in read_csv(options.output / FILE, Result)}
    missing = []
    for training in trainings:
        asked = training.settings(options)
        if not training.is_finished:
            missing += [training] * ((training.case.name, training.seed, " ".join(asked)) not in known)
        elif (had := overrides_of(training.folder)) != asked:
            raise ValueError(f"{training.folder} had the overrides {' '.join(had)}: give them, or another --folder")
    return missing


def gather(options: Namespace, trainings: Sequence[Training]) -> list[Result]:
    """Append the results of finished trainings that the file does not have; return them."""
    path = options.output / FILE
    known = {result.key for result in read_csv(path, Result)}
    finished = [training for training in trainings if training.is_finished]
    results = [result for training in finished for result in results_of(training.case, training.folder)]
    found = [result for result in results if result.key not in known]
    append(path, found)
    return found


def main() -> int:
    """Run what is missing, and gather what has finished; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of runs, logs, prepared text and compiled kernels")
    parser.add_argument(
        "--text", required=True, help="files that experiment=sigma/ablation_small reads; a glob is fine"
    )
    parser.add_argument("--processes", type=int, default=4, help="runs at once; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start nothing that would end later; 0: only gather"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--tiers", type=int, default=3, help="of importance, from 1 to 3; default: %(default)s")
    parser.add_argument("--cases", nargs="*", help="names in cases.py; default: all")
    parser.add_argument("overrides", nargs="*", help="for every run, after --")
    options = parser.parse_args()
    parser.keep_results(options)
    options.folder, options.text = options.folder.absolute(), os.path.abspath(options.text)
    try:
        trainings = wanted(options)
        gather(options, trainings)
        runner = Runner(options)
        runner.run(unrecorded(options, trainings))
        left = len(unrecorded(options, trainings))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(
        f"[{runner.seconds():4.0f} s] {len(trainings) - left} of {len(trainings)} runs are in {options.output / FILE}"
    )
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
