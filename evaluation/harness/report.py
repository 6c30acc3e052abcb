"""The table and the figure of an evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.harness.published import NO_SUITE, SUITES, PublishedSuite
from evaluation.results import conditions_line
from evaluation.tables import shown, table

OURS, MARKS = "#4c72b0", ("#c44e52", "#dd8452", "#55a868", "#8172b3", "#937860")


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of the documents, shown in percent."""
    return metric.startswith(("acc", "exact_match", "pass"))


def published_of(report: Mapping[str, Any]) -> PublishedSuite:
    """Return the suite that a report is compared with."""
    return SUITES.get(report["settings"]["published"], NO_SUITE)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format this checkpoint above the paper's table, then the other tasks, then notes."""
    tasks, published = report["tasks"], published_of(report)
    parts = [f"# {report['checkpoint']}", ""]
    if any(task in tasks for task in published.columns):
        parts += [*paper_table(report, published), ""]
    others = {name: row for name, row in tasks.items() if name not in published.columns}
    if others:
        lines = [
            [name, row["metric"], shown(row["value"], row["standard_error"], is_share(row["metric"])),
             str(row["num_fewshot"]), f"{row['documents']:,}"]
            for name, row in others.items()
        ]  # fmt: skip
        parts += [*table([["task", "metric", "value ± standard error", "examples", "documents"], *lines]), ""]
    return "\n".join([*parts, *notes(report)]) + "\n"


def paper_table(report: Mapping[str, Any], published: PublishedSuite) -> list[str]:
    """Format the suite's tasks and averages, in percent: this checkpoint, then the paper's models."""
    tasks, means = report["tasks"], report["averages"]
    titles = [f"{title} {metric.partition(',')[0]}" for title, metric in published.columns.values()]
    cells = [tasks.get(task) for task in published.columns] + [means.get(name) for name in published.means]
    ours = [shown(cell and cell["value"], cell and cell["standard_error"], True) for cell in cells]
    below = [
        [row.model, *("-" if value is None else f"{value:.1f}" for value in (*row.values, *row.means))]
        for row in published.rows
    ]
    header = ["model", *titles, *(title for title, _ in published.means.values())]
    return [
        *table([header, ["**this checkpoint**", *ours], *below]),
        "",
        f"Percent. Below the first line: {published.note}",
    ]


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
    """Draw bars with standard errors for the share metrics, with some of the paper's models as marks; None if empty."""
    published = published_of(report)
    shares = {name: row for name, row in report["tasks"].items() if is_share(row["metric"])}
    if not shares:
        return None
    columns = list(published.columns)
    names = [name for name in columns if name in shares] + [name for name in shares if name not in columns]
    figure = Figure(figsize=(2.5 + 0.9 * max(len(names), 3), 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(names))
    heights = [100 * shares[name]["value"] for name in names]
    errors = [100 * (shares[name]["standard_error"] or 0) for name in names]
    axes.bar(places, heights, 0.6, yerr=errors, capsize=3, color=OURS, label="this checkpoint, ± standard error")
    marked = [row for row in published.rows if row.model in published.marked]
    for row, color in zip(marked, MARKS, strict=False):
        values = dict(zip(columns, row.values, strict=True))
        known = [(place, values[name]) for place, name in enumerate(names) if values.get(name) is not None]
        if known:
            at, scores = zip(*known, strict=True)
            axes.scatter(at, scores, marker="_", s=320, color=color, zorder=3, label=row.model)
    titles = [f"{title_of(name, published)}\n{shares[name]['metric'].partition(',')[0]}" for name in names]
    axes.set_xticks(places, titles, fontsize=8)
    axes.set_ylabel("percent")
    axes.set_ylim(0, 100)
    axes.set_title(str(report["checkpoint"]), fontsize=9, wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return write_figure(path, figure)


def title_of(task: str, published: PublishedSuite) -> str:
    """Return the paper's title of a task, or its name."""
    return published.columns[task].title if task in published.columns else task
