"""The results of the runs: a line of sigma_ablations.csv each."""

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.pretraining.sigma_ablations.cases import CASES, SELECTED, Case, published
from evaluation.compare.reading import BITS, FINISHED, NATS, Run, read_run
from lit_modules.launching.run_folder import SUMMARY

FILE = "sigma_ablations.csv"  # in the folder of results
OF_THE_RUN = ("experiment=", "seed=", "data.source.path=", "data_dir=", "callbacks.", "resume=")
"""Overrides that are the same in all runs, or columns of their own, or places."""

CACHE, SELECTIVE = "cache=", "selective_v"  # in conf/cache/


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run.

    table: the paper's tables that have the case. overrides: of `experiment=sigma/ablation_small`. seconds: of training
    on the GPU, which runs may share. held_out_loss: nats per token of all the held-out text; under Sel.V the run's own,
    plus what the cache adds on the text of `benchmark=perplexity_by_position`.
    """

    table: str
    case: str
    overrides: str
    seed: int
    parameters: int
    tokens: int
    held_out_bytes: int
    held_out_loss: float
    bits_per_byte: float
    seconds: float
    gpu: str
    commit: str
    date: str

    @property
    def shared(self) -> str:
        """The overrides that are not the case's own."""
        own = [
            each for case in CASES if case.name == self.case.removesuffix(f", {SELECTED}") for each in case.overrides
        ]
        return " ".join(each for each in self.overrides.split() if each not in own and not each.startswith(CACHE))

    @property
    def setup(self) -> tuple[int, int, str]:
        """What runs that are compared have in common: tokens, the held-out text by its bytes, overrides."""
        return self.tokens, self.held_out_bytes, self.shared

    @property
    def key(self) -> Hashable:
        return self.setup, self.case, self.seed


def results_of(case: Case, folder: Path) -> Iterator[Result]:
    """Yield the results of a finished run: its own, and under the cache with Sel.V if it was measured."""
    run = read_run(folder)
    loss = run.loss(NATS)
    if run.state != FINISHED or loss is None:
        return
    overrides = overrides_of(folder)
    yield result(case.name, overrides, run, loss)
    report = folder / "evaluation" / "perplexity_by_position.json"
    caches = json.loads(report.read_text(encoding="utf-8"))["difference"] if report.is_file() else {}
    if SELECTIVE in caches:
        given = [*overrides, f"{CACHE}{SELECTIVE}"]
        yield result(f"{case.name}, {SELECTED}", given, run, loss + caches[SELECTIVE]["value"])


def overrides_of(folder: Path) -> list[str]:
    """Return the overrides that a run was given and that decide its result."""
    given = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
    return [each for each in given if not each.startswith(OF_THE_RUN)]


def result(name: str, overrides: Sequence[str], run: Run, loss: float) -> Result:
    """Return the line of a run with a loss."""
    scale = run.scale[BITS]
    return Result(
        table=" ".join(str(number) for number in sorted({row.table for row in published() if row.case == name})),
        case=name,
        overrides=" ".join(overrides),
        seed=run.seed,
        parameters=run.summary["parameters"],
        tokens=run.summary["tokens"],
        held_out_bytes=run.summary["validation_bytes"],
        held_out_loss=round(loss, 6),
        bits_per_byte=round(loss * scale, 6),
        seconds=round((run.hours or 0.0) * 3600, 1),
        gpu=run.devices,
        commit=run.summary.get("commit") or "",
        date=datetime.fromtimestamp((run.folder / SUMMARY).stat().st_mtime, UTC).isoformat(timespec="seconds"),
    )
