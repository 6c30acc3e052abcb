import json
import random

import pytest

from data_pipeline.sources.text_files import TextFiles
from data_pipeline.tokens.datamodule import TextData
from data_pipeline.tokens.tokenizer import ByteLevelBPE

TEXT = "the forget gate decays what a token wrote long ago so that softmax attention may let it go é — 日本 🜁"
WORDS = TEXT.split(" ")


def sentences(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(words))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Write a folder of 300 short documents in one JSON-lines file."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": sentences(n, 5 + n % 90), "id": f"doc{n}"}) for n in range(300)]
    (folder / "part.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def make_data(corpus, data_dir):
    """Return small TextData over the corpus; keyword arguments override its settings."""

    def make(**settings):
        defaults = {
            "source": TextFiles(str(corpus)),
            "tokenizer": ByteLevelBPE(vocab_size=400),
            "data_dir": data_dir,
            "block_length": 64,
            "sequence_length": 32,
            "validation_length": 64,
            "batch_tokens": 256,
            "micro_batch_size": 2,
            "validation_fraction": 0.2,
            "processes": 1,
        }
        return TextData(**{**defaults, **settings})

    return make
