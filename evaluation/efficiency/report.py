"""The report of two models: savings by cell and module, tables, and the CSV file."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evaluation.efficiency.bytes_model import MODULES, LayerBytes, limit, saving
from evaluation.efficiency.measuring import KERNEL_TOKENS, KERNELS, Measured
from evaluation.results import conditions_line
from evaluation.tables import table

SIDES = ("model", "against")
SUMS = ("total", "layer")
COLUMNS = (
    "batch", "prefix", "output", "module", "model_seconds", "against_seconds", "saving", "model_share",
    "against_share", "model_bytes", "against_bytes", "bytes_saving", "bytes_saving_as_defined",
)  # fmt: skip
Cell = Mapping[str, Any]


def make_report(
    sizes: Mapping[str, LayerBytes],
    batches: Sequence[int],
    prefixes: Sequence[int],
    outputs: Sequence[int],
    measured: Measured | None,
) -> dict[str, Any]:
    """Return the cells of the grid and all that was measured besides.

    Args:
        sizes: bytes of a layer, by side.
        batches, prefixes, outputs: the grid.
        measured: None for the bytes model alone.
    """
    cells = []
    for batch in batches:
        steps = None if measured is None else measured.steps[batch]
        for output in outputs:
            for prefix in prefixes:
                place = (batch, prefix, output)
                cell: dict[str, Any] = dict(zip(("batch", "prefix", "output"), place, strict=True))
                cell["bytes"] = {side: sizes[side].of_output(*place, folded=True) for side in SIDES}
                cell["bytes_as_defined"] = {side: sizes[side].of_output(*place, folded=False) for side in SIDES}
                if steps is not None:
                    cell["seconds"] = {side: steps[side].of_output(prefix, output) for side in SIDES}
                cells.append(cell)
    return {
        "limit": limit(sizes["model"], sizes["against"]),
        "sizes": {side: asdict(sizes[side]) for side in SIDES},
        "cells": cells,
        "measured": None if measured is None else as_plain(measured),
    }


def as_plain(measured: Measured) -> dict[str, Any]:
    """Return the measurements with text for keys, as JSON has them."""
    return {
        "copy_rate": measured.copy_rate,
        "errors": measured.errors,
        "steps": {str(n): {side: asdict(each) for side, each in steps.items()} for n, steps in measured.steps.items()},
        "kernels": {
            str(n): {side: {str(prefix): dict(each) for prefix, each in found.items()} for side, found in sides.items()}
            for n, sides in measured.kernels.items()
        },
    }


def saved(cell: Cell, source: str, module: str) -> float:
    """Return what the model saves in a cell, by "seconds", "bytes" or "bytes_as_defined"."""
    return saving(cell[source]["model"][module], cell[source]["against"][module])


def source_of(report: Mapping[str, Any]) -> str:
    """Return what savings are of, first of all: "seconds", or "bytes" without measurements."""
    return next(iter(sources(report)))


def sources(report: Mapping[str, Any]) -> dict[str, str]:
    """Return what savings are of, with words for it; without measurements of bytes alone."""
    measured = {} if report["measured"] is None else {"seconds": "measured"}
    return measured | {"bytes": "by bytes", "bytes_as_defined": "by bytes as defined"}


def cells_of(report: Mapping[str, Any], batch: int) -> dict[tuple[int, int], Cell]:
    """Return the cells of a batch size, by prefix and output."""
    return {(cell["prefix"], cell["output"]): cell for cell in report["cells"] if cell["batch"] == batch}


def kernels_of(report: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
    """Return seconds of kernels by side and prefix; empty where the profiler saw none, or nothing was measured."""
    found = {} if report["measured"] is None else report["measured"]["kernels"][str(batch)]
    return found if all(found.get(side) for side in SIDES) else {}


def tokens(number: int) -> str:
    """Format a number of tokens: 2k, 64k."""
    return f"{number // 1024}k" if number % 1024 == 0 and number else str(number)


def percent(share: float) -> str:
    """Format a saving."""
    return f"{100 * share:+.1f}"


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format the tables, each with what it shows, and the conditions."""
    names, measured = report["names"], report["measured"]
    parts = [f"# Decoding: {names['model']} against {names['against']}", "", *introduction(report), ""]
    for batch in report["settings"]["batches"]:
        parts += [f"## Batch {batch}", "", *savings_table(report, batch), ""]
        if kernels_of(report, batch):
            parts += [*kernel_table(report, batch), ""]
        parts += [*module_table(report, batch), ""]
    if measured is not None:
        parts += [*ways_table(report), "", *checks(report), ""]
    return "\n".join([*parts, conditions_line(report, report["dtype"])]) + "\n"


