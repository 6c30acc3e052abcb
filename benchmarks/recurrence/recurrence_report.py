"""Rows, tables and plot of the recurrence benchmark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import tables
from benchmarks.measuring.pictures import Panel, draw_lengths, solid_ours
from benchmarks.recurrence.recurrence_peers import Case

FLOOR = "each byte moved once"


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


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Plot milliseconds of forward + backward against length, and the floor, a panel for each form of gate."""
    panels = []
    for gates in dict.fromkeys(row.parameter for row in rows):
        lines: dict[str, list[tuple[int, float]]] = {row.implementation: [] for row in rows} | {FLOOR: []}
        for row in rows:
            if row.parameter == gates:
                floor = (row.shape.length, row.floor_milliseconds)
                lines[FLOOR] += [floor] * (floor not in lines[FLOOR])
                if row.milliseconds is not None:
                    lines[row.implementation].append((row.shape.length, row.milliseconds))
        panels.append(Panel(gates, "milliseconds, forward + backward", lines, base=10))
    return draw_lengths(panels, path, style=lambda name: ":" if name == FLOOR else solid_ours(name))
