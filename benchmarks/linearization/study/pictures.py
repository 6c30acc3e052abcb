"""Plots of the study."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from benchmarks.linearization.study.records import TEACHER, UNTRAINED, Point
from common.atomic_files import write_figure
from evaluation.significance import Sample

COLORS = colormaps["tab10"].colors
STYLES = ("-", "--", ":", "-.")
WIDE = 60  # characters of a name beyond which the legend has one column
LEVELS = {TEACHER: "-", UNTRAINED: "--"}  # drawn across the picture, in black


def draw_curves(points: Sequence[Point], path: Path) -> Path:
    """Plot held-out perplexity against tokens of adaptation.

    Each variant has a line for the mean over seeds and a band from minimum to maximum. Left: variants with several
    seeds; right: variants with one. Curves far above all others are cut off.
    """
    levels = {point.variant: point.held_out_nats for point in points if point.variant in LEVELS}
    curves = {variant: _curve(points, variant) for variant in dict.fromkeys(point.variant for point in points)}
    trained = {variant: {count: v for count, v in curve.items() if count > 0} for variant, curve in curves.items()}
    trained = {variant: curve for variant, curve in trained.items() if curve}
    trained = dict(sorted(trained.items(), key=lambda item: -statistics.fmean(item[1][max(item[1])])))
    several = {name: curve for name, curve in trained.items() if max(map(len, curve.values())) > 1}
    panels = [each for each in (several, {n: c for n, c in trained.items() if n not in several}) if each]
    figure = Figure(figsize=(7.5 * len(panels), 8.5), layout="constrained")
    for axes, drawn in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, (variant, curve) in enumerate(drawn.items()):
            _draw_curve(axes, variant, curve, COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)])
        for variant, style in LEVELS.items():
            if variant in levels:
                level = math.exp(levels[variant])
                axes.axhline(level, color="black", linestyle=style, linewidth=1, label=f"{variant}: {level:.2f}")
        _scale_tokens(axes, {count for curve in drawn.values() for count in curve})
        ends = [math.exp(statistics.fmean(curve[max(curve)])) for curve in drawn.values()]
        shown = [math.exp(levels[variant]) for variant in LEVELS if variant in levels]
        highest = max(math.exp(max(values)) for curve in drawn.values() for values in curve.values())
        axes.set_ylim(0.95 * min(ends + shown), min(3 * statistics.median(ends), 1.1 * max([highest, *shown])))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="tokens of adaptation", ylabel="perplexity of a part of the held-out text")
        axes.grid(alpha=0.3)
        columns = 1 if max(map(len, drawn)) > WIDE else 2
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=columns, frameon=False, fontsize=8)
    return write_figure(path, figure)


def _draw_curve(axes: Axes, variant: str, curve: Mapping[int, list[float]], color: Any, style: str) -> None:
    tokens = list(curve)
    means = [math.exp(statistics.fmean(curve[count])) for count in tokens]
    least, largest = ([math.exp(f(curve[count])) for count in tokens] for f in (min, max))
    axes.plot(tokens, means, style, color=color, marker="o", markersize=3, label=f"{variant}: {means[-1]:.2f}")
    axes.fill_between(tokens, least, largest, color=color, alpha=0.2, linewidth=0)


def _curve(points: Sequence[Point], variant: str) -> dict[int, list[float]]:
    """Return the losses of all seeds by tokens, in order, at the tokens that all seeds share."""
    mine = [point for point in points if point.variant == variant]
    seeds = {point.seed for point in mine}
    curve: dict[int, list[float]] = {}
    for point in sorted(mine, key=lambda point: point.tokens):
        curve.setdefault(point.tokens, []).append(point.held_out_nats)
    common = {count: values for count, values in curve.items() if len(values) == len(seeds)}
    return common or curve


def _scale_tokens(axes: Axes, counts: set[int]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(counts)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: _short(count)))
    axes.xaxis.set_minor_locator(FixedLocator([]))


def _short(count: float) -> str:
    """Format a count with three digits and k or M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.3g}"


def draw_recovery(recovered: Mapping[str, Sample], path: Path) -> Path:
    """Plot a bar for each variant, the best on top, with the standard deviation over seeds if known."""
    order = sorted(recovered.items(), key=lambda item: item[1].mean)
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(order)))
    axes = figure.subplots()
    means = [sample.mean for _, sample in order]
    deviations = [sample.deviation or 0.0 for _, sample in order]
    axes.barh([name for name, _ in order], means, color=COLORS[0], alpha=0.8)
    for height, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        if deviation:
            axes.errorbar(mean, height, xerr=deviation, color="black", capsize=3)
        axes.text(1.01, height, f"{mean:.1%}", va="center", fontsize=9, transform=axes.get_yaxis_transform())
    # Most values are close together: bars that end far below are cut, and their labels give the value.
    left = max(min(means) - 0.02, statistics.median(means) - 0.15)
    axes.set_xlim(left, max(1.02, *(a + b for a, b in zip(means, deviations, strict=True))))
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(0.95, color="black", linewidth=1, linestyle=":")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("recovery of the teacher's advantage over the unigram model (dotted: 95%)")
    axes.grid(axis="x", alpha=0.3)
    return write_figure(path, figure)