def introduction(report: Mapping[str, Any]) -> list[str]:
    """Say what the tables have."""
    names = report["names"]
    lines = [
        "One attention layer, random weights: all layers are alike. Modules: queries (all query projections), cache "
        "(rotating and storing a token's keys and values) and attention, which reads the cache in place. Total is "
        "their sum; layer is the whole step as decoding runs it, with the key, value and output projections.",
        "",
        f"Savings are 1 - {names['model']} / {names['against']} over the whole output, in percent. The smaller cache "
        f"alone saves {100 * report['limit']:.1f}% at most. By bytes: of what a step must move. As defined: with W_q "
        "of augmented queries, which decoding folds into the two matrices after it.",
    ]
    if report["measured"] is None:
        lines += ["", "Nothing was timed, because times need a GPU: all savings are of bytes that must be moved."]
    elif not any(kernels_of(report, batch) for batch in report["settings"]["batches"]):
        lines += ["", "Kernels have no times: the profiler sees none on this machine (CUPTI)."]
    return lines


def savings_table(report: Mapping[str, Any], batch: int) -> list[str]:
    """Format the savings in total: measured, by bytes, and by bytes as defined."""
    settings, cells, source = report["settings"], cells_of(report, batch), source_of(report)
    lines = [["output \\ prefix", *map(tokens, settings["prefixes"])]]
    for output in settings["outputs"]:
        row = [cells[prefix, output] for prefix in settings["prefixes"]]
        shares = ([percent(saved(cell, each, "total")) for each in sources(report)] for cell in row)
        lines.append([tokens(output), *map(" / ".join, shares)])
    least, most = (choose(cells.values(), key=lambda cell: saved(cell, source, "total")) for choose in (min, max))
    ends = " to ".join(
        f"{percent(saved(cell, source, 'total'))} ({tokens(cell['prefix'])}/{tokens(cell['output'])})"
        for cell in (least, most)
    )
    note = f"Saved in total, {' / '.join(sources(report).values())}. From {ends}."
    return [note, "", *table(lines)]


def kernel_table(report: Mapping[str, Any], batch: int) -> list[str]:
    """Format the kernels' times by prefix."""
    names, kernels = report["names"], kernels_of(report, batch)
    parts = [*KERNELS, "both"]
    head = [f"{names[side]}, {part}" for side in reversed(SIDES) for part in parts]
    lines = [["prefix", *head, *(f"{part} saved" for part in parts)]]
    for prefix in report["settings"]["prefixes"]:
        found = {side: with_sum(kernels[side][str(prefix)]) for side in SIDES}
        times = [f"{1e6 * found[side][part]:.2f}" for side in reversed(SIDES) for part in parts]
        shares = [
            percent(saving(found["model"][part], found["against"][part])) if found["against"][part] else "-"
            for part in parts
        ]
        lines.append([tokens(prefix), *times, *shares])
    note = (
        f"Kernels: microseconds of one layer's step, means over the first {KERNEL_TOKENS} tokens after each prefix, "
        "and percent saved. Keys that are not split need no combine kernel."
    )
    return [note, "", *table(lines)]


def with_sum(kernels: Mapping[str, float]) -> dict[str, float]:
    """Return the kernels' times and their sum, `both`."""
    return dict(kernels) | {"both": sum(kernels.values())}


def module_table(report: Mapping[str, Any], batch: int) -> list[str]:
    """Format each module's time or bytes per output token, in the first and the last cell of the grid."""
    settings, cells, source = report["settings"], cells_of(report, batch), source_of(report)
    unit, scale = ("MB", 1e6) if source == "bytes" else ("us", 1e-6)
    head = [f"{report['names'][side]}, {what}" for side in SIDES for what in (unit, "%")]
    lines = [["prefix/output", "module", *head, *sources(report).values()]]
    for place in dict.fromkeys((corner(settings, 0), corner(settings, -1))):
        cell = cells[place]
        for module in (*MODULES, *SUMS):
            numbers = []
            for side in SIDES:
                found = cell[source][side]
                numbers.append(f"{found[module] / cell['output'] / scale:.2f}")
                numbers.append(f"{100 * found[module] / found['total']:.1f}" if module in MODULES else "")
            shares = (percent(saved(cell, each, module)) for each in sources(report))
            lines.append(["/".join(map(tokens, place)), module, *numbers, *shares])
    words = "megabytes" if source == "bytes" else "microseconds"
    note = f"Modules: {words} for each output token, percent of the total, and what is saved."
    return [note, "", *table(lines)]


