"""Measurements as Markdown tables and as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; benchmarks add fields.

    milliseconds: None if it failed, with the reason in `note`. shape: shown by its str. parameter: what a section
    varies besides the shape.
    """

    section: str
    implementation: str
    shape: object
    parameter: str
    passes: str
    milliseconds: float | None
    note: str = ""

    @property
    def case(self) -> tuple[str, str, str]:
        return str(self.shape), self.parameter, self.passes


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others right-aligned; short rows are filled up."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" + "---:|" * (len(header) - 1)]
    for row in rows:
        cells = [*map(str, row), *[""] * (len(header) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def comparison(rows: Sequence[Row], base: str | None = None) -> str:
    """Return a table of milliseconds, cases by implementations, with their ratio to `base` in brackets.

    Implementations without any measurement are listed under the table with the reason.
    """
    names = list(dict.fromkeys(row.implementation for row in rows))
    shown = [name for name in names if any(row.milliseconds for row in rows if row.implementation == name)]
    cells = {(row.case, row.implementation): row for row in rows}
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        reference = cells.get((case, base)) if base else None
        lines.append([", ".join(filter(None, case)), *(_cell(cells.get((case, name)), reference) for name in shown)])
    reasons: dict[str, list[str]] = {}
    for name in names:
        if name not in shown:
            note = next(row.note for row in rows if row.implementation == name)
            reasons.setdefault(note, []).append(name)
    missing = "".join(f"\n{', '.join(absent)}: {note.rstrip('.')}.\n" for note, absent in reasons.items())
    return table(["milliseconds" + (f" (ratio to {base})" if base else ""), *shown], lines) + missing


def _cell(row: Row | None, reference: Row | None) -> str:
    if row is None:
        return ""
    if row.milliseconds is None:
        return row.note
    ratio = ""
    if reference is not None and reference.milliseconds and reference is not row:
        ratio = f" ({row.milliseconds / reference.milliseconds:.2f})"
    return f"{row.milliseconds:.3f}{ratio}" + (f" {row.note}" if row.note else "")


def shown(value: float | None, form: str) -> str:
    """Format a number for a cell, which stays empty for what was not measured (None) or is nothing (0)."""
    return format(value, form) if value else ""


def csv_text(kind: type, rows: Iterable[object]) -> str:
    """Return CSV with one line per measurement and the fields of the dataclass `kind`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(kind)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()


def read_csv(path: Path, kind: type[Record]) -> list[Record]:
    """Read what `csv_text` wrote, each field by its type; nothing if there is no file.

    Raises:
        ValueError: the file has other columns than `kind` has fields, or a value that cannot be read.
    """
    if not path.is_file():
        return []
    kinds = {field.name: field.type for field in fields(kind)}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(kinds):
            found = ", ".join(reader.fieldnames or ())
            raise ValueError(
                f"{path} has the columns {found}: expected {', '.join(kinds)}; move it, or name another folder"
            )
        rows = []
        for number, line in enumerate(reader, start=2):
            try:
                rows.append(kind(**{name: _parsed(kinds[name], text) for name, text in line.items()}))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
        return rows


def _parsed(kind: object, text: str) -> object:
    """Parse a field by its type: text, a number, or an optional number. What is read of a shape is its text."""
    if kind in (int, float):
        return kind(text)
    if kind in (str, object):
        return text
    return float(text) if text else None
