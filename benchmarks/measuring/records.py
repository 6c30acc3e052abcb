"""Dated records of runs, a line of a CSV file each, of which the last of a run counts."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measuring.tables import csv_text, read_csv
from common.atomic_files import write_atomic

Record = TypeVar("Record", bound=Any)
"""A dataclass with `date` (ISO 8601), and `key`, which two records of the same run share."""


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
    """Return the records of the last date of each key, in the order of the first."""
    records = list(records)
    dates: dict[Hashable, str] = {}
    for record in records:
        dates[record.key] = max(dates.get(record.key, ""), record.date)
    chosen = [record for record in records if record.date == dates[record.key]]
    # A line that was appended twice counts once.
    return list({tuple(asdict(record).items()): record for record in chosen}.values())
