"""The table and the figure of an evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.harness.published import METRICS, ROWS, TITLES
from evaluation.results import conditions_line
from evaluation.tables import shown, table

OURS, MARKS = "#4c72b0", ("#c44e52", "#dd8452", "#55a868", "#8172b3", "#937860")
MARKED = [row for row in ROWS if row.model.startswith("Liger-GLA")]  # in the figure


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of the documents, shown in percent."""
    return metric.startswith(("acc", "exact_match"))


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format this checkpoint above the paper's table, then the other tasks, then notes."""
    tasks = report["tasks"]
    parts = [f"# {report['checkpoint']}", ""]
    if any(task in tasks for task in METRICS):
        parts += [*paper_table(report), ""]
    others = {name: row for name, row in tasks.items() if name not in METRICS}
    if others:
        lines = [
            [name, row["metric"], shown(row["value"], row["standard_error"], is_share(row["metric"])),
             str(row["num_fewshot"]), f"{row['documents']:,}"]
            for name, row in others.items()
        ]  # fmt: skip
        parts += [*table([["task", "metric", "value ± standard error", "examples", "documents"], *lines]), ""]
    return "\n".join([*parts, *notes(report)]) + "\n"


def paper_table(report: Mapping[str, Any]) -> list[str]:
    """Format the suite's six tasks and two averages, in percent: this checkpoint, then the paper's models."""
    titles = [f"{TITLES[task]} {metric}" for task, metric in METRICS.items()]
    tasks, means = report["tasks"], report["averages"]
    cells = [tasks.get(task) for task in METRICS] + [means.get("average"), means.get("average_without_mmlu")]
    ours = [shown(cell and cell["value"], cell and cell["standard_error"], True) for cell in cells]
    published = [
        [row.model, *(f"{value:.1f}" for value in (*row.values, row.average, row.average_without_mmlu))] for row in ROWS
    ]
    header = ["model", *titles, "average", "without MMLU"]
    note = (
        "Percent. Below the first line: arXiv 2503.01496, tables 2, 3, 8 and 9, where MMLU is with 5 examples and the "
        "others with none."
    )
    return [*table([header, ["**this checkpoint**", *ours], *published]), "", note]


def notes(report: Mapping[str, Any]) -> list[str]:
    """List the conditions of the values and their caveats."""
    settings, records = report["settings"], report["subtasks"]
    one = next(iter(records.values()))  # the model's fields are the same in all records
    examples = ", ".join(f"{name} {row['num_fewshot']}" for name, row in report["tasks"].items())
    lines = [f"- examples before each question: {examples}"]
    if settings["limit"] is not None:
        lines.append(f"- **only the first {settings['limit']} documents of each task** (benchmark.limit)")
    cut = sum(record["cut_requests"] for record in records.values())
    if cut:
        lines.append(f"- {cut:,} requests were longer than {one['max_length']:,} tokens and lost their beginning")
    most = max(record["repeated"]["largest_difference"] for record in records.values())
    again = sum(record["repeated"]["requests"] for record in records.values())
    lines.append(f"- {again} requests put again, each alone: log-likelihoods differ by {most:.2g} at most")
    return [*lines, conditions_line(report, one["dtype"])]


def draw(report: Mapping[str, Any], path: Path) -> Path | None:
    """Draw bars with standard errors for the share metrics, with the paper's Liger models as marks; None if empty."""
    shares = {name: row for name, row in report["tasks"].items() if is_share(row["metric"])}
    if not shares:
        return None
    names = [name for name in METRICS if name in shares] + [name for name in shares if name not in METRICS]
    figure = Figure(figsize=(2.5 + 0.9 * max(len(names), 3), 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(names))
    heights = [100 * shares[name]["value"] for name in names]
    errors = [100 * (shares[name]["standard_error"] or 0) for name in names]
    axes.bar(places, heights, 0.6, yerr=errors, capsize=3, color=OURS, label="this checkpoint, ± standard error")
    for row, color in zip(MARKED, MARKS, strict=True):
        known = [(place, row.values[list(METRICS).index(name)]) for place, name in enumerate(names) if name in METRICS]
        if known:
            at, values = zip(*known, strict=True)
            axes.scatter(at, values, marker="_", s=320, color=color, zorder=3, label=row.model)
    titles = [f"{TITLES.get(name, name)}\n{shares[name]['metric']}" for name in names]
    axes.set_xticks(places, titles, fontsize=8)
    axes.set_ylabel("percent")
    axes.set_ylim(0, 100)
    axes.set_title(str(report["checkpoint"]), fontsize=9, wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return write_figure(path, figure)
