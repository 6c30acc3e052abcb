"""Documents whose words give their label, a server that labels them, and stages run like the executors."""

import json
import pickle
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from datatrove.data import Document

from data_pipeline.cleaning.duplicates import PipelineStage
from data_pipeline.labels import classifier, labels, report
from data_pipeline.rewriting.backends.endpoint import Endpoint

CONF = Path(__file__).resolve().parents[3] / "conf"
RUBRIC = yaml.safe_load((CONF / "labels" / "rubric" / "systems.yaml").read_text())
WORDS = {
    "commands": "option flag usage synopsis prints lists directory recursive verbose argument",
    "debug": "error crash trace failed timeout kernel panic segfault retry log",
    "design": "architecture capacity cost latency replicas decision budget scale review plan",
}
GOOD = "because therefore measured example explains"
BAD = "click cookie subscribe newsletter banner"


def make_documents(count: int, seed: int = 0) -> list[Document]:
    """Return documents of three categories in turn, of quality 0 to 5 by the share of good words."""
    draw = random.Random(seed)
    documents = []
    for number in range(count):
        category, quality = sorted(WORDS)[number % 3], draw.randint(0, 5)
        words = draw.choices(WORDS[category].split(), k=30)
        words += draw.choices(GOOD.split(), k=4 * quality) + draw.choices(BAD.split(), k=4 * (5 - quality))
        draw.shuffle(words)
        about = {"source": "forum", "category": category}
        documents.append(
            Document(" ".join([f"DOC{number}q{quality}{category}", *words]), f"forum:{number}", metadata=about)
        )
    return documents


class Labeller:
    """An OpenAI-like server on loopback that knows each document's label; `script(name, n)` may override it."""

    def __init__(self) -> None:
        self.script = lambda name, n: None
        self.asked: Counter[str] = Counter()
        self.seeds: dict[str, set[int]] = {}
        self.status = 200
        self._lock = threading.Lock()

    def __enter__(self) -> "Labeller":
        labeller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = labeller.answer(body)
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
                reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                data = json.dumps({**reply, "choices": [choice], "usage": usage}).encode()
                self.send_response(labeller.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.send_error(labeller.status)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, body: dict) -> str:
        name, quality, category = re.search(r"DOC(\d+)q(\d)([a-z]+)", body["messages"][-1]["content"]).groups()
        with self._lock:
            self.asked[name] += 1
            self.seeds.setdefault(name, set()).add(body["seed"])
            scripted = self.script(name, self.asked[name])
        if scripted is not None:
            return scripted
        return json.dumps({"reason": "as it says", "category": category, "quality": int(quality)})

    def backend(self, **settings: object) -> Endpoint:
        url = f"http://127.0.0.1:{self.http.server_port}/v1"
        quick = {"timeout_s": 5.0, "backoff_s": 0.01, "tries": 2, "concurrency": 8, **settings}
        return Endpoint(base_url=url, model="m", **quick)


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a smaller classifier, which trains and saves faster."""
    monkeypatch.setattr(classifier, "FEATURES", 2**13)
    classifier._vectorizer.cache_clear()
    yield
    classifier._vectorizer.cache_clear()


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the requested pictures instead of drawing them, which is slow."""
    names: list[str] = []
    monkeypatch.setattr(report, "draw", lambda path, *about: names.append(path.name))
    return names


@pytest.fixture
def labeller():
    with Labeller() as running:
        yield running


def make_stages(
    tmp_path: Path, labeller: Labeller, tasks: int = 2, name: str = "corpus", **settings
) -> list[PipelineStage]:
    """Return the stages over a store shared by all corpora of a test."""
    backend = settings.pop("backend", None) or labeller.backend()
    given = {"rubric": RUBRIC, "documents": 100, "store": str(tmp_path / "store"), **settings}
    return labels(str(tmp_path / name), tasks, backend=backend, **given)


def run(stages: list[PipelineStage], documents: list[Document]) -> list[Document]:
    """Run stages like the executors: every task separately, from a pickled step."""
    given: list[Document] = []
    for stage in stages:
        for rank in range(stage.tasks):
            [step] = pickle.loads(pickle.dumps(stage.steps))
            mine = (pickle.loads(pickle.dumps(d)) for d in documents[rank :: stage.tasks]) if stage.reads else None
            given += step.run(mine, rank, stage.tasks) or ()
    return given
