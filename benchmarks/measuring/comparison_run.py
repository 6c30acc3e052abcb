"""A benchmark run: implementations measured in turn, verdicts, and an incremental report."""

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from benchmarks.measuring.report import CommandLine, measured_on, page
from benchmarks.measuring.tables import Row, csv_text, table
from benchmarks.measuring.timing import Call, copy_rate, default_device, one_line, timed
from common.atomic_files import write_atomic


def parse(parser: CommandLine, sections: Iterable[str], lengths: Sequence[int]) -> argparse.Namespace:
    """Parse the command line with the options that all kernel benchmarks share; `sections` are those to run."""
    parser.add_argument(
        "--quick", action="store_true", help="few checks, and the targets alone where no section is named"
    )
    parser.add_argument("--sections", nargs="+", choices=sections, help="all where none is named")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=lengths, help="of the sweep; none is exceeded, in any section"
    )
    arguments = parser.parse_for_gpu()
    arguments.sections = arguments.sections or (["targets"] if arguments.quick else list(sections))
    return arguments


def without_output(arguments: Sequence[str]) -> list[str]:
    """Return a command line's arguments without the results folder, which does not affect the measurements."""
    ignoring = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ignoring.add_argument("--output")
    return ignoring.parse_known_args(arguments)[1]


def spread_documents(length: int) -> list[int]:
    """Return fixed bounds of documents that fill a row, 128 to 8192 tokens each, evenly spread in log length."""
    generator = np.random.default_rng(0)
    ends = np.cumsum(np.exp(generator.uniform(math.log(128), math.log(8192), length // 128)).astype(int))
    return [0, *(int(end) for end in ends if end < length), length]


Errors = dict[str, float]
"""Relative errors by the name of a tensor."""


def error_cells(errors: Errors, names: Sequence[str]) -> list[str]:
    """Return the cells of an error table, empty for tensors that are not compared."""
    return [f"{errors[name]:.1e}" if name in errors else "" for name in names]


def out_of_bounds(errors: Errors, bounds: Mapping[str, float]) -> list[str]:
    """Return the tensors whose error is over its bound."""
    return [
        f"{name} {error:.1e} over {bounds[name]:.1e}" for name, error in errors.items() if not error <= bounds[name]
    ]


def line_or_reason(label: str, measure: Callable[[], Iterable[str]]) -> list[str]:
    """Return a line of a table: what `measure` finds, or why it could not."""
    try:
        return [label, *measure()]
    except Exception as error:  # still measure the others
        return [label, one_line(error)]


def against_copy(rows: Iterable[Row], copy_rate: float) -> str:
    """Return a table of times and GB/s of rows with a `rate`, and of the rate's ratio to a copy's."""
    lines = []
    for row in rows:
        numbers = [row.note]
        if row.milliseconds:
            time_ms = f"{row.milliseconds:.4f}{' ' * bool(row.note)}{row.note}"
            numbers = [time_ms, f"{row.rate:.0f}", f"{row.rate / copy_rate:.0%}"]
        lines.append([", ".join(filter(None, row.case[:2])), row.implementation, *numbers])
    return table(["", "", "milliseconds", "GB/s", "of the copy"], lines)


@dataclass(frozen=True)
class Measured:
    """One implementation's time for one pass: the median of the rounds, or None and a note with the reason."""

    milliseconds: float | None
    note: str


@dataclass(frozen=True)
class Verdict:
    """A measurement compared with its target, and with a stretch goal (`aim`) if given."""

    what: str
    measured: float
    target: float
    aim: float | None
    at_least: bool

    def reaches(self, bound: float) -> bool:
        return self.measured >= bound if self.at_least else self.measured <= bound

    def words(self, bound: float) -> str:
        return f"{'at least' if self.at_least else 'at most'} {bound:.2f}"

    def cells(self) -> list[str]:
        """Return each bound and whether it is met: the target, then the aim."""
        bounds = [self.target] if self.aim is None else [self.target, self.aim]
        return [cell for bound in bounds for cell in (self.words(bound), "yes" if self.reaches(bound) else "no")]


@dataclass(kw_only=True)
class Run:
    """Measurements and the report so far.

    lengths: of a sweep; no sequence of any section is longer. quick: with few checks.
    """

    name: ClassVar[str]  # of the module in benchmarks/, whose last part names the report's files
    title: ClassVar[str]
    preamble: ClassVar[str]
    row: ClassVar[type[Row]]
    packages: ClassVar[tuple[str, ...]] = ("torch", "triton")  # whose versions the times depend on

    folder: Path
    device: torch.device = field(default_factory=default_device)
    lengths: Sequence[int] = ()
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    spread: float = 0.0  # largest difference between two rounds, relative
    began: float = field(default_factory=time.perf_counter)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def copy_rate(self) -> float:
        """GB/s of a copy, read plus written."""
        rate = copy_rate(self.device)
        self.say(f"a copy moves {rate:.0f} GB/s")
        return rate

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", flush=True)

    def in_turn(
        self, implementations: Mapping[str, Callable[[], Call]], passes: Sequence[str], rounds: int = 1
    ) -> dict[tuple[str, str], Measured]:
        """Measure the passes of each implementation, one after the other, `rounds` times.

        An implementation that raises is not retried; its error becomes the note of its remaining passes.
        """
        calls: dict[str, Call] = {}
        notes: dict[tuple[str, str], str] = {}
        failed: set[tuple[str, str]] = set()
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for name, build in implementations.items():
                for place, which in enumerate(passes):
                    if (name, which) in failed:
                        break
                    try:
                        if name not in calls:
                            calls[name] = build()
                        found, notes[name, which] = timed(calls[name].passes(which), self.device)
                        times.setdefault((name, which), []).append(found)
                    except Exception as error:  # still measure the others
                        after = [(name, later) for later in passes[place:]]
                        failed.update(after)
                        notes.update(dict.fromkeys(after, one_line(error)))
        measured = {}
        for key in ((name, which) for name in implementations for which in passes):
            found = [] if key in failed else times[key]
            measured[key] = Measured(statistics.median(found) if found else None, notes[key])
            self.spread = max(self.spread, max(found) / min(found) - 1) if found else self.spread
        return measured

    def new_row(
        self,
        section: str,
        implementation: str,
        shape: object,
        passes: str,
        found: Measured,
        parameter: str = "",
        wrong: str = "",
        **others: object,
    ) -> Row:
        """Return the row of a measurement. wrong: what is known of its errors; others: further fields."""
        return self.row(
            section=section,
            implementation=implementation,
            shape=shape,
            parameter=parameter,
            passes=passes,
            milliseconds=found.milliseconds,
            note=" ".join(filter(None, (found.note, wrong))),
            **others,
        )

    def judge(
        self, what: str, measured: float, target: float, aim: float | None = None, at_least: bool = False
    ) -> None:
        """Compare a measurement with its target."""
        self.verdicts.append(Verdict(what, measured, target, aim, at_least))

    def add_section(self, title: str, *paragraphs: str) -> None:
        """Add to the report and write it, so that an interrupted run keeps its results."""
        self.sections.append(page(title, *paragraphs, level=2))
        self.write()

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Add measurements, and write them."""
        self.rows += rows
        self.write()

    @property
    def files(self) -> Path:
        """Path of the report without the ending."""
        return self.folder / self.name.rpartition(".")[2]

    def write(self) -> None:
        """Write the report and the raw numbers so far."""
        write_atomic(self.files.with_suffix(".md"), self.text())
        write_atomic(self.files.with_suffix(".csv"), csv_text(self.row, self.rows))

    def text(self) -> str:
        """Return the report."""
        command = shlex.join(["python", "-m", f"benchmarks.{self.name}", *without_output(sys.argv[1:])])
        summary = ""
        if self.verdicts:
            aims = any(verdict.aim is not None for verdict in self.verdicts)
            header = ["", "measured", "close at", "met", "aim", "met"] if aims else ["", "measured", "target", "met"]
            lines = [[verdict.what, f"{verdict.measured:.2f}", *verdict.cells()] for verdict in self.verdicts]
            summary = page("Targets", table(header, lines), level=2)
        about = f"{self.measured_on()}. By `{command}`."
        return page(self.title, about, self.preamble, summary, *self.sections)

    def measured_on(self) -> str:
        """Return the date, the machine and the versions that the times depend on."""
        return measured_on(*self.packages)

    def finish(self, wrong: Sequence[str], sections: Iterable[Callable[[Self], None]]) -> int:
        """Measure the sections if nothing is wrong, and print the verdicts; return the exit status."""
        if wrong:
            print("out of bounds, nothing is timed: " + "; ".join(wrong), file=sys.stderr)
            return 1
        for section in sections:
            section(self)
        self.say(f"done: {self.files}.md")
        self.print_verdicts()
        return 0

    def print_verdicts(self) -> None:
        """Print the verdicts, a run's last lines."""
        for verdict in self.verdicts:
            bounds = [("met " if verdict.reaches(verdict.target) else "MISS", verdict.words(verdict.target))]
            if verdict.aim is not None:
                bounds.append(("met " if verdict.reaches(verdict.aim) else "MISS", f"aim {verdict.aim:.2f}"))
            print(f"{verdict.measured:6.3f}  {'  '.join(f'{met} {bound:13}' for met, bound in bounds)}  {verdict.what}")
