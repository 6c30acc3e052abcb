"""The curves of a run's `metrics.csv`, whether the run has finished, is running, was resumed or was killed."""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Points = Mapping[float, float]
"""A value by tokens trained, tokens ascending."""

TRAIN, HELD_OUT, BEFORE = "train/loss", "validation/loss", "validation/student_before"
RATES = ("tokens_per_second_per_gpu", "tokens_per_second")
"""Speed since the row before with one, of a GPU if the run logged it, else of the run."""


@dataclass
class Curves:
    """What a run logged, by tokens trained.

    Attributes:
        train: loss of the training text in nats per token, each a mean since the point before.
        held_out: loss of the held-out text in nats per token; at 0 tokens, of a model linearized but not trained.
        hours: hours of training so far times GPUs, or of the machine where there is no GPU. Validations, checkpoints
            and what a killed start had not saved are left out.
        notes: what could not be read, each with what to do.
    """

    train: dict[float, float] = field(default_factory=dict)
    held_out: dict[float, float] = field(default_factory=dict)
    hours: dict[float, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """Tokens trained so far."""
        return max((tokens for points in (self.train, self.held_out) for tokens in points), default=0.0)


def read_curves(path: Path) -> Curves:
    """Read `metrics.csv`; a line that a kill cut off is left out, and so is all after a line that cannot be read."""
    curves, furthest = Curves(), 0.0
    if not path.is_file():
        return curves
    for row in read_rows(path, curves.notes):
        tokens = row.get("tokens")
        if tokens is None:  # the final numbers, which summary.json has
            continue
        if tokens < furthest:  # a resumed run repeats these steps
            forget_from(curves, tokens)
        furthest = tokens
        rate = next((row[key] for key in RATES if row.get(key)), None)
        if rate:
            before, hours = next(reversed(curves.hours.items()), (0.0, 0.0))
            curves.hours[tokens] = hours + (tokens - before) / rate / 3600
        if TRAIN in row:
            curves.train[tokens] = row[TRAIN]
        for key in (HELD_OUT, BEFORE):
            if key in row:
                curves.held_out[tokens] = row[key]
    return curves


def read_rows(path: Path, notes: list[str]) -> Iterator[dict[str, float]]:
    """Yield the finite numbers of each row by column.

    Args:
        notes: gets a line if the file is damaged.
    """
    fix = "resume the run (resume=FOLDER), which writes the file anew, or delete these lines"
    with open(path, encoding="utf-8", errors="replace", newline="") as handle:
        reader = csv.reader(handle)
        try:
            header = next(reader, [])
            if "step" not in header:
                notes.append(f"{path}: its first line has no column step: {fix}")
                return
            for cells in reader:
                if len(cells) < len(header):  # the last line of a run that is running or was killed
                    number = reader.line_num
                    if next(reader, None) is not None:
                        notes.append(f"{path}, line {number} is cut off; it and what follows are left out: {fix}")
                    return
                yield dict(finite(header, cells))
        except (csv.Error, ValueError) as error:
            notes.append(f"{path}, line {reader.line_num}: {error}; it and what follows are left out: {fix}")


def finite(header: list[str], cells: list[str]) -> Iterator[tuple[str, float]]:
    """Yield the columns of a row that hold a finite number.

    Raises:
        ValueError: a cell is no number.
    """
    for name, text in zip(header, cells, strict=False):
        if text and math.isfinite(value := float(text)):
            yield name, value


def forget_from(curves: Curves, tokens: float) -> None:
    """Remove all points from `tokens` on."""
    for points in (curves.train, curves.held_out, curves.hours):
        for place in [place for place in points if place >= tokens]:
            del points[place]
