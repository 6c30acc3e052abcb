"""Rows and plots of the attention benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measuring import tables
from benchmarks.measuring.pictures import Panel, draw_lengths
from common.atomic_files import write_figure


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


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """A measurement. rate: TFLOP/s, or GB/s if `section` is decoding. pruned: the fraction of prunable tiles."""

    shape: Shape
    rate: float | None
    pruned: float | None = None


def draw_rates(rows: Sequence[Row], path: Path) -> Path:
    """Plot TFLOP/s of forward + backward against length, a panel for each head dimension."""
    panels = []
    for head_dim in sorted({row.shape.head_dim for row in rows}):
        lines: dict[str, list[tuple[int, float]]] = {row.implementation: [] for row in rows}
        for row in rows:
            if row.shape.head_dim == head_dim and row.rate:
                lines[row.implementation].append((row.shape.length, row.rate))
        panels.append(Panel(f"head dimension {head_dim}", "TFLOP/s, forward + backward", lines))
    return draw_lengths(panels, path)


def draw_pruning(rows: Sequence[Row], path: Path) -> Path:
    """Plot milliseconds of forward + backward against the fraction of tiles pruned; mark trained gates."""
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
    return write_figure(path, figure)
