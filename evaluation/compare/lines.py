"""The curves that are drawn and listed: means over seeds, by tokens, GPU hours, position and length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.compare.comparison import Comparison
from evaluation.compare.groups import Group
from evaluation.compare.metrics import Points
from evaluation.compare.reading import BITS, EVALUATED, Run
from lit_modules.loggers.figures import moving_average

MOST_POINTS = 300  # of a line
WINDOW = 101  # tokens of the moving average over positions, as in a run's own picture
FEWEST_TOKENS = 32  # at a position, below which its loss is noise


@dataclass(frozen=True)
class Line:
    """A group's curve. number: its place in the table, which decides its color. error: None for a single seed."""

    number: int
    name: str
    x: np.ndarray
    y: np.ndarray
    error: np.ndarray | None


@dataclass(frozen=True)
class Plot:
    """Curves of all groups in one picture.

    Attributes:
        key: of the file's name.
        are_shares: whether y goes from 0 to 1, and not as far as the later part of the curves.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    caption: str
    are_shares: bool = False


def plots(comparison: Comparison) -> Iterator[Plot]:
    """Yield the plots that have a line."""
    unit = comparison.unit
    loss = f"loss ({unit})"
    band = "The band is one standard error over seeds."
    held_out = "Held-out loss at each validation, of the part of the held-out text that validations read."
    minutes = all((run.hours or 0.0) < 1 for run in comparison.runs)
    time = time_label(comparison, minutes)
    where = "bytes of context (tokens times the mean bytes of a token)" if unit == BITS else "tokens of context"
    all_plots = [
        Plot("held_out", "Held-out loss against tokens", "tokens trained", loss, lines_of(comparison, held_out_points),
             f"{held_out} {band}"),
        Plot("hours", "Held-out loss against GPU time", time, loss, lines_by_hours(comparison, minutes),
             f"{held_out} Time of training alone, times GPUs: validations and checkpoints are left out. {band}"),
        Plot("training", "Training loss against tokens", "tokens trained", loss, lines_of(comparison, training_points),
             f"Means between two lines of the log, thinned. {band}"),
        Plot("position", "Held-out loss by position", where, loss, lines_by_position(comparison),
             f"Of the last validation, averaged over {WINDOW} positions. {band}"),
        *recall_plots(comparison),
    ]  # fmt: skip
    yield from (plot for plot in all_plots if plot.lines)


def held_out_points(run: Run) -> Points:
    return run.curves.held_out


def training_points(run: Run) -> Points:
    return run.curves.train


def lines_of(comparison: Comparison, points_of: Callable[[Run], Points]) -> list[Line]:
    """Return a line for each group with points, by tokens."""
    found = []
    for number, group in enumerate(comparison.groups):
        drawn = drawable(group, points_of, comparison.unit)
        if drawn:
            curve = mean_curve([points for points, _ in drawn], [factor for _, factor in drawn])
            found.append(thinned(Line(number, group.name, *curve)))
    return found


def drawable(group: Group, points_of: Callable[[Run], Points], unit: str) -> list[tuple[Points, float]]:
    """Return the points of each seed that has some, and the factor to the unit; none where that is not known."""
    runs = [run for run in group.runs if run.state != EVALUATED]
    return [(points, factor) for run in runs if (points := points_of(run)) and (factor := run.scale[unit]) is not None]


def lines_by_hours(comparison: Comparison, minutes: bool) -> list[Line]:
    """Return the held-out losses by GPU time: at equal tokens, the mean time and the mean loss of a group's seeds."""
    found = []
    for line in lines_of(comparison, held_out_points):
        runs = [run for run in comparison.groups[line.number].runs if run.curves.hours]
        if runs:
            times = [{0.0: 0.0} | run.curves.hours for run in runs]
            _, hours, _ = mean_curve(times, [60.0 if minutes else 1.0] * len(runs), line.x)
            known = ~np.isnan(hours)
            error = None if line.error is None else line.error[known]
            found.append(Line(line.number, line.name, hours[known], line.y[known], error))
    return found


def time_label(comparison: Comparison, minutes: bool) -> str:
    """Return the label of the axis of time, with the machines."""
    unit = hours_unit(comparison).replace("hours", "minutes" if minutes else "hours")
    machines = dict.fromkeys(run.devices for run in comparison.runs if run.devices)
    return f"{unit} ({'; '.join(machines)})" if machines else unit


def hours_unit(comparison: Comparison) -> str:
    """Return what hours of training are: of GPUs, or of a machine where there is none."""
    machines = [run.devices for run in comparison.runs if run.devices]
    return "hours" if machines and all("CPU" in machine for machine in machines) else "GPU hours"


def lines_by_position(comparison: Comparison) -> list[Line]:
    """Return the smoothed losses by tokens of context; by bytes where tokenizers differ."""

    def points_of(run: Run) -> Points:
        rows = [row for row in run.positions if row[2] >= FEWEST_TOKENS] or run.positions
        if not rows:
            return {}
        places, losses, tokens = (np.array(column) for column in zip(*rows, strict=True))
        size = (run.bytes_per_token or np.nan) if comparison.unit == BITS else 1.0
        return dict(zip(places * size, moving_average(losses, tokens, WINDOW), strict=True))

    return lines_of(comparison, points_of)


def recall_plots(comparison: Comparison) -> Iterator[Plot]:
    """Yield a plot for each kind of question."""
    kinds = dict.fromkeys(kind for run in comparison.runs for kind in run.results.recall)
    for kind in kinds:
        found = []
        for number, group in enumerate(comparison.groups):
            points: list[Points] = [run.results.recall[kind] for run in group.runs if kind in run.results.recall]
            if points:
                found.append(Line(number, group.name, *mean_curve(points, [1.0] * len(points))))
        caption = "Share of facts that are repeated digit for digit, over all depths, with the first cache."
        yield Plot(
            f"recall_{kind}", f"Recall: {kind}", "tokens of the prompt", "right", found, caption, are_shares=True
        )


def mean_curve(
    curves: Sequence[Points], factors: Sequence[float], places: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return places, means and standard errors of several seeds' curves; no errors for a single seed.

    Between its points a curve is a line, outside it is NaN. Where some seeds have not come as far, the mean is over the
    others.

    Args:
        factors: of each curve's values.
        places: where to evaluate; None: at all points of all curves.
    """
    if places is None:
        places = np.array(sorted({place for points in curves for place in points}))
    rows = np.full((len(curves), len(places)), np.nan)
    for row, points, factor in zip(rows, curves, factors, strict=True):
        own = np.array(list(points))
        inside = (places >= own[0]) & (places <= own[-1])
        row[inside] = factor * np.interp(places[inside], own, np.array(list(points.values())))
    known = ~np.isnan(rows)
    number = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.nansum(rows, axis=0) / number
        squares = np.nansum((rows - means) ** 2, axis=0)
        errors = np.where(number > 1, np.sqrt(squares / (number - 1) / number), 0.0)
    return places, means, None if len(curves) == 1 else errors


def thinned(line: Line) -> Line:
    """Return a line with few enough points, each the mean of its neighborhood."""
    if len(line.x) <= MOST_POINTS:
        return line
    kept = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).round().astype(int))
    window = len(line.x) // MOST_POINTS | 1
    smooth = moving_average(line.y, np.ones(len(line.y)), window)
    return Line(line.number, line.name, line.x[kept], smooth[kept], None if line.error is None else line.error[kept])
