"""Limits of requests to a server: pace, budget, and waits before a retry."""

import asyncio
import email.utils
import random
import time
from dataclasses import dataclass

from data_pipeline.rewriting.backends import BudgetSpent

BURST_S = 2.0  # how far a pace may run ahead, so that the start is not slowed down


class Pace:
    """Rate limiter of `per_minute` units per minute; None for no limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds_each = 60 / per_minute if per_minute else 0.0
        self._free_at = 0.0

    async def wait(self, amount: float = 1) -> None:
        """Wait until `amount` units may pass."""
        if not self._seconds_each:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + amount * self._seconds_each
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


@dataclass
class Budget:
    """The most requests and tokens that a rewriting may spend over all its runs; None for no limit.

    A request reserves its greatest possible cost until the real one is known, so the budget is never exceeded.
    """

    max_requests: int | None
    max_tokens: int | None
    requests: int = 0
    tokens: int = 0
    _reserved: int = 0

    def reserve(self, tokens: int) -> None:
        """Reserve a request of at most `tokens`; raise BudgetSpent, naming the key, if that exceeds the budget."""
        for key, limit, spent, asked in (
            ("max_requests", self.max_requests, self.requests, 1),
            ("max_tokens", self.max_tokens, self.tokens + self._reserved, tokens),
        ):
            if limit is not None and spent + asked > limit:
                problem = f"is spent ({self.requests:,} requests and {self.tokens:,} tokens)"
                raise BudgetSpent(key, limit, "raise it to go on", problem)
        self.requests += 1
        self._reserved += tokens

    def settle(self, reserved: int, cost: int) -> None:
        """Replace a request's reservation with its real cost."""
        self._reserved -= reserved
        self.tokens += cost


def backoff(fault: int, first_s: float, longest_s: float) -> float:
    """Return seconds to wait after the `fault`-th fault, counted from 1.

    The wait doubles with each fault; jitter keeps clients that fail together from retrying together.
    """
    return min(first_s * 2 ** (fault - 1), longest_s) * random.uniform(0.5, 1.0)


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or a date), or None if it has neither."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if seconds == seconds else None  # NaN
