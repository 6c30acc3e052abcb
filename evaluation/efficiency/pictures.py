"""The figures: kernels (figure 2 of arXiv 2501.13629) and modules (figures 3 to 6), a row of panels for each batch."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.efficiency.bytes_model import saving
from evaluation.efficiency.measuring import KERNELS
from evaluation.efficiency.report import cells_of, kernels_of, saved, source_of, tokens, with_sum

TITLES = {
    "queries": "query projections (figure 3)",
    "cache": "cache: keys and values of a token stored (figure 4)",
    "attention": "attention (figure 5)",
    "total": "queries, cache and attention (figure 6)",
}
STYLES = {"model": "-", "against": "--"}
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
MOST = 50  # percent at the ends of the color scale


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw the figures as NAME.WHAT.png beside `path`; return that of the total."""
    if any(kernels_of(report, batch) for batch in report["settings"]["batches"]):
        draw_kernels(report, path.with_suffix(".kernels.png"))
    modules = TITLES if report["measured"] is not None else ("total",)
    return [draw_module(report, module, path.with_suffix(f".{module}.png")) for module in modules][-1]


def draw_kernels(report: Mapping[str, Any], path: Path) -> Path:
    """Draw each kernel's time against the prefix, their sum, and what is saved."""
    batches, prefixes = report["settings"]["batches"], report["settings"]["prefixes"]
    parts = [*KERNELS, "both"]
    figure = Figure(figsize=(4.6 * (len(parts) + 1), 3.8 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), len(parts) + 1, squeeze=False)
    for row, batch in zip(panels, batches, strict=True):
        kernels = kernels_of(report, batch)
        if not kernels:
            continue
        times = {side: [with_sum(found[str(prefix)]) for prefix in prefixes] for side, found in kernels.items()}
        for axes, part in zip(row, parts, strict=False):
            for (side, style), color in zip(STYLES.items(), COLORS, strict=False):
                microseconds = [1e6 * each[part] for each in times[side]]
                axes.plot(microseconds, style, color=color, marker="o", markersize=3, label=report["names"][side])
            axes.set(title=f"{part}, batch {batch}", ylabel="microseconds of a step", ylim=(0, None))
            axes.legend(fontsize=8)
        for part, color in (("split", COLORS[0]), ("both", COLORS[1])):
            pairs = zip(times["model"], times["against"], strict=True)
            shares = [100 * saving(a[part], b[part]) for a, b in pairs]
            row[-1].plot(shares, "o-", color=color, markersize=3, label=part)
        finish_savings(row[-1], report, f"saved, batch {batch}")
        for axes in row:
            set_prefixes(axes, prefixes)
    figure.suptitle(f"attention kernels: {title_of(report)} (figure 2)", fontsize=11)
    return write_figure(path, figure, dpi=110)


def draw_module(report: Mapping[str, Any], module: str, path: Path) -> Path:
    """Draw a module's time, what is saved of it by cell, and what the bytes model says."""
    batches, is_measured = report["settings"]["batches"], report["measured"] is not None
    columns = 4 if is_measured else 2
    figure = Figure(figsize=(5.4 * columns, 4.2 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), columns, squeeze=False)
    for row, batch in zip(panels, batches, strict=True):
        if is_measured:
            draw_times(row[0], report, batch, module)
            draw_grid(row[2], report, batch, module, "seconds", f"measured: saved in %, and ms, batch {batch}")
        draw_savings(row[1 if is_measured else 0], report, batch, module)
        draw_grid(row[-1], report, batch, module, "bytes", f"bytes model: saved in %, batch {batch}")
    figure.suptitle(f"{TITLES[module]}: one layer, {title_of(report)}", fontsize=11)
    return write_figure(path, figure, dpi=100)


