"""A server with scripted answers, documents to rewrite, and a plan with the shipped screens."""

import collections
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data_pipeline.rewriting.backends.endpoint import Endpoint
from data_pipeline.rewriting.job import rewrite
from data_pipeline.rewriting.plan import read_plan

CONF = Path(__file__).resolve().parents[3] / "conf" / "rewrite"
STYLE = {"system": "Rephrase.", "user": "$text", "max_tokens_ratio": 2.0}
TEXT = (
    "Document DOC{n}. The scheduler of node{n} moves a waiting process to another core when its queue holds more than "
    "{n}00 entries for 250 ms. Set `sched_migration_cost` in /etc/sysctl.d/{n}0-sched.conf and run the tool with "
    "--reload afterwards, then look at the counters of CPU_QUEUE_{n} for an hour before you change anything else."
)


def swapped(text: str) -> str:
    """Rewrite a text without copying any run of words: swap neighbouring words."""
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return " ".join(word for pair in pairs for word in reversed(pair)) + (f" {words[-1]}" if len(words) % 2 else "")


def named(text: str) -> str:
    """Return the name of the test's document in a prompt."""
    return re.search(r"DOC\d+", text).group()


@dataclass
class ScriptedServer:
    """Answers chat requests on loopback; `script(name, n)` gives the answer to the n-th request for a document."""

    script: object = lambda name, n: "good"
    key: str | None = None
    delay: float = 0.0
    hang: float = 2.5
    port: int = 0
    asked: collections.Counter = field(default_factory=collections.Counter)
    paid: collections.Counter = field(default_factory=collections.Counter)
    kinds: collections.Counter = field(default_factory=collections.Counter)
    seeds: dict = field(default_factory=lambda: collections.defaultdict(list))
    in_flight: int = 0
    most_in_flight: int = 0
    dead: bool = False

    def __enter__(self):
        server = self
        self.lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                self.reply(503 if server.dead else 200, {"object": "list", "data": []})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.answer(self, body)

            def reply(self, status, body, headers=(), cut=0):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) - cut])
                if cut:
                    self.close_connection = True

            def log_message(self, *args):
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256  # all clients come at once

            def handle_error(self, request, client_address):
                pass  # clients are killed here

        self.http = Http(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, handler, body):
        text = body["messages"][-1]["content"]
        name = named(text)
        with self.lock:
            self.asked[name] += 1
            kind = "500" if self.dead else self.script(name, self.asked[name])
            self.kinds[kind] += 1
            self.seeds[name].append(body["seed"])
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        time.sleep(self.delay)
        try:
            self.send(handler, kind, name, text)
        except OSError:
            handler.close_connection = True  # whoever asked has gone
        finally:
            with self.lock:
                self.in_flight -= 1

    def send(self, handler, kind, name, text):
        if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
            sent = handler.headers["Authorization"]
            return handler.reply(401, {"error": {"message": f"Incorrect API key provided: {sent}"}})
        if kind == "429":
            return handler.reply(429, {"error": {"message": "slow down"}}, [("Retry-After", "0.05")])
        if kind.isdigit():
            return handler.reply(int(kind), {"error": {"message": f"scripted {kind}"}})
        if kind == "hang":
            time.sleep(self.hang)
            handler.close_connection = True
            return None
        if kind == "no_json":
            return handler.reply(200, b'{"choices": [{"message": {"content": "half')
        if kind == "other_json":
            return handler.reply(200, {"choices": []})
        contents = {"empty": "", "refusal": "I'm sorry, but I can't help with that.", "good": swapped(text)}
        content = contents.get(kind, kind)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        if kind != "cut":
            with self.lock:
                self.paid[name] += 1
        return handler.reply(200, body, cut=20 if kind == "cut" else 0)


@pytest.fixture
def server():
    with ScriptedServer() as running:
        yield running


def write_corpus(folder: Path, documents: int, text: str = TEXT) -> Path:
    """Write documents DOC0, DOC1, ... in Parquet files of 64, in row groups of 16."""
    folder.mkdir()
    for first in range(0, documents, 64):
        numbers = range(first, min(first + 64, documents))
        columns = {
            "id": [f"forum:{n}" for n in numbers],
            "text": [text.format(n=n) for n in numbers],
            "category": ["debug"] * len(numbers),
            "licence": ["CC-BY-SA-4.0"] * len(numbers),
            "source": ["forum"] * len(numbers),
        }
        pq.write_table(pa.table(columns), folder / f"part-{first:05d}.parquet", row_group_size=16)
    return folder


def settings_for(source: Path, output: Path, **changes) -> dict:
    """Return the settings of conf/job/rewrite.yaml, small, with one style and the shipped screens."""
    return {
        "input": str(source),
        "output": str(output),
        "part_characters": 2000,
        "context_characters": 200,
        "max_document_characters": 100_000,
        "attempts": 3,
        "chunk_documents": 32,
        "tasks": 1,
        "seed": 0,
        "strict": False,
        "styles": {"short": STYLE},
        "screens": yaml.safe_load((CONF / "screens" / "technical.yaml").read_text()),
        **changes,
    }


def run_rewriting(source: Path, output: Path, server, backend=(), **changes) -> dict:
    """Rewrite with the scripted server and short timeouts; `backend` are settings of the endpoint."""
    quick = {"model": "m", "timeout_s": 1.0, "backoff_s": 0.01, "concurrency": 16, **dict(backend)}
    endpoint = Endpoint(base_url=server.url, **quick)
    return rewrite(read_plan(settings_for(source, output, **changes)), endpoint, quick)


def rows_of(output: Path) -> list[dict]:
    """Return the rows of all shards, in order."""
    return [row for path in sorted((output / "shards").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def left_out_of(output: Path) -> dict[str, list[str]]:
    """Return the reasons of each rejected document by id."""
    lines = (line for p in sorted((output / "left_out").glob("*.jsonl")) for line in p.read_text().splitlines())
    return {entry["id"]: entry["reasons"] for entry in map(json.loads, lines)}
