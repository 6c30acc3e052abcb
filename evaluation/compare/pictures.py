"""Figures of a comparison, as PNG files and as SVG for the page, whose text takes the page's color."""

import html
import io
import math
import re
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from evaluation.compare.comparison import Comparison
from evaluation.compare.lines import Plot

COLORS = ("#2f7fc1", "#d1642a", "#1f9c74", "#b75fa3", "#a8861f", "#7a6fd0", "#5c8a96", "#b3545c")
STYLES = ("-", "--", ":", "-.")
INK = "#010203"
"""Of text, axes and grid: nearly black in a PNG file, and in the page whatever color its text has."""

NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
MOST_IN_A_ROW, LINE_SAMPLE = 100, 8  # characters in a row of the legend, and those that a sample of a line is wide
LONGEST_LABEL = 90  # characters
LATER_PART = 0.15  # of the x axis, from where on curves decide the limits of y
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}


def look(number: int) -> tuple[str, str]:
    """Return the color and the style of a group's lines."""
    return COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]


def label(number: int, name: str) -> str:
    """Return a group's label: its row in the table, and as much of its name as fits."""
    return f"{number + 1}: {textwrap.shorten(name, LONGEST_LABEL, placeholder=' ...')}"


def draw(plot: Plot) -> Figure:
    """Draw a plot: a line for each group, and a band for the standard error over its seeds."""
    with matplotlib.rc_context(STYLE):
        names = [label(line.number, line.name) for line in plot.lines]
        columns = max(1, min(4, MOST_IN_A_ROW // (max(map(len, names)) + LINE_SAMPLE)))
        rows = math.ceil(len(names) / columns) * (len(names) > 1)
        figure = Figure(figsize=(7.5, 4.2 + 0.2 * rows), layout="constrained")
        axes = figure.subplots()
        for name, line in zip(names, plot.lines, strict=True):
            color, style = look(line.number)
            marker = "o" if len(line.x) <= 12 else ""
            axes.plot(line.x, line.y, style, color=color, marker=marker, markersize=4, lw=1.6, label=name)
            if line.error is not None:
                axes.fill_between(line.x, line.y - line.error, line.y + line.error, color=color, alpha=0.22, lw=0)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        axes.set_xlim(left=0)
        if max(line.x[-1] for line in plot.lines) >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if plot.are_shares:
            axes.set_ylim(-0.03, 1.03)
        else:
            limit(axes, plot)
        if rows:
            figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def limit(axes: Axes, plot: Plot) -> None:
    """Choose the limits of y by the later part of the curves: the first losses would press all others together."""
    end = max(line.x[-1] for line in plot.lines)
    later = [line.y[line.x >= min(LATER_PART * end, line.x[-1])] for line in plot.lines]
    low, high = min(float(np.min(each)) for each in later), max(float(np.max(each)) for each in later)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def draw_finals(comparison: Comparison) -> Figure | None:
    """Draw the final loss of each group, the best on top: a dot for each seed, and the noise of the difference.

    The bar is the noise around the group's difference to the baseline. None with fewer than two finished groups.
    """
    rows = [(number, group, group.sample(comparison.unit)) for number, group in enumerate(comparison.groups)]
    rows = [row for row in rows if row[2].values]
    if len(rows) < 2:
        return None
    base = None if comparison.baseline is None else comparison.baseline.sample(comparison.unit)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.0 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        if base is not None and base.values:
            axes.axvline(base.mean, color=INK, linestyle="--", lw=1)
        for place, (number, group, sample) in enumerate(rows):
            color, _ = look(number)
            found = comparison.differences.get(group.name)
            if base is not None and found is not None and found.margin is not None:
                center = base.mean + found.value
                axes.errorbar(center, place, xerr=found.margin, color=color, capsize=3, lw=1.2, alpha=0.7)
            axes.plot(list(sample.values.values()), [place] * len(sample.values), "o", color=color, markersize=5)
            axes.plot(sample.mean, place, "|", color=color, markersize=14, markeredgewidth=2)
            words = label(number, group.name)
            axes.text(0, place - 0.3, words, transform=axes.get_yaxis_transform(), fontsize=9, va="bottom")
        axes.set_yticks([])
        axes.set_ylim(len(rows) - 0.6, -0.9)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel(f"final held-out loss ({comparison.unit})")
        axes.spines.left.set_visible(False)
    return figure


def as_svg(figure: Figure, key: str, spoken: str) -> str:
    """Return a figure as an SVG element to stand in a page.

    Args:
        key: all ids begin with it, since a page has several figures.
        spoken: what a screen reader says of it.
    """
    text = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None}, bbox_inches="tight")
    svg = text.getvalue()
    opening, _, body = svg[svg.index("<svg") :].partition(">")
    view = opening[opening.index('viewBox="') :].split('"')[1]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace(' id="', f' id="{key}-').replace('href="#', f'href="#{key}-').replace("url(#", f"url(#{key}-")
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body.replace(INK, "currentColor"))
    return f'<svg {NAMESPACES} viewBox="{view}" role="img" aria-label="{html.escape(spoken)}">{body}'