def draw_times(axes: Any, report: Mapping[str, Any], batch: int, module: str) -> None:
    """Draw the time over an output against the prefix, a color for each output, dashes for the other model."""
    cells, settings = cells_of(report, batch), report["settings"]
    for output, color in zip(settings["outputs"], itertools.cycle(COLORS), strict=False):
        for side, style in STYLES.items():
            times = [1e3 * cells[prefix, output]["seconds"][side][module] for prefix in settings["prefixes"]]
            label = f"{tokens(output)} tokens" if side == "model" else None
            axes.plot(times, style, color=color, marker="o", markersize=3, label=label)
    for side, style in STYLES.items():
        axes.plot([], [], style, color="black", label=report["names"][side])
    axes.set_yscale("log")
    axes.margins(y=0.25)  # room for the legend
    axes.set(title=f"time of the output, batch {batch}", ylabel="milliseconds of one layer")
    axes.legend(fontsize=7, ncols=4, loc="upper left")
    set_prefixes(axes, settings["prefixes"])


def draw_savings(axes: Any, report: Mapping[str, Any], batch: int, module: str) -> None:
    """Draw what is saved against the prefix for each output: measured in solid lines, by bytes in dots."""
    cells, settings, source = cells_of(report, batch), report["settings"], source_of(report)
    styles = {"bytes": ":", source: "o-"}
    for output, color in zip(settings["outputs"], itertools.cycle(COLORS), strict=False):
        for each, style in styles.items():
            shares = [100 * saved(cells[prefix, output], each, module) for prefix in settings["prefixes"]]
            label = f"{tokens(output)} tokens" if each == source else None
            axes.plot(shares, style, color=color, markersize=3, label=label)
    shares = [100 * saved(cell, each, module) for cell in cells.values() for each in styles]
    # One line far below the others would hide them.
    axes.set_ylim(max(min(shares) - 5, min(-100, max(shares) - 200)), max(*shares, 100 * report["limit"]) + 5)
    finish_savings(axes, report, f"saved, batch {batch}" + " (dots: by bytes)" * (len(styles) - 1))
    set_prefixes(axes, settings["prefixes"])


def finish_savings(axes: Any, report: Mapping[str, Any], title: str) -> None:
    """Draw the limit and the line at which both models take the same time."""
    limit = 100 * report["limit"]
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit {limit:.1f}%")
    axes.axhline(0, color="gray", linestyle="--", linewidth=1)
    axes.set(title=title, ylabel="% saved")
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def draw_grid(axes: Any, report: Mapping[str, Any], batch: int, module: str, source: str, title: str) -> None:
    """Draw what is saved in each cell: blue for less time, red for more."""
    cells, settings = cells_of(report, batch), report["settings"]
    prefixes, outputs = settings["prefixes"], settings["outputs"]
    shares = np.array(
        [[100 * saved(cells[prefix, output], source, module) for prefix in prefixes] for output in outputs]
    )
    axes.imshow(shares, cmap="RdBu", vmin=-MOST, vmax=MOST, origin="lower", aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        cell = cells[prefixes[column], outputs[row]][source]
        text = f"{share:+.1f}"
        if source == "seconds":
            gain = 1e3 * (cell["against"][module] - cell["model"][module])
            text += f"\n{gain:,.0f}" if abs(gain) >= 100 else f"\n{gain:.3g}"
        color = "white" if abs(share) > 0.6 * MOST else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(prefixes)), map(tokens, prefixes))
    axes.set_yticks(range(len(outputs)), map(tokens, outputs))
    axes.set(title=title, xlabel="prefix", ylabel="output")


def set_prefixes(axes: Any, prefixes: list[int]) -> None:
    """Label the prefixes, which are drawn at equal distances."""
    axes.set_xticks(range(len(prefixes)), map(tokens, prefixes))
    axes.set_xlabel("prefix")
    axes.grid(alpha=0.3)


def title_of(report: Mapping[str, Any]) -> str:
    """Return the models and where they were measured."""
    return f"{report['names']['model']} against {report['names']['against']}, {report['device']}"
