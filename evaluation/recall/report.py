"""Shares of right answers by cache, depth and length, the table and the heat maps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation import scores
from evaluation.results import conditions_line
from evaluation.tables import UNDECIDED, table

Found = Mapping[tuple[str, int, float], Sequence[bool]]


def compared(found: Mapping[str, Found], kinds: Sequence[str]) -> dict[str, Any]:
    """Return shares of right answers from those of each question, by cache.

    Returns:
        `score` and `difference` of each kind over all questions (`evaluation.scores.compared`), and `cells`: kind,
        cache, length, depth and share.
    """
    flat = {
        kind: {
            cache: [float(right) for (of, *_), cell in cells.items() if of == kind for right in cell]
            for cache, cells in found.items()
        }
        for kind in kinds
    }
    cells = [
        {"kind": kind, "cache": cache, "length": length, "depth": depth, "share": sum(cell) / len(cell)}
        for cache, each in found.items()
        for (kind, length, depth), cell in each.items()
    ]
    return {**scores.compared(flat), "cells": cells}


def grid(report: Mapping[str, Any], kind: str, cache: str) -> list[list[float]]:
    """Return the shares of a kind and cache, a row for each depth and a column for each length."""
    shares = {
        (cell["depth"], cell["length"]): cell["share"]
        for cell in report["cells"]
        if (cell["kind"], cell["cache"]) == (kind, cache)
    }
    settings = report["settings"]
    return [[shares[depth, length] for length in settings["lengths"]] for depth in settings["depths"]]


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format the shares over all questions, then by depth and length, in percent."""
    settings, caches = report["settings"], list(report["caches"])
    parts = [f"# {report['checkpoint']}", "", *scores.rows(report, "kind"), ""]
    for kind in settings["kinds"]:
        header = ["cache", "depth", *(f"{length:,} tokens" for length in settings["lengths"])]
        rows = [
            [cache, f"{depth:g}", *(f"{100 * share:.0f}" for share in shares)]
            for cache in caches
            for depth, shares in zip(settings["depths"], grid(report, kind, cache), strict=True)
        ]
        parts += [f"## {kind}", "", *table([header, *rows]), ""]
    return "\n".join([*parts, *notes(report)]) + "\n"


def notes(report: Mapping[str, Any]) -> list[str]:
    """List the conditions of the shares."""
    settings = report["settings"]
    text = "generated sentences" if settings["text"] is None else settings["text"]
    lines = [
        f"- percent of answers that are right digit for digit; {settings['samples']} for each depth and length",
        f"- needles: {settings['keys']} in {text}; seed {settings['seed']}; prompts read {settings['chunk']} at a time",
    ]
    if len(report["caches"]) > 1:
        lines.append(f"- differences in points, paired by question. {UNDECIDED}")
    context = report["context"]
    if context is not None and max(settings["lengths"]) > context:
        lines.append(f"- **lengths above {context:,} tokens are beyond the context in the model's configuration**")
    return [*lines, conditions_line(report, report["dtype"])]


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw a heat map for each kind and cache: depth from top to bottom, length from left to right."""
    settings, caches = report["settings"], list(report["caches"])
    kinds = settings["kinds"]
    size = (1.2 + 2.4 * len(caches), 0.8 + 2.4 * len(kinds))
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(len(kinds), len(caches), squeeze=False, sharex=True, sharey=True)
    for row, kind in zip(every, kinds, strict=True):
        for axes, cache in zip(row, caches, strict=True):
            shares = grid(report, kind, cache)
            image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
            for y, line in enumerate(shares):
                for x, share in enumerate(line):
                    axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7)
            axes.set_xticks(range(len(settings["lengths"])), [f"{n:,}" for n in settings["lengths"]], fontsize=7)
            axes.set_yticks(range(len(settings["depths"])), [f"{d:g}" for d in settings["depths"]], fontsize=7)
            axes.set_title(f"{cache}: {100 * report['score'][kind][cache]['value']:.1f}", fontsize=8)
        row[0].set_ylabel(f"{kind}: depth", fontsize=8)
    figure.supxlabel("tokens", fontsize=8)
    figure.suptitle(str(report["checkpoint"]), fontsize=9, wrap=True)
    figure.colorbar(image, ax=every, shrink=0.8, label="share of right answers")
    return write_figure(path, figure)
