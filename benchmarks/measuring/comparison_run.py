"""A benchmark run: implementations measured in turn, verdicts, and an incremental report."""

import argparse
import datetime
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from benchmarks.measuring.tables import Row, csv_text, table
from benchmarks.measuring.timing import RESULTS, Call, check_output, one_line, timed
from common.atomic_files import write_atomic


def parse(parser: argparse.ArgumentParser, sections: Sequence[str], lengths: Sequence[int]) -> argparse.Namespace:
    """Parse the command line with the options that all kernel benchmarks share; `sections` are those to run."""
    parser.add_argument(
        "--quick", action="store_true", help="few checks, and the targets alone where no section is named"
    )
    parser.add_argument("--sections", nargs="+", choices=sections, help="all where none is named")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=lengths, help="of the sweep; none is exceeded, in any section"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    check_output(parser, arguments.output)
    arguments.sections = arguments.sections or (["targets"] if arguments.quick else sections)
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
    """Measurements and the report so far. No sequence is longer than `longest` tokens."""

    name: ClassVar[str]  # of the module, and of the report's files
    title: ClassVar[str]
    preamble: ClassVar[str]
    row: ClassVar[type[Row]]

    device: torch.device
    longest: int
    folder: Path
    rows: list[Row] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    spread: float = 0.0  # largest difference between two rounds, relative
    began: float = field(default_factory=time.perf_counter)

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

    def judge(
        self, what: str, measured: float, target: float, aim: float | None = None, at_least: bool = False
    ) -> None:
        """Compare a measurement with its target."""
        self.verdicts.append(Verdict(what, measured, target, aim, at_least))

    def add_section(self, title: str, *paragraphs: str) -> None:
        """Add to the report and write it, so that an interrupted run keeps its results."""
        self.sections.append("\n\n".join([f"## {title}", *(text.rstrip("\n") for text in paragraphs)]))
        self.write()

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Add measurements, and write them."""
        self.rows += rows
        self.write()

    def write(self) -> None:
        """Write the report and the raw numbers so far."""
        write_atomic(self.folder / f"{self.name}.md", self.text())
        write_atomic(self.folder / f"{self.name}.csv", csv_text(self.row, self.rows))

    def text(self) -> str:
        """Return the report."""
        on_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, no GPU"
        command = shlex.join(["python", "-m", f"benchmarks.{self.name}", *without_output(sys.argv[1:])])
        head = (
            f"# {self.title}\n\n{datetime.date.today()}; {device}; torch {torch.__version__}, {self.versions()}. By "
            f"`{command}`.\n\n{self.preamble}"
        )
        summary = []
        if self.verdicts:
            aims = any(verdict.aim is not None for verdict in self.verdicts)
            header = ["", "measured", "close at", "met", "aim", "met"] if aims else ["", "measured", "target", "met"]
            lines = [[verdict.what, f"{verdict.measured:.2f}", *verdict.cells()] for verdict in self.verdicts]
            summary = ["## Targets\n\n" + table(header, lines).rstrip()]
        return "\n\n".join([head, *summary, *self.sections]) + "\n"

    def versions(self) -> str:
        """Return further versions that the times depend on."""
        return f"Triton {getattr(sys.modules.get('triton'), '__version__', None)}"

    def print_verdicts(self) -> None:
        """Print the verdicts, a run's last lines."""
        for verdict in self.verdicts:
            bounds = [("met " if verdict.reaches(verdict.target) else "MISS", verdict.words(verdict.target))]
            if verdict.aim is not None:
                bounds.append(("met " if verdict.reaches(verdict.aim) else "MISS", f"aim {verdict.aim:.2f}"))
            print(f"{verdict.measured:6.3f}  {'  '.join(f'{met} {bound:13}' for met, bound in bounds)}  {verdict.what}")
