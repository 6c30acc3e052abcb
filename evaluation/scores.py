"""Scores of documents under several caches: means, paired differences, averages of groups, their tables and bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from evaluation.tables import difference, shown, table
from evaluation.uncertainty import Estimate, JsonEstimate, differences_to_first, is_decided, mean, mean_of_means

Scores = Mapping[str, Mapping[str, Sequence[float]]]
Estimates = Mapping[str, Mapping[str, Mapping[str, JsonEstimate]]]


def compared(scores: Scores) -> Estimates:
    """Return means by task and cache, and paired differences to the first cache.

    Args:
        scores: by task and cache the scores of the same documents, from 0 to 1.

    Returns:
        `score` and `difference`: by task and cache (the first has no difference) `value` and `standard_error`.
    """
    return {
        "score": {
            task: {cache: mean(values).as_json() for cache, values in caches.items()} for task, caches in scores.items()
        },
        "difference": {task: differences_to_first(caches) for task, caches in scores.items()},
    }


def averaged(found: Estimates, groups: Mapping[str, Sequence[str]]) -> Estimates:
    """Return the same for groups of tasks: the unweighted means of their tasks, of those that were measured."""
    there = {group: [task for task in tasks if task in found["score"]] for group, tasks in groups.items()}
    return {
        part: {
            group: {
                cache: mean_of_means([Estimate(**by_task[task][cache]) for task in tasks]).as_json()
                for cache in by_task[tasks[0]]
            }
            for group, tasks in there.items()
            if tasks
        }
        for part, by_task in found.items()
    }


def rows(found: Estimates, title: str) -> list[str]:
    """Format a row for each task and a column for each cache, in percent, with differences to the first in points."""
    caches = list(next(iter(found["score"].values())))
    lines = [[title, *caches]]
    for task, by_cache in found["score"].items():
        cells = [shown(by_cache[cache]["value"], by_cache[cache]["standard_error"], share=True) for cache in caches]
        against = ["", *(f" ({points(found['difference'][task][cache])})" for cache in caches[1:])]
        lines.append([task, *(cell + more for cell, more in zip(cells, against, strict=True))])
    return table(lines)


def columns(found: Estimates) -> list[str]:
    """Format a row for each cache and a column for each task, in percent."""
    caches = list(next(iter(found["score"].values())))
    lines = [["cache", *found["score"]]]
    lines += [[cache, *(f"{100 * row[cache]['value']:.2f}" for row in found["score"].values())] for cache in caches]
    return table(lines)


def points(found: JsonEstimate) -> str:
    """Format a difference of shares in percent points."""
    error = found["standard_error"]
    hundred = Estimate(100 * found["value"], None if error is None else 100 * error)
    return difference(hundred, is_decided(hundred))


def logged(found: Estimates) -> dict[str, float]:
    """Return the values for the run's log."""
    return {f"{task}/{cache}": each["value"] for task, row in found["score"].items() for cache, each in row.items()}


def draw_bars(found: Estimates, title: str, path: Path) -> Path:
    """Draw a group of bars for each task, a bar for each cache, with standard errors."""
    tasks, caches = list(found["score"]), list(next(iter(found["score"].values())))
    figure = Figure(figsize=(2.5 + 0.35 * len(tasks) * (len(caches) + 1), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(caches)
    for number, cache in enumerate(caches):
        each = [found["score"][task][cache] for task in tasks]
        places = [place + (number - (len(caches) - 1) / 2) * width for place in range(len(tasks))]
        heights = [100 * row["value"] for row in each]
        errors = [100 * (row["standard_error"] or 0) for row in each]
        axes.bar(places, heights, width, yerr=errors, capsize=2, label=cache)
    axes.set_xticks(range(len(tasks)), tasks, fontsize=8, rotation=30 if len(tasks) > 3 else 0, ha="center")
    axes.set_ylabel("percent, ± standard error")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return write_figure(path, figure)
