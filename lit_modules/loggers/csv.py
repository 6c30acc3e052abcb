"""Metrics of every run in `metrics.csv`."""

import csv
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from common.atomic_files import write_atomic

log = logging.getLogger(__name__)


class MetricsCsv(Logger):
    """Logger to `metrics.csv` in the run's folder: one row per log call, written at once.

    Lightning's own CSV logger deletes the file when a run is resumed. This one keeps it, and drops only the rows of
    steps that the resumed run repeats. A new metric adds a column.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.columns: list[str] = []
        if self.path.is_file():
            self.columns = self.rows()[0]

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` in the same folder has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row: the optimizer step, then the metrics by column.

        On a full disk the row is lost, but the run continues.
        """
        try:
            self.append({"step": step, **metrics})
        except OSError as error:
            log.error("%s could not be written (%s); training goes on", self.path, error.strerror or error)

    def append(self, row: dict[str, Any]) -> None:
        new = [key for key in row if key not in self.columns]
        if new:
            self.rewrite([*self.columns, *new], self.rows()[1:])
        with open(self.path, "a", encoding="utf-8", newline="") as handle:
            csv.writer(handle).writerow([row.get(column, "") for column in self.columns])

    def resume_from(self, step: int) -> None:
        """Drop the rows after `step`, and a last row that a kill truncated."""
        if self.path.is_file():
            rows = self.rows()[1:]
            if rows and len(rows[-1]) < len(self.columns):
                rows.pop()
            self.rewrite(self.columns, [row for row in rows if int(row[0]) <= step])

    def rows(self) -> list[list[str]]:
        """Return all rows of the file, header first."""
        if not self.path.is_file():
            return [[]]
        with open(self.path, encoding="utf-8", newline="") as handle:
            return list(csv.reader(handle)) or [[]]

    def rewrite(self, columns: list[str], rows: list[list[str]]) -> None:
        """Replace the file's rows by `rows`, padded to `columns`."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)])
        write_atomic(self.path, text.getvalue())
        self.columns = columns
