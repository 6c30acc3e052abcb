"""Pictures of a card, as PNG files, drawn without a display."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from common.atomic_files import write_figure
from data_pipeline.card.facts import BINS_PER_DOUBLING, Lengths
from data_pipeline.card.markdown import one_line, percent, size

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#64b5cd", "#ccb974", "#2f4b7c", "#a05195")
GREY, KEPT, DROPPED, CUT = "#b0b0b0", "#55a868", "#c44e52", "#dd8452"
OTHERS = "others"  # the grey group of everything that does not fit into a picture
ROW_INCHES = 0.3
MONTHS_BETWEEN_MARKS = (1, 2, 3, 6, 12, 24, 60, 120)  # enough for the 60 years that a picture can span
LABEL_CHARACTERS = 40
PICTURE_BINS = BINS_PER_DOUBLING // 4  # histogram bins per bin of the picture


def draw_composition(rows: Sequence[tuple[str, str, int, str]], path: Path) -> None:
    """Draw bars of bytes for (kind, source, bytes, label), coloured by kind, from top to bottom."""
    figure, axes = _bars(len(rows))
    colors, places = _colors(kind for kind, *_ in rows), range(len(rows))
    axes.barh(places, [length for _, _, length, _ in rows], color=[colors[kind] for kind, *_ in rows])
    axes.set_yticks(places, [_label(f"{kind} · {source}" if source else kind) for kind, source, *_ in rows])
    for place, (_, _, length, note) in zip(places, rows, strict=True):
        _beside(axes, length, place, note)
    _size_axis(axes, max(length for _, _, length, _ in rows), "text")
    _save(figure, path)


def draw_steps(rows: Sequence[tuple[str, int, int, int]], path: Path) -> None:
    """Draw (step, bytes left, bytes dropped with documents, bytes cut from kept documents), from top to bottom."""
    figure, axes = _bars(len(rows))
    places, start = range(len(rows)), np.zeros(len(rows))
    for color, name, lengths in (
        (KEPT, "left", [row[1] for row in rows]),
        (DROPPED, "dropped with the document", [row[2] for row in rows]),
        (CUT, "cut from documents that stay", [row[3] for row in rows]),
    ):
        axes.barh(places, lengths, left=start, color=color, label=name)
        start += lengths
    axes.set_yticks(places, [_label(row[0]) for row in rows])
    for place, (_, left, dropped, cut) in zip(places, rows, strict=True):
        removed, whole = dropped + cut, left + dropped + cut
        _beside(axes, whole, place, f"−{percent(removed, whole)}" if removed else "0%")
    _size_axis(axes, float(start.max()), "text given to the step")
    _legend_above(figure, axes)
    _save(figure, path)


def draw_reasons(rows: Sequence[tuple[str, str, int]], path: Path) -> None:
    """Draw (step, reason, bytes dropped), from top to bottom, coloured by step."""
    figure, axes = _bars(len(rows))
    colors, places = _colors(step for step, *_ in rows), range(len(rows))
    axes.barh(places, [length for *_, length in rows], color=[colors[step] for step, *_ in rows])
    labels = [f"{step} · {reason}" if reason != step else step for step, reason, _ in rows]
    axes.set_yticks(places, [_label(label, 2 * LABEL_CHARACTERS) for label in labels])
    for place, (*_, length) in zip(places, rows, strict=True):
        _beside(axes, length, place, size(length))
    _size_axis(axes, max(length for *_, length in rows), "text of the documents dropped")
    _save(figure, path)


def draw_lengths(rows: Sequence[tuple[str, Lengths]], path: Path) -> None:
    """Draw a length histogram per category on a shared logarithmic axis, with the median marked."""
    binned = [lengths.bins.reshape(-1, PICTURE_BINS).sum(axis=1) for _, lengths in rows]
    filled = np.flatnonzero(sum(binned))
    first, last = max(0, int(filled[0]) - 1), int(filled[-1]) + 2
    edges = 2.0 ** (np.arange(first, last + 1) * PICTURE_BINS / BINS_PER_DOUBLING)
    figure = Figure(figsize=(8, 0.9 + 0.75 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    colors = _colors(name for name, _ in rows)
    for axes, (name, lengths), counts in zip(panels, rows, binned, strict=True):
        axes.stairs(counts[first:last] / counts.sum(), edges, fill=True, color=colors[name], alpha=0.85)
        axes.axvline(lengths.quantile(0.5), color="black", linewidth=1, linestyle="--")
        axes.set_ylabel(_label(name, 24), rotation=0, ha="right", va="center", fontsize=9)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
    axes = panels[-1]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, numticks=16))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("UTF-8 bytes in a document (dashed: the median)", fontsize=9)
    axes.tick_params(labelsize=8)
    _save(figure, path)


def draw_months(first: int, lengths: dict[str, np.ndarray], width: int, path: Path) -> None:
    """Draw bytes by date, stacked by source.

    `lengths`: {source: [periods]}, for periods of `width` months from month `first`, counted from year 0.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    periods = len(next(iter(lengths.values())))
    places, bottom, colors = np.arange(periods), np.zeros(periods), _colors(lengths)
    for name, heights in lengths.items():
        axes.bar(places, heights, bottom=bottom, width=0.9, color=colors[name], label=_label(name))
        bottom += heights
    step = next(step for step in MONTHS_BETWEEN_MARKS if periods * width <= 12 * step)
    marks = [place for place in places.tolist() if (first + place * width) % step == 0]
    axes.set_xticks(marks, [_month_name(first + place * width, step) for place in marks])
    margin = max(0.0, (6 - periods) / 2)  # keeps the bar of a single month narrow
    axes.set_xlim(-0.6 - margin, periods - 0.4 + margin)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylabel({1: "text, by month", 3: "text, by quarter"}.get(width, "text, by year"), fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8, frameon=False)
    _save(figure, path)


def _bars(rows: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 1.1 + ROW_INCHES * rows), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(rows - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _beside(axes: Axes, length: float, place: int, note: str) -> None:
    axes.annotate(note, (length, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _size_axis(axes: Axes, greatest: float, name: str) -> None:
    axes.set_xlim(0, max(greatest, 1) * 1.25)  # room for the label of the longest bar
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(name, fontsize=9)


def _legend_above(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=8, frameon=False)


def _colors(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in order; colours repeat if there are more names."""
    cycle: Iterator[str] = itertools.cycle(COLORS)
    return {name: GREY if name == OTHERS else next(cycle) for name in dict.fromkeys(names)}


def _label(text: str, characters: int = LABEL_CHARACTERS) -> str:
    return one_line(text, characters).replace("$", r"\$")  # not mathtext


def _month_name(month: int, step: int) -> str:
    return f"{month // 12}" if step % 12 == 0 else f"{month // 12}-{month % 12 + 1:02d}"


def _save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG, atomically."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font lacks
        write_figure(path, figure, dpi=130)
