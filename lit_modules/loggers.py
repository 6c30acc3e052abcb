"""Where metrics go: `metrics.csv` always, and Weights & Biases when it is asked for."""

import csv
import io
import logging
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from data_pipeline.files import write_whole

log = logging.getLogger(__name__)


class MetricsCsv(Logger):
    """`metrics.csv` in the run's folder: a row each time something is logged, on the disk at once.

    Lightning's own CSV logger removes the file when a run is resumed. This one keeps it, and drops only the rows of
    steps that the resumed run does again. A new metric adds a column.

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
        """Nothing: `config.yaml` in the same folder has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row: the optimizer step, then the metrics by column. A full disk costs the row, not the run."""
        try:
            self.append({"step": step, **metrics})
        except OSError as error:
            log.error(f"{self.path} could not be written ({error.strerror or error}); training goes on")

    def append(self, row: dict[str, Any]) -> None:
        new = [key for key in row if key not in self.columns]
        if new:
            self.columns = [*self.columns, *new]
            self.rewrite([[*old, *[""] * (len(self.columns) - len(old))] for old in self.rows()[1:]])
        with open(self.path, "a", encoding="utf-8", newline="") as handle:
            csv.writer(handle).writerow([row.get(column, "") for column in self.columns])

    def resume_from(self, step: int) -> None:
        """Drop the rows of later steps than `step`, and a last row that a kill has cut."""
        if self.path.is_file():
            rows = self.rows()[1:]
            self.rewrite([row for row in rows if len(row) == len(self.columns) and int(row[0]) <= step])

    def rows(self) -> list[list[str]]:
        """All rows of the file, the header first."""
        if not self.path.is_file():
            return [[]]
        with open(self.path, encoding="utf-8", newline="") as handle:
            return list(csv.reader(handle)) or [[]]

    def rewrite(self, rows: list[list[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.columns, *rows])
        write_whole(self.path, text.getvalue())


class Wandb(WandbLogger):
    """Weights & Biases with steps given by us, so that a resumed run goes on in the same run, also offline.

    Args:
        folder: the run's folder; the wandb run has an id made from its last two parts, the same after a resume.
        settings: the resolved configuration and the commit, which become wandb's config.
        mode: "online", "offline", or "auto": offline where there is no key or the server does not answer.
        project, entity, group, tags: as in wandb.init.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: dict[str, Any],
        *,
        mode: str = "auto",
        project: str = "palimpsest",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        if mode not in ("auto", "online", "offline"):
            raise ValueError(f"logger.wandb.mode={mode} is unknown: give auto, online or offline")
        folder = Path(folder)
        offline = mode == "offline" or (mode == "auto" and not reachable())
        super().__init__(
            name="/".join(folder.parts[-2:]),
            id="-".join([*folder.parts[-3:]]).replace("_", "-").replace(".", "-"),
            save_dir=str(folder),
            project=project,
            entity=entity,
            group=group,
            tags=list(tags or []),
            offline=offline,
            resume="allow",
            config=settings,
        )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log with wandb's own step set: an offline run that is resumed would otherwise begin again at step 0."""
        self.experiment.log({**metrics, "trainer/global_step": step}, step=step)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """Send or write what is pending and end wandb's part of the run: 0 as finished, else as crashed."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=exit_code)


def reachable() -> bool:
    """Whether there is a key for wandb, and its server answers; the log says so if not."""
    import wandb

    settings = wandb.setup().settings
    if os.environ.get("WANDB_MODE") == "offline":
        return False
    if not wandb.api.api_key:
        log.info("wandb: no key (wandb login), so the run is kept offline for `wandb sync`")
        return False
    try:
        # wandb itself would wait for minutes; proxies in the environment are used as wandb uses them
        urllib.request.urlopen(settings.base_url, timeout=5).close()
    except OSError as error:
        log.info(f"wandb: its server does not answer ({error}), so the run is kept offline for `wandb sync`")
        return False
    return True
