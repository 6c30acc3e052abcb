"""A suite of tasks and the rows of a paper's tables that are put below a checkpoint's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """A task of a suite: its title in the paper, and the paper's metric by its key in lm-eval's results."""

    title: str
    metric: str


class PublishedRow(NamedTuple):
    """A row of a table, in percent: values in the order of the suite's columns, None where the paper has none."""

    model: str
    table: int
    values: tuple[float | None, ...]
    means: tuple[float, ...]


@dataclass(frozen=True)
class PublishedSuite:
    """Tasks of lm-eval, and a paper's values for them.

    Attributes:
        columns: by task.
        means: title and tasks of each average, by its key in the report.
        rows: the paper's models.
        marked: names of rows that the figure has, at most five.
        note: source and conditions, for the line below the table.
    """

    columns: Mapping[str, Column]
    means: Mapping[str, tuple[str, tuple[str, ...]]]
    rows: tuple[PublishedRow, ...]
    marked: tuple[str, ...]
    note: str

    def metric(self, task: str) -> str | None:
        """Return the paper's metric for a task, or None for one that is not of the suite."""
        return self.columns[task].metric if task in self.columns else None
