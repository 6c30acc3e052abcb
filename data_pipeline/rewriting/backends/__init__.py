"""Backends that answer a rewriting's requests: a server, a server that the job starts, or a model in this process."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from common.settings import SettingError


class RewritingStopped(SettingError):
    """Early end of the run for a reason that a setting can change; finished work stays, the same command continues."""


class BudgetSpent(RewritingStopped):
    """Exhausted budget: no further request is allowed; requests in flight may finish."""


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
    """The text of an answer, its finish reason ("stop", "length", ...), and its cost.

    `tries` counts the requests made for it. `problem` names a permanent failure of this request ("refused_by_server",
    "server_error"); "" if there is a text.
    """

    text: str
    finish: str
    tokens_in: int
    tokens_out: int
    tries: int = 1
    problem: str = ""


class Backend(ABC):
    """Interface: answers `concurrency` requests at a time, between `start` and `close`, with the model `model`."""

    model: str

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of requests to keep in flight."""

    @abstractmethod
    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        """Get ready; logs go to `folder`. Earlier runs of the same rewriting have spent `requests` and `tokens`.

        Raises:
            ValueError: a setting cannot work; the line names the key.
        """

    @abstractmethod
    async def complete(self, request: Request) -> Answer:
        """Return the answer; raise RewritingStopped if no further request can be answered."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything that was started, also after errors."""
