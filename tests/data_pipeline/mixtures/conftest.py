import functools
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.documents import SCHEMA
from data_pipeline.mixtures.datamodule import MixtureData
from data_pipeline.tokens.tokenizer import ByteLevelBPE

WORDS = {
    "debug": ["trace", "crash", "stack", "core", "fault", "segment", "abort", "signal"],
    "design": ["cache", "queue", "shard", "quorum", "lease", "replica", "ledger", "log"],
    "commands": ["grep", "sed", "awk", "find", "xargs", "cut", "sort", "uniq"],
    "rewritten": ["lesson", "chapter", "therefore", "summary", "exercise", "answer"],
}


def documents(kind: str, number: int, words: int = 60) -> list[str]:
    draw = random.Random(f"{kind} {number}")
    return [f"{kind} {n}: " + " ".join(draw.choices(WORDS[kind], k=words)) for n in range(number)]


def write_parquet(path: Path, texts: list[str | None], splits: list[str], **columns: list) -> Path:
    """Write a file of the documents' schema, in row groups of 8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {"id": [f"{path.stem}/{n}" for n in range(len(texts))], "text": texts, "split": splits}
    table = pa.table({name: (rows | columns).get(name, [None] * len(texts)) for name in SCHEMA.names}, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=8)
    return path


def write_corpus(folder: Path, sizes: dict[str, tuple[int, int]]) -> Path:
    """Write a corpus like `job=corpus`: category -> (training documents, held-out documents)."""
    for category, (train, held_out) in sizes.items():
        texts = documents(category, train + held_out)
        parts = {"train-00000-00000": texts[: train // 2], "train-00001-00000": texts[train // 2 : train]}
        for name, part in (parts | {"validation-00000-00000": texts[train:]}).items():
            if part:
                path = folder / "documents" / category / f"{name}.parquet"
                write_parquet(path, part, [name.partition("-")[0]] * len(part))
    (folder / "manifest.json").write_text(json.dumps({"categories": list(sizes)}))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    sizes = {"commands": (12, 2), "debug": (60, 8), "design": (30, 5)}
    return write_corpus(tmp_path_factory.mktemp("corpus"), sizes)


@pytest.fixture(scope="session")
def mixture_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture(scope="session")
def make_mixture(corpus, mixture_dir):
    """Return small MixtureData over the corpus; keyword arguments override its settings."""
    defaults = {
        "corpus": str(corpus),
        "tokenizer": ByteLevelBPE(vocab_size=300),
        "max_tokens": 8192,
        "data_dir": mixture_dir,
        "block_length": 64,
        "sequence_length": 32,
        "validation_length": 64,
        "batch_tokens": 256,
        "micro_batch_size": 2,
        "processes": 1,
    }
    return lambda **settings: functools.partial(MixtureData, **defaults)(**settings)
