"""Where metrics go: `metrics.csv` always, and Weights & Biases when it is asked for."""

import csv
import io
import logging
import netrc
import os
import secrets
import urllib.error
import urllib.parse
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
            self.rewrite([*self.columns, *new], self.rows()[1:])
        with open(self.path, "a", encoding="utf-8", newline="") as handle:
            csv.writer(handle).writerow([row.get(column, "") for column in self.columns])

    def resume_from(self, step: int) -> None:
        """Drop the rows of later steps than `step`, and a last row that a kill has cut."""
        if self.path.is_file():
            rows = self.rows()[1:]
            if rows and len(rows[-1]) < len(self.columns):
                rows.pop()
            self.rewrite(self.columns, [row for row in rows if int(row[0]) <= step])

    def rows(self) -> list[list[str]]:
        """All rows of the file, the header first."""
        if not self.path.is_file():
            return [[]]
        with open(self.path, encoding="utf-8", newline="") as handle:
            return list(csv.reader(handle)) or [[]]

    def rewrite(self, columns: list[str], rows: list[list[str]]) -> None:
        """Put `rows`, filled up to `columns`, in place of the file's."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)])
        write_whole(self.path, text.getvalue())
        self.columns = columns


class Wandb(WandbLogger):
    """Weights & Biases with steps given by us, so that a resumed run goes on in the same run, also offline.

    Args:
        folder: the run's folder; it keeps the id of the wandb run, which a resume goes on with.
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
            id=run_id(folder),
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


def run_id(folder: Path) -> str:
    """The id of the wandb run of a run's folder, made when it is first asked for."""
    path = folder / "wandb" / "run-id.txt"
    if not path.is_file():
        write_whole(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


def reachable() -> bool:
    """Whether there is a key for wandb, and its server answers; the log says so if not."""
    if os.environ.get("WANDB_MODE") == "offline":
        return False
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not os.environ.get("WANDB_API_KEY") and not netrc_has(urllib.parse.urlsplit(url).hostname):
        log.info("wandb: no key (wandb login), so the run is kept offline for `wandb sync`")
        return False
    try:
        # wandb itself would wait for minutes; proxies in the environment are used as wandb uses them
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not to this question
    except OSError as error:
        log.info(f"wandb: its server does not answer ({error}), so the run is kept offline for `wandb sync`")
        return False
    return True


def netrc_has(host: str | None) -> bool:
    """Whether `~/.netrc`, where `wandb login` puts the key, has one for the host."""
    try:
        return netrc.netrc().authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
