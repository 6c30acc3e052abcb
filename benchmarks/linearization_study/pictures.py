"""The study's pictures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from benchmarks.linearization_study.noise import Sample
from benchmarks.linearization_study.records import TEACHER, UNTRAINED, Point
from data_pipeline.files import write_figure

COLORS = colormaps["tab10"].colors
STYLES = ("-", "--", ":", "-.")
LEVELS = {TEACHER: "-", UNTRAINED: "--"}  # drawn across the picture, in black


def draw_curves(points: Sequence[Point], levels: Mapping[str, float], path: Path) -> Path:
    """Held-out perplexity against tokens of adaptation: a line for each variant, the mean over seeds, and a band from
    the least to the largest. levels: nats per token of variants that were not trained."""
    figure = Figure(figsize=(10, 6))
    axes = figure.subplots()
    curves = {variant: _curve(points, variant) for variant in dict.fromkeys(point.variant for point in points)}
    curves = dict(sorted(curves.items(), key=lambda item: -statistics.fmean(item[1][max(item[1])])))
    for number, (variant, curve) in enumerate(curves.items()):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        tokens = list(curve)
        means = [math.exp(statistics.fmean(curve[count])) for count in tokens]
        least, largest = ([math.exp(f(curve[count])) for count in tokens] for f in (min, max))
        seeds = max(len(values) for values in curve.values())
        label = f"{variant}: {means[-1]:.2f}" + (f" ({seeds} seeds)" if seeds > 1 else "")
        axes.plot(tokens, means, style, color=color, marker="o", markersize=3, label=label)
        axes.fill_between(tokens, least, largest, color=color, alpha=0.2, linewidth=0)
    for variant, style in LEVELS.items():
        if variant in levels:
            level = math.exp(levels[variant])
            axes.axhline(level, color="black", linestyle=style, linewidth=1, label=f"{variant}: {level:.2f}")
    _scale_tokens(axes, {count for curve in curves.values() for count in curve})
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="tokens of adaptation", ylabel="held-out perplexity")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return write_figure(path, figure)


def _curve(points: Sequence[Point], variant: str) -> dict[int, list[float]]:
    """By tokens, in order, the losses of all seeds. Where seeds were measured at different tokens, those that all have
    are kept."""
    mine = [point for point in points if point.variant == variant]
    seeds = {point.seed for point in mine}
    curve: dict[int, list[float]] = {}
    for point in sorted(mine, key=lambda point: point.tokens):
        curve.setdefault(point.tokens, []).append(point.held_out_nats)
    common = {count: values for count, values in curve.items() if len(values) == len(seeds)}
    return common or curve


def _scale_tokens(axes: Axes, counts: set[int]) -> None:
    """Log from the first tokens on; what is measured before any, at the left edge."""
    first = min((count for count in counts if count > 0), default=1)
    axes.set_xscale("symlog", linthresh=first, linscale=0.4)
    decades = [10**power for power in range(13)]
    ticks = [factor * decade for decade in decades for factor in (1, 2, 5)]
    ticks = [first, *(tick for tick in ticks if 2 * first <= tick <= max(counts))]
    axes.xaxis.set_major_locator(FixedLocator([0] * (0 in counts) + ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: _short(count)))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.set_xlim(-0.1 * first if 0 in counts else 0.9 * first, 1.1 * max(counts))


def _short(count: float) -> str:
    """Three digits of a count, with k or M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.3g}"


def draw_recovery(recovered: Mapping[str, Sample], path: Path) -> Path:
    """A bar for each variant, the best on top; the standard deviation over seeds where there is one."""
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
    # A variant that is worse than the unigram model may lie far off: its bar is cut, and its number says how far.
    axes.set_xlim(max(min(0.0, *means), -0.25), max(1.02, *(a + b for a, b in zip(means, deviations, strict=True))))
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(0.95, color="black", linewidth=1, linestyle=":")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("recovery of the teacher's advantage over the unigram model (dotted: 95%)")
    axes.grid(axis="x", alpha=0.3)
    return write_figure(path, figure)
