"""Progress of a rewriting: a bar on a terminal, elsewhere occasional log lines."""

import logging
import time
from types import TracebackType

from tqdm import tqdm

from data_pipeline.rewriting.backends import Answer

log = logging.getLogger(__name__)

LOG_EVERY_S = 30.0


class Progress:
    """Counter of rewritings (a document in one style each), tokens in both directions, and retried requests."""

    def __init__(self, documents: int | None, styles: int) -> None:
        self.styles = styles
        self.total = None if documents is None else documents * styles
        self.done = self.before = self.tokens_in = self.tokens_out = self.retries = self.requests = 0
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> "Progress":
        self._start = self._logged = time.monotonic()
        # disable=None: tqdm is silent when stderr is not a terminal.
        self._bar = tqdm(desc="rewriting", unit=" rewritings", total=self.total, disable=None, leave=False)
        return self

    def done_before(self, documents: int) -> None:
        """Count documents that an earlier run finished."""
        self.before += documents * self.styles
        self._bar.update(documents * self.styles)

    def answered(self, answer: Answer) -> None:
        """Count the cost of an answer."""
        self.requests += 1
        self.retries += answer.tries - 1
        self.tokens_in += answer.tokens_in
        self.tokens_out += answer.tokens_out

    def advance(self) -> None:
        """Count one rewriting, kept or dropped."""
        self.done += 1
        self._bar.update(1)
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            self._bar.set_postfix_str(self._rates(), refresh=False)
            if self._bar.disable:
                log.info("%s", self.line())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return max(time.monotonic() - self._start, 1e-9)

    def done_of_total(self) -> str:
        """Return the progress in words."""
        of = f" of {self.total:,}" if self.total is not None else ""
        return f"{self.before + self.done:,}{of} rewritings"

    def line(self) -> str:
        """Return a progress line: count, rates, time left."""
        missing = (self.total or 0) - self.before - self.done
        left = f", {self._remaining(missing)} left" if self.done and missing > 0 else ""
        return f"rewriting: {self.done_of_total()}, {self.done / self.seconds:,.1f}/s, {self._rates()}{left}"

    def _rates(self) -> str:
        return (
            f"{self.tokens_in / self.seconds:,.0f} tokens/s in, {self.tokens_out / self.seconds:,.0f} out, "
            f"{self.retries:,} retries"
        )

    def _remaining(self, missing: int) -> str:
        seconds = missing * self.seconds / self.done
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        if error is None:
            log.info("%s", self.line())
