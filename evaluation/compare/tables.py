"""The tables of a comparison, as they are shown in the page, in Markdown and in CSV."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.quantities import count
from evaluation import tables
from evaluation.compare.comparison import OTHER_TEXT, Comparison
from evaluation.compare.groups import Group, text_of
from evaluation.compare.lines import Plot, hours_unit
from evaluation.compare.reading import BITS, EVALUATED, FINISHED, NATS, UNFINISHED, Run
from evaluation.uncertainty import Estimate, is_decided, mean

MOST_PLACES = 8  # columns of the table below a figure


@dataclass(frozen=True)
class Cell:
    """A cell. link: an address. number: of the group whose color stands before the text."""

    text: str
    link: str | None = None
    number: int | None = None


@dataclass(frozen=True)
class Table:
    """A table; the cells of the first column are the headers of their rows."""

    caption: str
    header: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.header, *([linked(cell) for cell in row] for row in self.rows)]
        return (
            "\n".join(tables.table([[" ".join(text.replace("|", "\\|").split()) for text in line] for line in lines]))
            + "\n"
        )


def linked(cell: Cell) -> str:
    """Return a cell's text in Markdown, with its link."""
    return cell.text if cell.link is None else f"[{cell.text}]({cell.link})"


def main_table(comparison: Comparison) -> Table:
    """Return a row for each group: its settings, final loss, difference to the baseline."""
    trained = [group for group in comparison.groups if group.runs[0].state != EVALUATED]
    in_nats = comparison.unit == NATS
    losses, further = [NATS] * in_nats + [BITS], ["teacher_loss"] * in_nats + ["recovery"]
    further = [key for key in further if any(key in run.summary for group in trained for run in group.runs)]
    header = ["", *(key.rstrip("=") for key in comparison.columns)]
    header += [*(f"held-out loss, {unit}" for unit in losses), f"minus baseline, {comparison.unit}", "noise", "verdict"]
    header += ["by", "seeds", "tokens", "parameters", hours_unit(comparison), *further]
    rows = []
    for number, group in enumerate(comparison.groups):
        if group not in trained:
            continue
        cells = [*group.columns.values(), *(loss_cell(group, unit) for unit in losses)]
        cells += [*difference_cells(comparison, group), seeds_cell(group), count(max(run.tokens for run in group.runs))]
        cells += [parameters_cell(group), hours_cell(group)]
        cells += [mean_cell([run.summary[key] for run in group.finished if key in run.summary]) for key in further]
        rows.append([Cell(str(number + 1), number=number), *map(Cell, cells)])
    return Table("Settings, the lowest held-out loss first", header, rows)


def seeds_cell(group: Group) -> str:
    """Return the seeds, and the state of those that have not finished."""
    return ", ".join(f"{run.seed}" + ("" if run.state == FINISHED else f" ({run.state})") for run in group.runs)


def parameters_cell(group: Group) -> str:
    found = dict.fromkeys(run.summary["parameters"] for run in group.finished if "parameters" in run.summary)
    return ", ".join(map(count, found))


def loss_cell(group: Group, unit: str) -> str:
    """Return the mean of the final losses with its standard error; of an unfinished group the last validation's."""
    values = list(group.sample(unit).values.values())
    if values:
        return mean_cell(values)
    last = [next(reversed(run.curves.held_out.values())) for run in group.runs if run.curves.held_out]
    return f"so far {mean_cell(last)}" if last and unit == NATS else ""


def mean_cell(values: Sequence[float]) -> str:
    """Return a mean with its standard error, if there are several values."""
    if not values:
        return ""
    found = mean(values)
    return f"{found.value:.4f}" + ("" if found.standard_error is None else f" ± {found.standard_error:.4f}")


def difference_cells(comparison: Comparison, group: Group) -> list[str]:
    """Return the difference to the baseline, its noise, the verdict, and what the noise was taken from."""
    found = comparison.differences.get(group.name)
    if group is comparison.baseline:
        return ["", "", "baseline", ""]
    if found is None:
        both = group.finished and comparison.baseline is not None and comparison.baseline.finished
        return ["", "", OTHER_TEXT if both else UNFINISHED, ""]
    margin = "unknown" if found.margin is None else f"{found.margin:.4f}"
    return [f"{found.value:+.4f}", margin, found.verdict, found.how]


def hours_cell(group: Group) -> str:
    """Return the mean of the hours of training times GPUs."""
    found = [run.hours for run in group.runs if run.hours is not None]
    return f"{sum(found) / len(found):.3g}" if found else ""


