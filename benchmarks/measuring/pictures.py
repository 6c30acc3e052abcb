"""Plots of measurements against the length of sequences."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from common.atomic_files import write_figure


class Panel(NamedTuple):
    """One plot of a figure. lines: (length, value) of each, by name. base: of a logarithmic axis of values."""

    title: str
    values: str
    lines: Mapping[str, Sequence[tuple[int, float]]]
    base: int | None = None


def solid_ours(name: str) -> str:
    """Return the style of a line: solid for ours."""
    return "-" if name.startswith("ours") else "--"


def draw_lengths(
    panels: Sequence[Panel], path: Path, lengths: str = "tokens in a sequence", style: Callable[[str], str] = solid_ours
) -> Path:
    """Plot the panels side by side; a name has one color in all of them."""
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(n for p in panels for n in p.lines))}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in panel.lines.items():
            if points:
                line = zip(*sorted(points), strict=True)
                axes.plot(*line, style(name), color=colors[name], marker="o", markersize=3, label=name)
        ticks = sorted({length for points in panel.lines.values() for length, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{length // 1024}k" if length >= 1024 else str(length) for length in ticks])
        if panel.base is None:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log", base=panel.base)
            axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.set(title=panel.title, xlabel=lengths, ylabel=panel.values)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    return write_figure(path, figure)
