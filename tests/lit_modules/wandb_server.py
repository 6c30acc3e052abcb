"""A stand-in for wandb's server on the loopback address: takes runs as `wandb` sends them, and can die in between."""

import gzip
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import wandb

KEY = "a" * 40


@dataclass
class Received:
    """What the server has of one run: its rows by their place in the history, settings, and how it ended."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    preempting: bool = False

    def column(self, key: str) -> list[Any]:
        """The values of a metric, in the order of the history."""
        return [row[key] for _, row in sorted(self.rows.items()) if key in row]


class Server(http.server.ThreadingHTTPServer):
    """Answers as little as the client needs. `runs`: by id. `down`: every request is answered with status 503.
    `silent`: questions about runs wait for an answer, others get one."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.runs: dict[str, Received] = {}
        self.down, self.silent = False, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *args: Any) -> None:
        """Nothing: a client that hangs up is no news."""

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("run")
        if "RunResumeStatus" in query:
            return {"model": {"id": "p", "name": "p", "entity": ENTITY, "bucket": self.bucket(name)}}
        if "upsertBucket" in query:
            known = name in self.runs
            found = self.runs.setdefault(name, Received())
            if variables.get("config"):
                found.config = {k: v["value"] for k, v in json.loads(variables["config"]).items()}
            return {"upsertBucket": {"bucket": self.bucket(name), "inserted": not known}}
        if "createRunFiles" in query:
            files = [{"name": f, "uploadUrl": f"{self.url}/upload"} for f in variables["files"]]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "9.9"}}}

    def bucket(self, name: str) -> dict[str, Any] | None:
        """A run as the client asks for it; None where there is none."""
        if name not in self.runs:
            return None
        rows = [row for _, row in sorted(self.runs[name].rows.items())]
        tail = json.dumps([json.dumps(row) for row in rows[-1:]])
        known = {"id": name, "name": name, "displayName": name, "config": "{}", "summaryMetrics": "{}", "tags": []}
        counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]"}
        return {**known, **counts, "historyTail": tail, "project": {"id": "p", "name": "p", "entity": ENTITY}}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """Take rows of a history, and the end of a run."""
        found = self.runs.setdefault(run, Received())
        history = sent.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        found.rows |= {history["offset"] + i: json.loads(row) for i, row in enumerate(history["content"])}
        found.preempting = found.preempting or bool(sent.get("preempting"))
        if sent.get("complete"):
            found.exit_code = sent.get("exitcode")


ENTITY = {"id": "e", "name": "me"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        """Nothing: the tests look at what was received."""

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            asked = json.loads(data)
            if self.server.silent.is_set() and "name" in (asked.get("variables") or {}):
                time.sleep(30)
            answer = {"data": self.server.graphql(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(data))
        self.answer(answer)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.answer({})

    def do_GET(self) -> None:
        self.answer({})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(503 if self.server.down else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve(patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that runs, with the environment that leads wandb to it."""
    wandb.teardown()  # it keeps the address of the first server that it has seen in a process
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    patch.setenv("WANDB_BASE_URL", server.url)
    patch.setenv("WANDB_API_KEY", KEY)
    patch.setenv("NO_PROXY", "127.0.0.1")
    patch.delenv("WANDB_MODE", raising=False)
    try:
        yield server
    finally:
        wandb.teardown()
        server.shutdown()
        server.server_close()