def results_table(comparison: Comparison) -> Table | None:
    """Return a row for each group that `job=evaluate` measured, and a column for each value; None without one."""
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.results.values))
    if comparison.unit == BITS:
        names = [name for name in names if not name.startswith("perplexity of ")]
    if not names:
        return None
    shares = {name for run in comparison.runs for name in run.results.shares}
    base, rows = comparison.baseline, []
    for number, group in enumerate(comparison.groups):
        values = {name: group.value(name) for name in names}
        if any(values.values()):
            others = {name: base.value(name) if base is not None and base is not group else None for name in names}
            cells = [value_cell(values[name], others[name], name in shares) for name in names]
            rows.append([Cell(group.name, number=number), *map(Cell, cells)])
    return Table("Results of job=evaluate; shares in percent", ["", *names], rows)


def value_cell(found: Estimate | None, base: Estimate | None, share: bool) -> str:
    """Return a value with its standard error, and its difference to the baseline's where both errors are known."""
    if found is None:
        return ""
    text = tables.shown(*found, share=share)
    if base is None or found.standard_error is None or base.standard_error is None:
        return text
    scale = 100 if share else 1
    error = scale * math.hypot(found.standard_error, base.standard_error)
    apart = Estimate(scale * (found.value - base.value), error)
    return f"{text} ({tables.difference(apart, is_decided(apart))})"


def settings_table(comparison: Comparison) -> Table | None:
    """Return a row for each setting in which the groups differ and that the main table leaves out; None without one."""
    left_out = [key for key in comparison.differing if key not in comparison.columns]
    groups = [group for group in comparison.groups if group.runs[0].state != EVALUATED]
    if not left_out:
        return None
    rows = [[Cell(key.rstrip("=")), *(Cell(text_of(group.runs[0], key)) for group in groups)] for key in left_out]
    header = ["setting", *(str(comparison.groups.index(group) + 1) for group in groups)]
    return Table("Other settings that differ, by the number of the row above", header, rows)


def runs_table(comparison: Comparison) -> Table:
    """Return a row for each run: where it is, what it ran on, and its page at wandb."""
    rows = []
    for number, group in enumerate(comparison.groups):
        for run in group.runs:
            loss = run.loss(comparison.unit)
            cells = ["" if run.state == EVALUATED else str(run.seed), run.state]
            cells += [count(run.tokens) if run.tokens else "", "" if loss is None else f"{loss:.4f}"]
            cells += ["" if run.hours is None else f"{run.hours:.3g}", run.devices]
            cells.append((run.summary.get("commit") or "")[:10])
            rows.append([Cell(str(run.folder), number=number), *map(Cell, cells), wandb_cell(run)])
    header = ["folder", "seed", "state", "tokens", comparison.unit, hours_unit(comparison), "on", "commit", "wandb"]
    return Table("Runs", header, rows)


def wandb_cell(run: Run) -> Cell:
    """Return the link to the run's page at wandb, or its id where the page is not known."""
    is_address = run.wandb_url is not None and run.wandb_url.startswith(("http://", "https://"))
    return Cell(run.wandb_id or "", run.wandb_url if is_address else None)


def plot_table(plot: Plot) -> Table:
    """Return the numbers of a plot at a few places, for those who cannot see it."""
    places = np.unique(np.concatenate([line.x for line in plot.lines]))
    chosen = places[np.unique(np.linspace(0, len(places) - 1, MOST_PLACES).round().astype(int))]
    rows = []
    for line in plot.lines:
        inside = [line.x[0] <= place <= line.x[-1] for place in chosen]
        values = np.interp(chosen, line.x, line.y)
        cells = [f"{value:.4g}" if there else "" for value, there in zip(values, inside, strict=True)]
        rows.append([Cell(line.name, number=line.number), *map(Cell, cells)])
    return Table(f"{plot.title}: numbers", [plot.x_label, *(f"{place:.4g}" for place in chosen)], rows)


def as_csv(comparison: Comparison) -> str:
    """Return a line for each run: every setting that differs, the final numbers, the results of `job=evaluate`."""
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.results.values))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    differing = comparison.differing
    fixed = ["tokens", "parameters", "validation_loss", "bits_per_byte", "gpu_hours", "devices", "commit", "wandb"]
    writer.writerow(["folder", "group", "seed", "state", *(key.rstrip("=") for key in differing), *fixed, *names])
    for group in comparison.groups:
        for run in group.runs:
            writer.writerow([*csv_cells(run, group.name, differing), *values_of(run, names)])
    return out.getvalue()


def csv_cells(run: Run, group: str, differing: Sequence[str]) -> Iterator[object]:
    """Yield the cells of a run up to its results."""
    yield from (run.folder, group, run.settings.get("seed"), run.state)
    yield from (text_of(run, key) for key in differing)
    yield int(run.tokens)
    yield from (run.summary.get(key) for key in ("parameters", "validation_loss", "bits_per_byte"))
    yield from (run.hours, run.devices, run.summary.get("commit"), run.wandb_url or run.wandb_id)


def values_of(run: Run, names: Sequence[str]) -> Iterator[float | None]:
    """Yield a run's results; None for those that it does not have."""
    yield from (run.results.values[name].value if name in run.results.values else None for name in names)
