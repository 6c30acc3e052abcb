"""Any server that speaks OpenAI's chat protocol: vLLM, TGI, `transformers serve`, or a service with a key."""

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.rewriting.backends import Answer, Backend, Request, RewritingStopped
from data_pipeline.rewriting.backends.limits import Budget, Pace, backoff, retry_after
from data_pipeline.rewriting.styles import CHARACTERS_PER_TOKEN

logger = logging.getLogger(__name__)

REFUSALS_BEFORE_STOPPING = 8  # where a server has refused so many and answered none, it is the settings, not a document
WORDS_SHOWN = 200


class BrokenAnswer(Exception):
    """A body that is not the JSON it should be: cut on its way, or not from such a server."""


@dataclass(kw_only=True)
class Endpoint(Backend):
    """A server at `base_url`, such as http://127.0.0.1:8000/v1.

    The key is read from the environment variable `key_variable`, and is in no log, file or message. A request is tried
    `tries` times, `timeout_s` each, with waits doubling from `backoff_s`; a 429 is no failed try, and is waited out as
    long as the server says, up to `longest_wait_s` in all. `max_requests` and `max_tokens` are the budget over all runs
    into a folder (tries that fail count as requests; tokens, as the server counts them, both ways).
    """

    base_url: str
    model: str
    key_variable: str | None = None
    concurrency: int = 32
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    timeout_s: float = 300.0
    tries: int = 6
    backoff_s: float = 1.0
    longest_wait_s: float = 600.0
    max_requests: int | None = None
    max_tokens: int | None = None
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("concurrency", "timeout_s", "tries", "backoff_s", "longest_wait_s"):
            _check_positive(key, getattr(self, key), whole=key in ("concurrency", "tries"))
        for key in ("requests_per_minute", "tokens_per_minute", "max_requests", "max_tokens"):
            if getattr(self, key) is not None:
                _check_positive(key, getattr(self, key), whole=key.startswith("max_"))
        self._client: Any = None
        self._answered_at = 0.0
        self._refused = 0
        self._ended: RewritingStopped | None = None

    @property
    def in_flight(self) -> int:
        return self.concurrency

    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        self._pace = (Pace(self.requests_per_minute), Pace(self.tokens_per_minute))
        self.budget = Budget(self.max_requests, self.max_tokens, requests, tokens)
        self._key = self._read_key()
        self._connect()

    def _connect(self) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "rewrite.backend: the openai client is missing: pip install 'palimpsest-lm[rewrite]'"
            ) from error
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"rewrite.backend.base_url={self.base_url}: give an address like http://127.0.0.1:8000/v1")
        for name in ("httpx", "httpx2"):  # whichever the client is built on: a line for each request otherwise
            logging.getLogger(name).setLevel(logging.WARNING)
        connections = self.concurrency + 4
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=connections, max_keepalive_connections=connections
        )
        # Retries are ours: they are counted, paced and paid for by the budget, which the client knows nothing of.
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._key or "none",  # the client wants one even where the server does not
            max_retries=0,
            timeout=self.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )

    def _read_key(self) -> str:
        if self.key_variable is None:
            return ""
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise ValueError(f"rewrite.backend.key_variable={self.key_variable}: the environment has no such variable")
        return key

    async def complete(self, request: Request) -> Answer:
        if self._ended is not None:  # those who still wait for their turn shall not try a wrong key again
            raise self._ended
        try:
            return await self._complete(request)
        except RewritingStopped as error:
            self._ended = error
            raise

    async def _complete(self, request: Request) -> Answer:
        import openai

        faults, waited, tries, fault_before = 0, 0.0, 0, time.monotonic()
        while True:
            await self._ready()
            tries += 1
            try:
                return await self._ask(request, tries)
            except RewritingStopped:
                raise
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise self._unusable(error) from error
            except openai.RateLimitError as error:
                told = _told_to_wait(error)
                wait = backoff(tries, self.backoff_s, 60) if told is None else told
                waited += wait
                if waited > self.longest_wait_s:
                    raise RewritingStopped(
                        f"rewrite.backend.base_url={self.base_url}: too many requests (429) for longer than "
                        f"rewrite.backend.longest_wait_s={self.longest_wait_s:g}: ask for less, or go on later"
                    ) from error
            except (openai.APIError, BrokenAnswer, ValueError, RecursionError, TimeoutError) as error:
                if _is_refusal(error):
                    return self._refusal(error, tries)
                faults += 1
                if faults >= self.tries:
                    return await self._given_up(error, tries, fault_before)
                fault_before = time.monotonic()
                wait = max(backoff(faults, self.backoff_s, 60), min(_told_to_wait(error) or 0.0, self.longest_wait_s))
            await asyncio.sleep(wait)

    async def _ready(self) -> None:
        """Wait until the server can be asked."""

    async def _ask(self, request: Request, tries: int) -> Answer:
        """Ask once, in its turn and within the budget."""
        asked = sum(len(message["content"]) for message in request.messages)
        tokens_in = int(asked / CHARACTERS_PER_TOKEN) + 1
        # Bytes bound tokens: a part of rare characters has more tokens than its length tells.
        most = sum(len(message["content"].encode()) for message in request.messages) + request.max_tokens
        self.budget.hold(most)
        cost = 0
        try:
            await self._pace[0].wait()
            await self._pace[1].wait(tokens_in + request.max_tokens)
            async with asyncio.timeout(self.timeout_s):  # the client's own counts from byte to byte
                completion = await self._client.chat.completions.create(
                    model=self.model,
                    messages=request.messages,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    max_tokens=request.max_tokens,
                    seed=request.seed,
                    extra_body=self.extra or None,
                )
            answer = _read(completion, tokens_in, tries)
            cost = answer.tokens_in + answer.tokens_out
        finally:
            self.budget.settle(most, cost)
        self._answered_at = time.monotonic()
        return answer

    def _refusal(self, error: Exception, tries: int) -> Answer:
        """The server will not have this request: too long for the model, say. Where it has none, the run ends."""
        self._refused += 1
        if self._refused >= REFUSALS_BEFORE_STOPPING and not self._answered_at:
            raise RewritingStopped(
                f"rewrite.backend: {self.base_url} refuses every request: {self._without_key(error)}"
            ) from error
        return Answer("", "", 0, 0, tries, "refused_by_server")

    async def _given_up(self, error: Exception, tries: int, fault_before: float) -> Answer:
        """No try succeeded. Is it this request (others are being answered, the server is well), or the server?"""
        if self._answered_at > fault_before and await self._alive():
            logger.warning("a request failed %d times (%s) and is left out", self.tries, self._without_key(error))
            return Answer("", "", 0, 0, tries, "server_error")
        raise RewritingStopped(
            f"rewrite.backend.base_url={self.base_url}: no answer in {self.tries} tries ({self._without_key(error)})"
        ) from error

    async def _alive(self) -> bool:
        import openai

        try:
            await self._client.models.list(timeout=10)
        except openai.APIStatusError as error:
            return error.status_code < 500
        except (openai.APIError, ValueError):
            return False
        return True

    def _unusable(self, error: Any) -> RewritingStopped:
        """The line for a wrong key or model. What the server says of a key may hold it, and is not repeated."""
        status = error.status_code
        if status == 404:
            return RewritingStopped(
                f"rewrite.backend.model={self.model}: {self.base_url} knows no such model or address (404): "
                f"{self._without_key(error)}"
            )
        mend = "set it to a variable with the right key" if self.key_variable else "name the variable with the key"
        return RewritingStopped(
            f"rewrite.backend.key_variable={self.key_variable}: {self.base_url} refuses the key ({status}): {mend}"
        )

    def _without_key(self, error: Exception) -> str:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return (words.replace(self._key, "***") if self._key else words)[:WORDS_SHOWN]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _told_to_wait(error: Exception) -> float | None:
    """Return the seconds that the server asks to wait before the next try, or None where it does not say."""
    response = getattr(error, "response", None)
    return None if response is None else retry_after(response.headers.get("retry-after"))


def _is_refusal(error: Exception) -> bool:
    return getattr(error, "status_code", None) in (400, 413, 422)


def _read(completion: Any, tokens_in: int, tries: int) -> Answer:
    """Return a completion as an answer. The client makes objects of whatever it gets: look before use."""
    try:
        choice = completion.choices[0]
        text = choice.message.content or ""
        if not isinstance(text, str):
            raise TypeError(type(text).__name__)
    except (AttributeError, IndexError, TypeError) as error:
        raise BrokenAnswer(f"no chat completion in the answer ({error})") from error
    usage = getattr(completion, "usage", None)
    counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    estimates = (tokens_in, int(len(text) / CHARACTERS_PER_TOKEN) + 1)
    known = [c if isinstance(c, int) and c >= 0 else e for c, e in zip(counts, estimates, strict=True)]
    return Answer(text, str(choice.finish_reason), *known, tries)


def _check_positive(key: str, value: object, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value <= 0:
        raise ValueError(f"rewrite.backend.{key}={value}: give a {'whole ' if whole else ''}number above 0")
