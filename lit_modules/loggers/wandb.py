"""Logging to Weights & Biases, if configured."""

import contextlib
import html
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from common.atomic_files import write_atomic
from common.settings import SettingError
from lit_modules.loggers.wandb_sync import (
    RUN_ID,
    RUN_URL,
    UNSENT_MARK,
    missing_key_message,
    no_answer_message,
    send,
    unsent_parts,
)

log = logging.getLogger(__name__)

START_SECONDS = 30.0  # timeout for wandb to start a run, which queries its server
END_SECONDS = 20.0  # timeout for sending the rest: less than SLURM's grace time for preempted jobs


class Wandb(WandbLogger):
    """Weights & Biases with our own steps, so that a resumed run continues in the same wandb run, also offline.

    Everything is written below the run's folder first; wandb's own process sends it from there. An unreachable server
    neither stops nor slows training. `palimpsest job=sync` later sends what the server did not receive.

    Args:
        folder: the run's folder; it keeps the id of the wandb run, which a resume continues.
        settings: the resolved configuration, the commit and the ranks, which become wandb's config.
        mode: "online", "offline", or "auto": the environment's WANDB_MODE, and offline without a key or if the server
            does not answer.
        project, entity, group, tags: as in wandb.init.

    Raises:
        ValueError: `mode` is unknown.
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
            raise SettingError("logger.wandb.mode", mode, "give auto, online or offline")
        self.folder = Path(folder)
        self.may_go_offline = mode == "auto"
        self.has_failed, self.is_closed = False, False
        super().__init__(
            name="/".join(self.folder.parts[-2:]),
            id=run_id(self.folder),
            save_dir=str(self.folder),
            project=project,
            entity=entity,
            group=group,
            tags=list(tags or []),
            mode=resolve_mode() if mode == "auto" else mode,
            resume="allow",
            config=settings,
            settings=wandb.Settings(init_timeout=START_SECONDS, finish_timeout=END_SECONDS, finish_timeout_raises=True),
        )

    @property
    def experiment(self) -> Any:
        """wandb's run, started on first access, so that a run refused earlier leaves none.

        Raises:
            ValueError: with mode "online", wandb could not start it.
        """
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
            try:
                self.start_run()
            except (wandb.Error, OSError) as error:
                if not self.may_go_offline:
                    raise ValueError(
                        f"logger.wandb.mode=online, and wandb could not begin ({one_line(error)}): "
                        "give logger.wandb.mode=auto, which keeps the run offline then"
                    ) from error
                log.warning(
                    "wandb could not begin (%s), so the run is kept offline for `palimpsest job=sync`", one_line(error)
                )
                self._wandb_init["mode"] = "offline"
                wandb.teardown()  # wandb's process holds the id of the failed run
                self.start_run()
        return super().experiment

    def start_run(self) -> None:
        """Start or continue wandb's run, after sending its earlier unsent parts."""
        if self._wandb_init["mode"] == "online" and (left := send(unsent_parts(self.folder))):
            raise OSError(f"{len(left)} earlier parts of the run could not be sent, and come first")
        begun = super().experiment
        if self._wandb_init["mode"] == "online" and begun.url:
            with contextlib.suppress(OSError):  # a full disk: only the link in job=compare is lost
                write_atomic(self.folder / "wandb" / RUN_URL, f"{begun.url}\n")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log with wandb's own step set: otherwise a resumed offline run would restart at step 0."""
        self.going_on(lambda: self.experiment.log({**metrics, "trainer/global_step": step}, step=step))

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.going_on(lambda: super(Wandb, self).log_hyperparams(params))

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        self.going_on(lambda: super(Wandb, self).log_image(key, images, step, **kwargs))

    @rank_zero_only
    def log_text(  # type: ignore[override]  # columns and data are always given
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log rows of text as an HTML page. wandb's own table is an artifact, whose creation waits for the server."""
        self.going_on(lambda: self.experiment.log({key: wandb.Html(table_page(columns, data))}, step=step))

    def going_on(self, call: Callable[[], None]) -> None:
        """Call wandb; log its first failure (process gone, disk full) instead of ending the run."""
        try:
            call()
        except (wandb.Error, OSError) as error:
            if not self.has_failed:
                log.error(
                    "wandb does not take what is logged (%s); training goes on, with metrics.csv", one_line(error)
                )
            self.has_failed = True

    @rank_zero_only
    def close(self, exit_code: int, preempted: bool = False) -> None:
        """Send or write pending data and finish wandb's part of the run. Only the first call counts.

        Data that the server does not take in time stays on disk, and a warning says so.

        Args:
            exit_code: 0 marks the run as finished, any other code as failed.
            preempted: with a code other than 0: the run will be resumed.
        """
        begun = self._experiment
        if begun is None or self.is_closed:
            return
        self.is_closed = True
        try:
            if preempted:
                begun.mark_preempting()
            begun.finish(exit_code=exit_code)
        except (TimeoutError, wandb.Error, OSError):
            (Path(begun.dir).parent / UNSENT_MARK).touch()
            log.warning("wandb has not taken everything: `palimpsest job=sync run=%s` sends the rest", self.folder)


def run_id(folder: Path) -> str:
    """Return the id of the wandb run for a run's folder, created on first use."""
    path = folder / "wandb" / RUN_ID
    if not path.is_file():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


def table_page(columns: Sequence[str], data: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table that shows texts verbatim, including markup and line breaks."""
    rows = [("th", columns), *(("td", row) for row in data)]
    cells = ("".join(f"<{tag}>{html.escape(str(text))}</{tag}>" for text in row) for tag, row in rows)
    return f'<table style="white-space: pre-wrap">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def resolve_mode() -> str:
    """Return wandb's mode for "auto": the environment's, or offline, with a log line, without a key or server."""
    asked = os.environ.get("WANDB_MODE", "online")
    if asked != "online":
        return asked
    reason = missing_key_message() or no_answer_message()
    if reason is None:
        return "online"
    log.info("wandb: %s, so the run is kept offline for `palimpsest job=sync`", reason)
    return "offline"
