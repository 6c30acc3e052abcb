"""What the attention benchmark measured, as Markdown tables, a CSV file and pictures."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from data_pipeline.files import write_whole
from lit_modules.figures import save

FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem. heads: of q, k and v."""

    batch: int
    heads: tuple[int, int, int]
    length: int
    head_dim: int

    def __str__(self) -> str:
        heads = str(self.heads[0]) if len(set(self.heads)) == 1 else "/".join(map(str, self.heads))
        return f"B{self.batch} H{heads} T{self.length} D{self.head_dim}"


@dataclass(frozen=True)
class Row:
    """One measurement. milliseconds: None where it failed, and then `note` says why. parameter: what a section varies
    beside the shape. rate: TFLOP/s, or GB/s where `section` is decoding."""

    section: str
    implementation: str
    shape: Shape
    parameter: str
    passes: str
    milliseconds: float | None
    rate: float | None
    note: str = ""
    pruned: float | None = None

    @property
    def case(self) -> tuple[str, str, str]:
        return str(self.shape), self.parameter, self.passes


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def comparison(rows: Sequence[Row], base: str | None = None) -> str:
    """A line for each case, a column for each implementation: milliseconds, and their ratio to `base` in brackets.

    Implementations that nothing could be measured of are named under the table with the reason.
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


def csv_text(rows: Iterable[Row]) -> str:
    """Every measurement, one line each."""
    out = io.StringIO()
    names = [*Row.__dataclass_fields__]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(row), "shape": str(row.shape)} for row in rows)
    return out.getvalue()


def draw_rates(rows: Sequence[Row], path: Path) -> Path:
    """TFLOP/s of forward + backward against length, a panel for each head dimension."""
    dims = sorted({row.shape.head_dim for row in rows})
    figure = Figure(figsize=(6 * len(dims), 4.5), layout="constrained")
    for axes, head_dim in zip(figure.subplots(1, len(dims), squeeze=False)[0], dims, strict=True):
        for number, name in enumerate(dict.fromkeys(row.implementation for row in rows)):
            points = sorted(
                (row.shape.length, row.rate)
                for row in rows
                if row.implementation == name and row.shape.head_dim == head_dim and row.rate
            )
            if points:
                style = "-" if name.startswith("ours") else "--"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", marker="o", markersize=3, label=name)
        lengths = sorted({row.shape.length for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
        axes.set_title(f"head dimension {head_dim}")
        axes.set_xlabel("tokens in a sequence")
        axes.set_ylabel("TFLOP/s, forward + backward")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return save(figure, path)


def draw_pruning(rows: Sequence[Row], path: Path) -> Path:
    """Milliseconds of forward + backward against the fraction of tiles pruned; trained gates are marked."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(row.implementation for row in rows)):
        mine = [row for row in rows if row.implementation == name and row.milliseconds is not None]
        swept = sorted((row.pruned, row.milliseconds) for row in mine if row.parameter != "trained gates")
        trained = [(row.pruned, row.milliseconds) for row in mine if row.parameter == "trained gates"]
        if swept:
            axes.plot(*zip(*swept, strict=True), color=f"C{number}", marker="o", markersize=3, label=name)
        if trained:
            axes.plot(
                *zip(*trained, strict=True), "*", color=f"C{number}", markersize=12, label=f"{name}, trained gates"
            )
    axes.set_xlabel("fraction of 128 x 128 tiles that can be pruned")
    axes.set_ylabel("milliseconds, forward + backward")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save(figure, path)


def write(folder: Path, report: str, rows: Sequence[Row]) -> None:
    """The report and the raw numbers."""
    write_whole(folder / "forgetting_attention.md", report)
    write_whole(folder / "forgetting_attention.csv", csv_text(rows))