def corner(settings: Mapping[str, Any], place: int) -> tuple[int, int]:
    """Return the first (0) or the last (-1) prefix and output."""
    return settings["prefixes"][place], settings["outputs"][place]


def ways_table(report: Mapping[str, Any]) -> list[str]:
    """Format the query projections' time by way, and the total saving with each of the model's ways."""
    settings = report["settings"]
    corners = list(dict.fromkeys((corner(settings, 0), corner(settings, -1))))
    lines = [["model", "queries", "batch", "us", *(f"saved at {'/'.join(map(tokens, place))}" for place in corners)]]
    for batch in settings["batches"]:
        steps, cells = report["measured"]["steps"][str(batch)], cells_of(report, batch)
        for side in reversed(SIDES):
            for way, seconds in steps[side]["ways"].items():
                shares = [percent(saved_by_way(cells[place], seconds)) if side == "model" else "" for place in corners]
                lines.append([report["names"][side], way, str(batch), f"{1e6 * seconds:.2f}", *shares])
    note = (
        "Microseconds of all query projections, and what the model saves in total with each way (the other model's is "
        "that of decoding, its last). Folded: W_q is part of the two matrices after it."
    )
    return ["## Query projections", "", note, "", *table(lines)]


def saved_by_way(cell: Cell, seconds: float) -> float:
    """Return the total saving of a cell in which the model's queries take `seconds` a token."""
    own = cell["seconds"]["model"]
    return saving(own["total"] - own["queries"] + cell["output"] * seconds, cell["seconds"]["against"]["total"])


def checks(report: Mapping[str, Any]) -> list[str]:
    """Format the decoded cells beside the interpolated ones, the errors, and the copy's rate."""
    measured, lines = report["measured"], [["model", "batch", "prefix/output", "decoded, ms", "interpolated, ms", "%"]]
    for batch, steps in measured["steps"].items():
        for side in SIDES:
            found = steps[side]["decoded"]
            if found is None:
                continue
            off = found["interpolated"] / found["decoded"] - 1
            times = [f"{1e3 * found[key]:.2f}" for key in ("decoded", "interpolated")]
            place = f"{tokens(found['prefix'])}/{tokens(found['output'])}"
            lines.append([report["names"][side], batch, place, *times, percent(off)])
    errors = "; ".join(
        f"{report['names'][side]}: "
        + ", ".join(f"{name} {error:.1e}" for name, error in measured["errors"][side].items())
        for side in SIDES
    )
    note = (
        "A layer's time over a whole output: really decoded, token by token, and interpolated from steps at a few "
        "lengths, as all cells are."
    )
    return [
        "## Checks", "", note, "", *table(lines), "",
        f"- relative errors against float32, the largest over batch sizes: {errors}",
        f"- a copy within the device moves {measured['copy_rate'] / 1e9:.0f} GB/s, read plus written",
    ]  # fmt: skip


def as_csv(report: Mapping[str, Any]) -> str:
    """Return a line for each cell and module; columns of what was not measured are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(report))
    return out.getvalue()


def rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the CSV file."""
    for cell in report["cells"]:
        for module in (*MODULES, *SUMS):
            row = {key: cell[key] for key in ("batch", "prefix", "output")} | {"module": module}
            row["bytes_saving"] = saved(cell, "bytes", module)
            row["bytes_saving_as_defined"] = saved(cell, "bytes_as_defined", module)
            row |= {f"{side}_bytes": cell["bytes"][side][module] for side in SIDES}
            if "seconds" in cell:
                row["saving"] = saved(cell, "seconds", module)
                for side in SIDES:
                    found = cell["seconds"][side]
                    row[f"{side}_seconds"] = found[module]
                    row[f"{side}_share"] = found[module] / found["total"] if module in MODULES else ""
            yield row


def logged_values(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for a run's wandb run: the smallest and the largest total saving of each batch size."""
    found: dict[str, float] = {}
    source = source_of(report)
    for batch in report["settings"]["batches"]:
        savings = [saved(cell, source, "total") for cell in cells_of(report, batch).values()]
        found |= {f"batch_{batch}/smallest_saving": min(savings), f"batch_{batch}/largest_saving": max(savings)}
    return found
