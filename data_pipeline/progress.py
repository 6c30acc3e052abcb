"""A progress bar on a terminal; elsewhere a log line at the start and the end of a stage."""

import logging
import time
from types import TracebackType

from tqdm import tqdm

log = logging.getLogger(__name__)


class Stage:
    """Progress of a stage; `seconds` and `rate` (units/s) are valid once it has ended.

    `unit` names what is counted ("B", "tokens"); `total` may be unknown (None).
    """

    def __init__(self, name: str, unit: str, total: int | None = None) -> None:
        self.name, self.unit, self.total = name, unit, total
        self.done = 0
        self.seconds = 0.0

    def __enter__(self) -> "Stage":
        log.info("%s ...", self.name)
        self._start = time.perf_counter()
        # disable=None: tqdm is silent when stderr is not a terminal.
        self._bar = tqdm(
            desc=self.name, unit=f" {self.unit}", unit_scale=True, total=self.total, disable=None, leave=False
        )
        return self

    def advance(self, amount: int) -> None:
        """Add `amount` units."""
        self.done += amount
        self._bar.update(amount)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(self.seconds, 1e-9)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        self.seconds = time.perf_counter() - self._start
        if error is None:
            log.info(
                "%s: %s %s in %.1f s (%s/s)",
                self.name,
                f"{self.done:,}",
                self.unit,
                self.seconds,
                f"{self.rate:,.0f} {self.unit}",
            )
