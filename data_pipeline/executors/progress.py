"""Progress of a phase: a bar on a terminal, elsewhere occasional log lines."""

import logging
import time
from datetime import timedelta
from types import TracebackType

from tqdm import tqdm

from data_pipeline.executors.phases import Phase

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30


class PhaseProgress:
    """Counter of the finished tasks of phase number `index` of `phases`; `ranks` are still to run."""

    def __init__(self, index: int, phases: int, phase: Phase, ranks: list[int]) -> None:
        self.title, self.total = f"{index + 1}/{phases} {phase.name}", phase.tasks
        self.done = self._before = phase.tasks - len(ranks)

    def __enter__(self) -> "PhaseProgress":
        self._start = self._told = time.perf_counter()
        before = f", {self._before} ended before" if self._before else ""
        log.info("%s: %s%s", self.title, _tasks(self.total), before)
        # disable=None: tqdm is silent when stderr is not a terminal.
        self._bar = tqdm(desc=self.title, unit=" tasks", total=self.total, initial=self.done, disable=None, leave=False)
        return self

    def advance(self) -> None:
        """Count a finished task."""
        self.done += 1
        self._bar.update(1)
        now = time.perf_counter()
        if self._bar.disable and now - self._told >= SECONDS_BETWEEN_LINES and self.done < self.total:
            self._told = now
            elapsed = now - self._start
            left = elapsed / (self.done - self._before) * (self.total - self.done)
            log.info(
                "%s: %d/%d tasks in %s, about %s left", self.title, self.done, self.total, _clock(elapsed), _clock(left)
            )

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        elapsed = time.perf_counter() - self._start
        if error is not None:
            log.info("%s: stopped after %d/%d tasks", self.title, self.done, self.total)
        elif self.done > self._before:
            log.info("%s: %s in %.1f s", self.title, _tasks(self.done - self._before), elapsed)


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
