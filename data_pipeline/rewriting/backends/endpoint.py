"""Any server with OpenAI's chat protocol: vLLM, TGI, `transformers serve`, or a service with an API key."""

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.settings import SettingError, check_number, check_whole
from data_pipeline.rewriting.backends import Answer, Backend, Request, RewritingStopped
from data_pipeline.rewriting.backends.limits import Budget, Pace, backoff, retry_after
from data_pipeline.rewriting.styles import CHARACTERS_PER_TOKEN

log = logging.getLogger(__name__)

REFUSALS_BEFORE_STOPPING = 8  # a server that refused this many and answered none has wrong settings
WORDS_SHOWN = 200


class BrokenAnswer(Exception):
    """A body that is not the expected JSON: truncated, or from another kind of server."""


@dataclass(kw_only=True)
class Endpoint(Backend):
    """A server at `base_url`, such as http://127.0.0.1:8000/v1.

    The API key is read from the environment variable `key_variable`, and appears in no log, file or message. A request
    is tried `tries` times, `timeout_s` each, with waits doubling from `backoff_s`. A 429 is not a failed try: the
    server's wait is respected, up to `longest_wait_s` in total. `max_requests` and `max_tokens` are the budget over all
    runs into a folder (failed tries count as requests; tokens, as the server counts them, in both directions).
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
        for key in ("concurrency", "tries", "max_requests", "max_tokens"):
            check_whole(key, getattr(self, key), 1, null=key.startswith("max_"))
        for key in ("timeout_s", "backoff_s", "longest_wait_s", "requests_per_minute", "tokens_per_minute"):
            check_number(key, getattr(self, key), above=0, null=key.endswith("_per_minute"))
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
            raise ValueError("the openai client is missing: pip install 'palimpsest-lm[rewrite]'") from error
        if not self.base_url.startswith(("http://", "https://")):
            raise SettingError("base_url", self.base_url, "give an address like http://127.0.0.1:8000/v1")
        for name in ("httpx", "httpx2"):  # the client's HTTP library would log a line per request
            logging.getLogger(name).setLevel(logging.WARNING)
        connections = self.concurrency + 4
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=connections, max_keepalive_connections=connections
        )
        # Retries are done here, not by the client: they are counted, paced and charged to the budget.
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._key or "none",  # the client requires a key even if the server does not
            max_retries=0,
            timeout=self.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )

    def _read_key(self) -> str:
        if self.key_variable is None:
            return ""
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise SettingError("key_variable", self.key_variable, "give one that is set", "is not in the environment")
        return key

    async def complete(self, request: Request) -> Answer:
        if self._ended is not None:  # requests still waiting must not try a wrong key again
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
                    problem = f"had too many requests (429) for longer than longest_wait_s={self.longest_wait_s:g}"
                    fix = "ask for less, or go on later"
                    raise RewritingStopped("base_url", self.base_url, fix, problem) from error
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
        """Wait until the server accepts requests."""

    async def _ask(self, request: Request, tries: int) -> Answer:
        """Ask once, within pace and budget."""
        asked = sum(len(message["content"]) for message in request.messages)
        tokens_in = int(asked / CHARACTERS_PER_TOKEN) + 1
        # The number of bytes bounds the tokens: rare characters have more tokens than their length suggests.
        most = sum(len(message["content"].encode()) for message in request.messages) + request.max_tokens
        self.budget.reserve(most)
        cost = 0
        try:
            await self._pace[0].wait()
            await self._pace[1].wait(tokens_in + request.max_tokens)
            async with asyncio.timeout(self.timeout_s):  # the client's own timeout restarts with every byte
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
        """Return the answer for a refused request (too long, say); end the run if the server refuses all."""
        self._refused += 1
        if self._refused >= REFUSALS_BEFORE_STOPPING and not self._answered_at:
            reason = self._without_key(error)
            raise RewritingStopped("base_url", self.base_url, reason, "refuses every request") from error
        return Answer("", "", 0, 0, tries, "refused_by_server")

    async def _given_up(self, error: Exception, tries: int, fault_before: float) -> Answer:
        """Return the answer of a request whose tries all failed; end the run if the server fails, not the request."""
        if self._answered_at > fault_before and await self._alive():
            log.warning("a request failed %d times (%s) and is left out", self.tries, self._without_key(error))
            return Answer("", "", 0, 0, tries, "server_error")
        reason = self._without_key(error)
        raise RewritingStopped("base_url", self.base_url, reason, f"gave no answer in {self.tries} tries") from error

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
        """Return the error for a wrong key or model, without the server's words on a key: they may contain it."""
        status = error.status_code
        if status == 404:
            problem = f"is not known to {self.base_url}, or the address is wrong (404)"
            return RewritingStopped("model", self.model, self._without_key(error), problem)
        fix = "set it to a variable with the right key" if self.key_variable else "name the variable with the key"
        problem = f"has a key that {self.base_url} refuses ({status})"
        return RewritingStopped("key_variable", self.key_variable, fix, problem)

    def _without_key(self, error: Exception) -> str:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return (words.replace(self._key, "***") if self._key else words)[:WORDS_SHOWN]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _told_to_wait(error: Exception) -> float | None:
    """Return the seconds that the server asks to wait before the next try, or None."""
    response = getattr(error, "response", None)
    return None if response is None else retry_after(response.headers.get("retry-after"))


def _is_refusal(error: Exception) -> bool:
    return getattr(error, "status_code", None) in (400, 413, 422)


def _read(completion: Any, tokens_in: int, tries: int) -> Answer:
    """Return a completion as an answer; the client does not validate what it parses."""
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
    tokens = [c if isinstance(c, int) and c >= 0 else e for c, e in zip(counts, estimates, strict=True)]
    return Answer(text, str(choice.finish_reason), tokens[0], tokens[1], tries)
