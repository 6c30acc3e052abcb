"""Perplexities by cache and position, paired differences, the table and the picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.perplexity_by_position.scoring import buckets, curve_ranges
from evaluation.results import conditions_line
from evaluation.tables import UNDECIDED, difference, table
from evaluation.uncertainty import Estimate, JsonEstimate, differences_to_first, is_decided, mean

FEW = 10  # sequences, below which a standard error is itself rough


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]], length: int) -> dict[str, Any]:
    """Return means over sequences, and paired differences to the first cache, from each sequence's mean losses.

    Returns:
        `loss` and `difference` (nats per token, of all tokens), `bits` (of an element at a sequence's end), and
        `buckets` and `curve`: lists over ranges of tokens before, each with `from`, `to` (not included) and the same by
        cache.
    """
    parts = {"buckets": buckets(length), "curve": curve_ranges(length)}
    whole = {cache: whole_losses(rows, length) for cache, rows in found.items()}
    said: dict[str, Any] = against_first(whole)
    said["bits"] = {cache: math.fsum(row["bits"] for row in rows) / len(rows) for cache, rows in found.items()}
    for part, ranges in parts.items():
        said[part] = [
            {"from": start, "to": stop}
            | against_first({cache: [row[part][place] for row in rows] for cache, rows in found.items()})
            for place, (start, stop) in enumerate(ranges)
        ]
    return said


def whole_losses(rows: Sequence[Mapping[str, Any]], length: int) -> list[float]:
    """Return each sequence's mean loss over all its tokens, from its means in buckets."""
    sizes = [stop - start for start, stop in buckets(length)]
    return [math.fsum(n * loss for n, loss in zip(sizes, row["buckets"], strict=True)) / (length - 1) for row in rows]


def against_first(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, JsonEstimate]]:
    """Return `loss` by cache, and `difference` by cache but the first."""
    return {
        "loss": {cache: mean(values).as_json() for cache, values in losses.items()},
        "difference": differences_to_first(losses),
    }


def perplexity(loss: JsonEstimate) -> Estimate:
    """Return exp of a mean loss, and its standard error to first order."""
    value, error = math.exp(loss["value"]), loss["standard_error"]
    return Estimate(value, None if error is None else value * error)


def logged(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for the run's log."""
    return {cache: perplexity(loss).value for cache, loss in report["loss"].items()}


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format perplexity by cache, then by position, then the conditions."""
    first, *others = report["loss"]
    lines = [["cache", "bits an element", "perplexity ± standard error", f"loss against {first}, nats a token"]]
    lines += [
        [cache, f"{report['bits'][cache]:.2f}", shown(report["loss"][cache]), against(report, cache)]
        for cache in report["loss"]
    ]
    by_position = [["tokens before", *report["loss"]]]
    for row in report["buckets"]:
        cells = [shown(row["loss"][first])]
        cells += [f"{shown(row['loss'][cache])} ({against(row, cache)})" for cache in others]
        by_position.append([f"{row['from']:,} to {row['to'] - 1:,}", *cells])
    notes = [
        f"- {report['text']}: {report['sequences']:,} sequences of {report['length']:,} tokens, read "
        f"{report['chunk']} at a time",
        f"- bits an element: of keys and values at a sequence's end, metadata and tokens in {report['dtype']} counted",
        "- standard errors over sequences; differences are paired by sequence",
        conditions_line(report, report["dtype"]),
    ]
    if report["sequences"] < FEW:
        notes.insert(1, f"- **{report['sequences']} sequences: too few for standard errors that can be relied on**")
    if others:
        notes.insert(-2, f"- {UNDECIDED}")
    return "\n".join([f"# {report['checkpoint']}", "", *table(lines), "", *table(by_position), "", *notes]) + "\n"


def shown(loss: JsonEstimate) -> str:
    value, error = perplexity(loss)
    return f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


def against(row: Mapping[str, Any], cache: str) -> str:
    """Format a cache's difference to the first."""
    found = row["difference"].get(cache)
    return "" if found is None else difference(Estimate(**found), is_decided(Estimate(**found)))


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw perplexity along the sequence, and the difference to the first cache with its standard error."""
    first, *others = report["loss"]
    figure = Figure(figsize=(10 if others else 5.5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if others else 1, squeeze=False)[0]
    middles = [(row["from"] + row["to"] - 1) / 2 for row in report["curve"]]
    for number, cache in enumerate(report["loss"]):
        color = f"C{number}"
        heights = [perplexity(row["loss"][cache]).value for row in report["curve"]]
        axes[0].plot(middles, heights, color=color, lw=1.2, label=f"{cache}: {shown(report['loss'][cache])}")
        if cache == first:
            continue
        found = [Estimate(**row["difference"][cache]) for row in report["curve"]]
        axes[1].plot(middles, [each.value for each in found], color=color, lw=1.2, label=cache)
        low, high = ([each.value + sign * (each.standard_error or 0) for each in found] for sign in (-1, 1))
        axes[1].fill_between(middles, low, high, color=color, alpha=0.2, lw=0)
    axes[0].set_ylabel("perplexity")
    axes[0].set_yscale("log")
    if others:
        axes[1].axhline(0, color="black", lw=0.6)
        axes[1].set_ylabel(f"loss against {first}, nats a token, ± standard error")
    for each in axes:
        each.set_xlabel("tokens before")
        each.grid(alpha=0.3)
        each.legend(fontsize=7)
    figure.suptitle(str(report["checkpoint"]), fontsize=9, wrap=True)
    return write_figure(path, figure)
