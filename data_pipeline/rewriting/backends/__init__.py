"""What answers the requests of a rewriting: a server, a server that the job starts, or a model in this process."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


class RewritingStopped(ValueError):
    """The run ends early; what was finished stays, and the same command goes on. One line says why."""


class BudgetSpent(RewritingStopped):
    """The run's budget allows no further request; those under way may end."""


@dataclass(frozen=True, slots=True)
class Request:
    """Chat messages and how to sample the answer; `max_tokens` bounds it."""

    messages: list[dict[str, str]]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, why it ended ("stop", "length", ...), and what it cost.

    `tries` counts the times it was asked for. `problem` names why there will be no text for this request, whatever is
    tried ("refused_by_server", "server_error"); it is "" where there is one.
    """

    text: str
    finish: str
    tokens_in: int
    tokens_out: int
    tries: int = 1
    problem: str = ""


class Backend(ABC):
    """Takes requests, `concurrency` at a time, between `start` and `close`. `model` names what answers."""

    model: str

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Return how many requests to have under way at once."""

    @abstractmethod
    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        """Get ready; logs go to `folder`. `requests` and `tokens` were spent by earlier runs of the same rewriting.

        Raises ValueError, naming the key, for a setting that cannot work.
        """

    @abstractmethod
    async def complete(self, request: Request) -> Answer:
        """Return the answer. Raises RewritingStopped where nothing further can be answered."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what was started, whatever happened before."""
