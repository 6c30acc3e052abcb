"""A server that the job starts, watches, restarts when it dies, and stops at the end."""

import asyncio
import logging
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.settings import NO_VALUE, SettingError
from data_pipeline.rewriting.backends import RewritingStopped, supervisor
from data_pipeline.rewriting.backends.endpoint import Endpoint

log = logging.getLogger(__name__)

POLL_S = 0.5
STOPPING_S = 2 * supervisor.PATIENCE_S


@dataclass(kw_only=True)
class Served(Endpoint):
    """The server that `command` starts, with {port} and {model} replaced; other settings as for `Endpoint`.

    It is ready when GET /v1/models succeeds, within `start_timeout_s`, and restarted up to `max_restarts` times. Its
    output goes to server.log in the run's folder. It ends with this process, even if that is killed.
    """

    command: list[str]
    base_url: str = field(init=False, default="")
    start_timeout_s: float = 1800.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.command, str) or not any("{port}" in str(word) for word in self.command):
            raise SettingError("command", self.command, "give a list of words, one of them with {port}")

    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        self._log = folder / "server.log"
        self._up = asyncio.Event()
        self._failure = ""
        self._process: asyncio.subprocess.Process | None = None
        self.base_url = "http://127.0.0.1:1/v1"  # until the server has a port
        await super().start(folder, requests, tokens)
        self._watch = asyncio.create_task(self._keep_running())
        await self._ready()

    async def _ready(self) -> None:
        await self._up.wait()
        if self._failure:
            raise RewritingStopped("command", NO_VALUE, f"see {self._log}", self._failure)

    async def _keep_running(self) -> None:
        """Start the server, and restart it when it dies, up to `max_restarts` times."""
        status: int | None = None
        for start in range(1 + self.max_restarts):
            try:
                self._failure = await self._start_once()
            except OSError as error:
                self._failure = f"cannot be started ({error.strerror})"
            if self._failure:
                break
            self._up.set()
            assert self._process is not None  # it has just answered
            status = await self._process.wait()
            self._up.clear()
            if start < self.max_restarts:
                log.warning("the server ended with status %s: starting it again (%s)", status, self._log)
        else:
            self._failure = f"ended with status {status} after {self.max_restarts} restarts"
        self._up.set()  # let waiting requests see the failure

    async def _start_once(self) -> str:
        """Start the server and wait until it is ready; return the reason if it is not, else ""."""
        port = _free_port()
        words = [str(word).replace("{port}", str(port)).replace("{model}", self.model) for word in self.command]
        log.info("starting %s (log: %s)", " ".join(words), self._log)
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                supervisor.__file__,
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._log.parent,  # not this folder: a subfolder could shadow one of the server's packages
                start_new_session=True,
            )
        await self._client.close()
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self._connect()
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                return f"({words[0]}) ended with status {self._process.returncode} before it was ready"
            if await self._alive():
                return ""
            await asyncio.sleep(POLL_S)
        return f"({words[0]}) was not ready within start_timeout_s={self.start_timeout_s:g}"

    async def close(self) -> None:
        watch, process = getattr(self, "_watch", None), getattr(self, "_process", None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if process is not None and process.returncode is None:
            process.stdin.close()  # makes the supervisor end the server
            try:
                await asyncio.wait_for(process.wait(), STOPPING_S)
            except TimeoutError:
                process.kill()
        await super().close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
