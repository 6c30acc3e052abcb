"""Records of the study: a line for each number, with the values of single texts, which comparisons are paired over."""

import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.tables import csv_text, read_csv
from common.atomic_files import write_atomic
from evaluation.uncertainty import Estimate, mean

FILE = "cache_study.csv"
IN_CHUNKS = ", in chunks"
"""The end of a recall's text whose prompts were read in chunks, not whole."""
DIGITS = 6  # of a value of one text


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measure of one model under one cache, on one text.

    Attributes:
        model: its name on the command line.
        policy, treatment, bits, reserved, match: the case, see `cases.Case`.
        measure: `loss` and `late_loss` (nats a token), `right` (share of answers), `coverage`, `l1`.
        text: the name of the text; of recall the kind, the length, and IN_CHUNKS.
        value: the mean of `values`.
        bits_per_number: of keys and values at the end of the text, metadata and 16-bit tokens counted; 0 where no cache
            was filled.
        values: of the single sequences or questions, in their order, separated by spaces.
        seconds: that the measurement took.
        gpu, commit, date: the conditions.
    """

    model: str
    policy: str
    treatment: str
    bits: int
    reserved: int
    match: str
    measure: str
    text: str
    value: float
    bits_per_number: float
    values: str
    seconds: float
    gpu: str
    commit: str
    date: str

    @property
    def case(self) -> Hashable:
        """What tells caches apart."""
        return self.policy, self.treatment, self.bits, self.reserved, self.match

    @property
    def singles(self) -> list[float]:
        """The values of the single texts."""
        return [float(value) for value in self.values.split()]

    @property
    def estimate(self) -> Estimate:
        """The mean with its standard error over the single texts."""
        return mean(self.singles)


def joined(values: Iterable[float]) -> tuple[float, str]:
    """Return the fields `value` and `values` of single values."""
    rounded = [float(f"{value:.{DIGITS}g}") for value in values]
    return statistics.fmean(rounded), " ".join(f"{value:.{DIGITS}g}" for value in rounded)


class Records:
    """The file of results; each result is in it as soon as it is measured.

    Args:
        path: the file.
        known: another file, whose results are read and stay there.
    """

    def __init__(self, path: Path, known: Path | None = None) -> None:
        self.path, self.own = path, read_csv(path, Result)
        self.known = [] if known is None else read_csv(known, Result)

    @property
    def results(self) -> list[Result]:
        """All results."""
        return self.known + self.own

    def add(self, results: Iterable[Result]) -> None:
        """Append results, and write the file."""
        self.own += results
        write_atomic(self.path, csv_text(Result, self.own))

    def take(self, path: Path) -> None:
        """Move the results of a file to this one."""
        others = read_csv(path, Result)
        self.add(each for each in others if not self.has(each.model, each.case, each.measure, each.text))
        path.unlink()

    def has(self, model: str, case: Hashable, measure: str, text: str) -> bool:
        """Return whether this was measured."""
        return self.find(model, case, measure, text) is not None

    def find(self, model: str, case: Hashable, measure: str, text: str) -> Result | None:
        """Return a result, or None."""
        for found in self.results:
            if (found.model, found.case, found.measure, found.text) == (model, case, measure, text):
                return found
        return None
