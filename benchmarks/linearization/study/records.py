"""Records of the study's runs: a line for each run, and its held-out loss during training."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.measuring.tables import csv_text, read_csv
from common.atomic_files import write_atomic

RUNS, CURVES = "linearization_study.csv", "linearization_study_curves.csv"  # in RESULTS

TEACHER, UNIGRAM, UNTRAINED = "teacher", "unigram", "untrained window and sinks"
"""Baselines of all variants: the model before linearization; token frequencies alone; the teacher's own weights limited
to a window and the first tokens, at the memory of a linearized model."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A pretrained model: its number of parameters and training tokens."""

    parameters: int
    tokens: int


class OfARun:
    """Columns of both files that identify a run: its teacher, variant and seed."""

    @property
    def teacher(self) -> Teacher:
        return Teacher(parameters=self.teacher_parameters, tokens=self.teacher_tokens)

    @property
    def key(self) -> Hashable:
        return self.teacher, self.variant, self.seed


@dataclass(frozen=True, kw_only=True)
class Result(OfARun):
    """One run.

    date: with time, ISO 8601; of two runs with the same teacher, variant and seed, the later counts. settings: the
    run's overrides, as JSON. adaptation_tokens: trained on; 0 if nothing was drawn or trained, and then all seeds give
    the same result. held_out_nats: nats per token of the held-out text, NaN if the run diverged.
    """

    date: str
    commit: str
    gpu: str
    teacher_parameters: int
    teacher_tokens: int
    variant: str
    settings: str
    seed: int
    adaptation_tokens: int
    held_out_nats: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Point(OfARun):
    """A run's loss after `tokens` of adaptation, on the first part of the held-out text.

    A `Result` covers all of it, so the two are not comparable.
    """

    date: str
    teacher_parameters: int
    teacher_tokens: int
    variant: str
    seed: int
    tokens: int
    held_out_nats: float


Record = TypeVar("Record", Result, Point)


def append(path: Path, records: Sequence[Record]) -> None:
    """Append lines to a CSV file; create the file if needed.

    Raises:
        ValueError: the file has other columns.
    """
    if not records:
        return
    kind = type(records[0])
    write_atomic(path, csv_text(kind, [*read_csv(path, kind), *records]))


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the records of the last run of each teacher, variant and seed, in the order of the first."""
    records = list(records)
    dates: dict[Hashable, str] = {}
    for record in records:
        dates[record.key] = max(dates.get(record.key, ""), record.date)
    chosen = [record for record in records if record.date == dates[record.key]]
    # A line that was appended twice counts once.
    return list({tuple(asdict(record).items()): record for record in chosen}.values())
