"""Rows, tables and plot of the recurrence benchmark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measuring import tables
from benchmarks.recurrence.recurrence_peers import Case
from common.atomic_files import write_figure


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """A measurement.

    floor_milliseconds: of moving each input, output and gradient once at the copy rate; read_again_milliseconds: the
    same with inputs read in both passes. peak_gib: device memory above the inputs.
    """

    shape: Case
    gigabytes: float | None = None
    floor_milliseconds: float | None = None
    read_again_milliseconds: float | None = None
    peak_gib: float | None = None

    @property
    def rate(self) -> float | None:
        """GB/s, each moved tensor counted once."""
        return self.gigabytes / self.milliseconds * 1e3 if self.milliseconds and self.gigabytes else None


def floors(rows: Iterable[Row]) -> str:
    """Return a table of each measured time and the time of moving its bytes."""
    header = ["", "", "milliseconds", "GB/s", "floor, ms", "of the floor", "inputs read twice, ms", "of that"]
    return tables.table(
        header,
        [
            [
                ", ".join(filter(None, row.case)),
                row.implementation,
                f"{row.milliseconds:.3f}",
                f"{row.rate:.0f}",
                f"{row.floor_milliseconds:.3f}",
                f"{row.milliseconds / row.floor_milliseconds:.2f}",
                f"{row.read_again_milliseconds:.3f}",
                f"{row.milliseconds / row.read_again_milliseconds:.2f}",
            ]
            for row in rows
            if row.milliseconds
        ],
    )


def draw_lengths(rows: Sequence[Row], path: Path) -> Path:
    """Plot milliseconds of forward + backward against length, and the floor, a panel for each form of gate."""
    panels = list(dict.fromkeys(row.parameter for row in rows))
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row.implementation for row in rows))}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        mine = [row for row in rows if row.parameter == panel]
        for name, color in colors.items():
            points = sorted(
                (row.shape.length, row.milliseconds)
                for row in mine
                if row.implementation == name and row.milliseconds is not None
            )
            if points:
                style = "-" if name.startswith("ours") else "--"
                axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3, label=name)
        floor = sorted({(row.shape.length, row.floor_milliseconds) for row in mine})
        axes.plot(*zip(*floor, strict=True), ":", color="black", label="each byte moved once")
        lengths = [length for length, _ in floor]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
        axes.set_title(panel)
        axes.set_xlabel("tokens in a sequence")
        axes.set_ylabel("milliseconds, forward + backward")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.72))
    return write_figure(path, figure)
