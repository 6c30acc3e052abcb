import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_pipeline.cleaning.duplicates import exact_documents, near_duplicates
from data_pipeline.cleaning.masks import Masks
from data_pipeline.cleaning.spans import exact_spans
from data_pipeline.corpus.layout import Layout
from data_pipeline.corpus.plan import phases
from data_pipeline.corpus.recipe import Recipe
from data_pipeline.executors import Local
from data_pipeline.job_folder import JobFolder
from data_pipeline.sources.text_files import TextFiles

NOUNS = ["the kernel", "a page", "this socket", "the scheduler", "an inode", "the driver", "a mutex", "the journal"]
VERBS = ["maps", "locks", "frees", "reads", "schedules", "flushes", "polls", "mounts"]
DUPLICATE, SECRET = "doc3", "doc5"


def prose(seed: int, sentences: int = 12) -> str:
    draw = random.Random(seed)
    return "\n".join(
        f"In case {draw.randrange(10**6)} {draw.choice(NOUNS)} {draw.choice(VERBS)} {draw.choice(NOUNS)} "
        f"when {draw.choice(NOUNS)} {draw.choice(VERBS)} it, and that is the end of it."
        for _ in range(sentences)
    )


def write_texts(folder: Path, documents: int = 60, files: int = 3) -> Path:
    """Write JSON lines: a duplicate text, an e-mail address, an invalid JSON line, an invalid UTF-8 text."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"id": f"doc{n}", "text": prose(n), "date": f"2024-{1 + n % 12:02d}-03"}) for n in range(documents)
    ]
    lines.append(json.dumps({"id": "again", "text": prose(3)}))
    lines[5] = json.dumps({"id": SECRET, "text": prose(5) + "\nWrite to somebody@somewhere.org about it."})
    lines += ["{broken", json.dumps({"id": "surrogate", "text": "a lone \ud800 in it"})]
    for number in range(files):
        (folder / f"{number}.jsonl").write_text("\n".join(lines[number::files]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def make_recipe(output: Path, *paths: Path, cleaning: dict | None = None, **settings) -> Recipe:
    cleaned = {
        "masks": Masks(),
        "exact_documents": exact_documents,
        "near_duplicates": near_duplicates,
        "exact_spans": exact_spans,
    }
    defaults = {
        "output": str(output),
        "sources": {path.name: TextFiles(str(path)) for path in paths},
        "cleaning": cleaned if cleaning is None else cleaning,
        "categories": {},
        "tasks": 2,
        "validation_fraction": 0.2,
        "samples": 3,
        "bytes_per_token": 4.0,
        "most_skipped": 0.5,
        "strict": False,
    }
    return Recipe(**{**defaults, **settings})


def build(recipe: Recipe, workers: int = 1) -> dict:
    """Run all phases, and return the manifest."""
    folder = JobFolder(recipe.output, "corpus")
    folder.begin({})
    Local(workers).run(phases(recipe), Layout(folder.path).logs, folder.key)
    return json.loads(folder.manifest.read_text())


def rows_of(output: Path) -> list[dict]:
    return [
        row for path in sorted(Path(output, "documents").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
