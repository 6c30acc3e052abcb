"""The figure of an analysis."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.cache_analysis.coverage import NEWEST, SINKS
from evaluation.cache_analysis.distortion import EVICTED
from evaluation.cache_analysis.report import TITLES

COLORS = ("#c44e52", "#8172b3", "#4c72b0", "#55a868", "#dd8452", "#8c8c8c", "#937860", "#da8bc3", "#64b5cd", "#ccb974")


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw coverage, L1 errors, attention by distance and by head, and errors of keys and outputs by layer."""
    figure = Figure(figsize=(17, 9.5), layout="constrained")
    panels = figure.subplots(2, 3)
    draw_coverage(panels[0, 0], report)
    draw_l1(panels[0, 1], report)
    draw_errors(panels[0, 2], report, "keys", "relative error of keys")
    draw_distance(panels[1, 0], report, figure)
    draw_heads(panels[1, 1], report)
    draw_errors(panels[1, 2], report, "outputs", "relative error of outputs")
    settings = report["settings"]
    title = f"{report['checkpoint']}, {settings['length']:,} tokens of {Path(settings['text']).name}"
    figure.suptitle(title, fontsize=11)
    return write_figure(path, figure)


def draw_coverage(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw the attention on reserved tokens against their number (figure 4)."""
    lengths = [int(length) for length in report["coverage"]]
    for policy, color in zip(report["coverage"][str(lengths[0])], COLORS, strict=False):
        rows = [report["coverage"][str(length)][policy]["mass"] for length in lengths]
        axes.errorbar(
            lengths,
            [100 * row["value"] for row in rows],
            [100 * (row["standard_error"] or 0) for row in rows],
            marker="o", capsize=3, color=color, label=TITLES[policy],
        )  # fmt: skip
    axes.set_xticks(lengths)
    axes.set_xlabel("reserved tokens")
    axes.set_ylabel(f"% of attention, without the first {SINKS} tokens")
    axes.set_title("coverage")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def draw_l1(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw bars of the L1 error for each selection, and each way to treat the others, at the first reserved length."""
    length, selections = next(iter(report["l1"].items()))
    ways = sorted(next(iter(selections.values())), key=lambda how: how == EVICTED)
    width = 0.8 / len(selections)
    for place, ((name, row), color) in enumerate(zip(selections.items(), COLORS, strict=False)):
        own = [how for how in ways if how in row]
        at = np.array([ways.index(how) for how in own]) + (place - (len(selections) - 1) / 2) * width
        errors = [row[how]["standard_error"] or 0 for how in own]
        axes.bar(at, [row[how]["value"] for how in own], width, yerr=errors, capsize=2, color=color, label=TITLES[name])
    axes.set_xticks(range(len(ways)), [how.replace(", ", "\n") for how in ways], fontsize=8)
    axes.set_ylabel("mean L1 error of a head")
    axes.set_title(f"attention distribution, {length} reserved")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7)


def draw_distance(axes: Any, report: Mapping[str, Any], figure: Figure) -> None:
    """Draw the attention of one token by its distance from the newest, by layer and on average (figure 3)."""
    found, layers = report["distance"], report["layers"]
    edges = np.array(found["edges"], dtype=float)
    centers = np.sqrt(np.maximum(edges[:-1], 0.7) * np.maximum(edges[1:] - 1, 0.7))
    colors = matplotlib.colormaps["viridis"]
    for place, row in enumerate(found["by_layer"]):
        axes.plot(centers, positive(row), color=colors(place / max(1, len(layers) - 1)), linewidth=0.7, alpha=0.7)
    axes.plot(centers, positive(found["mean"]), color="black", linewidth=2, label="mean")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens back from the newest (leftmost: itself)")
    axes.set_ylabel("attention of one token")
    axes.set_title(f"attention by distance, without the first {SINKS} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    norm = matplotlib.colors.Normalize(layers[0], max(layers[-1], layers[0] + 1))
    figure.colorbar(matplotlib.cm.ScalarMappable(norm, colors), ax=axes, label="layer", pad=0.01)


def positive(values: Sequence[float]) -> np.ndarray:
    """Return values for a log axis: what is 0 is left out."""
    found = np.array(values, dtype=float)
    return np.where(found > 0, found, np.nan)


def draw_heads(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw boxes over all heads: attention on the first tokens and on the newest (figure 3)."""
    heads = report["distance"]["heads"]
    axes.boxplot([heads["first"], heads["newest"]], showmeans=True, flierprops={"markersize": 2})
    axes.set_xticks([1, 2], [f"first {SINKS} tokens", f"newest {NEWEST} tokens"])
    axes.set_ylabel("attention")
    axes.set_title("all heads of all layers (triangle: mean)")
    axes.grid(axis="y", alpha=0.3)


def draw_errors(axes: Any, report: Mapping[str, Any], part: str, title: str) -> None:
    """Draw an error by layer for each rounding; one color for a transform and grouping, dashes for more bits."""
    styles = dict.fromkeys(name.partition(", ")[2] for name in report["errors"])
    colors = dict(zip(styles, COLORS, strict=False))
    least = min(name.partition(" ")[0] for name in report["errors"])
    for name, parts in report["errors"].items():
        dashes = "-" if name.startswith(least) else "--"
        axes.plot(report["layers"], parts[part]["by_layer"], dashes, color=colors[name.partition(", ")[2]], label=name)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel(title)
    axes.set_title(f"{part}: relative error by layer")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
