"""Tokens per second of `job=rewrite` with an in-process model: `python -m benchmarks.data.rewriting_rate text`.

The whole job runs (prompts, screens, journal and shards) on random weights of a Llama's shape: the answers are noise,
so each has the maximum length, and the screens drop it. The clock starts when the weights are loaded. The job's cost
without the model is reported separately: it bounds the rate with a faster server.
"""

import json
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import transformers
from omegaconf import OmegaConf

from benchmarks.linearization.random_llama import random_llama
from benchmarks.measuring.configuration import compose
from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import default_device
from data_pipeline.documents import Problems, ShardWriter
from data_pipeline.fingerprint import MANIFEST
from data_pipeline.rewriting.backends.in_process import InProcess
from data_pipeline.rewriting.job import rewrite
from data_pipeline.rewriting.plan import read_plan
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.tokens.tokenizer import ByteLevelBPE

SHAPES = {  # layers, hidden, FFN, heads, key/value heads
    "135M": (30, 576, 1536, 9, 3),
    "1B": (16, 2048, 8192, 32, 8),
    "8B": (32, 4096, 14336, 32, 8),
}


class Timed(InProcess):
    """Measures the seconds of generation, and the seconds since the model was loaded."""

    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        """Load the model, and start the clock."""
        await super().start(folder, requests, tokens)
        self.generating, self.started = 0.0, time.perf_counter()

    def _generate(self, requests: list) -> list:
        start = time.perf_counter()
        try:
            return super()._generate(requests)
        finally:
            self.generating += time.perf_counter() - start


def write_documents(paths: list[str], count: int, characters: int, folder: Path) -> Path:
    """Write the first `count` documents that have at least `characters` characters, cut to that length."""
    folder.mkdir()
    writer = ShardWriter(folder, "train")
    documents = TextFiles(paths).documents(Problems(), 1)
    for document in islice((d for d in documents if len(d.text) >= characters), count):
        text = document.text[:characters]
        writer.write(type(document)(text, document.id, document.metadata), len(text.encode()))
    writer.close()
    (folder / MANIFEST).write_text(json.dumps({"train": {"bytes": writer.bytes}}))
    return folder


def save_model(shape: str, documents: Path, folder: Path) -> Path:
    """Save random weights in bfloat16, and a tokenizer trained on the documents."""
    layers, hidden, feed_forward, heads, key_value_heads = SHAPES[shape]
    tokenizer = ByteLevelBPE(32768).build(documents)
    tokenizer.eos_token = None  # every answer has the maximum length
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    random_llama(config, default_device(), torch.bfloat16).save_pretrained(folder)
    return folder


def measure(documents: Path, model: Path, batch_size: int, output: Path) -> list[str]:
    """Rewrite the documents and return a row of the table."""
    places = [f"rewrite.input={documents}", f"rewrite.output={output}", f"rewrite.backend.model={model}"]
    chosen = compose("job=rewrite", "rewrite/style=[rephrase_plain]", "rewrite.attempts=1", *places)
    settings = OmegaConf.to_container(chosen.rewrite, resolve=True)
    backend = Timed(model=str(model), batch_size=batch_size)
    total = rewrite(read_plan(settings), backend, settings["backend"])["total"]
    seconds = time.perf_counter() - backend.started
    counts = [f"{total[key]:,}" for key in ("requests", "tokens_in", "tokens_out")]
    rate = f"{total['tokens_out'] / seconds:,.0f}"
    return [model.name, str(batch_size), *counts, rate, f"{1 - backend.generating / seconds:.1%}"]


def main() -> None:
    """Measure, print the table, and write it to a folder."""
    parser = CommandLine(__doc__)
    parser.add_argument("text", nargs="+", help="files or folders of text: .txt .md .jsonl .parquet")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135M", "1B"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--characters", type=int, default=1500, help="of each document")
    arguments = parser.parse_for_gpu()
    rows, length = [], arguments.characters
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        vocabulary = write_documents(arguments.text, 512, 2000, scratch / "vocabulary")
        for shape in arguments.shapes:
            model = save_model(shape, vocabulary, scratch / shape)
            for size in arguments.batch_sizes:
                documents = write_documents(
                    arguments.text, arguments.batches * size, length, scratch / f"{shape}-{size}"
                )
                rows.append(measure(documents, model, size, scratch / f"{shape}-{size}-out"))
                print(json.dumps(rows[-1]))
    header = ["model", "at once", "answers", "tokens in", "tokens out", "tokens out / s", "beside the model"]
    about = f"{measured_on('torch', 'transformers')}. By `python -m benchmarks.data.rewriting_rate`."
    publish(
        arguments.output / "rewriting_rate.md",
        page("Rewriting with a model in process", about, table(header, rows)),
    )


if __name__ == "__main__":
    main()
