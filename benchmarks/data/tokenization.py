"""Tokenization, the whole stage against the bare encoder: `python -m benchmarks.data.tokenization`.

The stage reads Parquet, encodes in parallel, packs and writes Arrow; the bare encoder is `encode_batch_fast` of
`tokenizers` on all cores with the texts already in memory and its tokens discarded. Both use the same tokenizer, text
and cores and alternate; the table gives medians. It also gives CPU time over all processes, which other work on the
machine hardly affects.
"""

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from data_pipeline.documents import SPLITS, texts
from data_pipeline.sources.local_docs import LocalDocs
from data_pipeline.tokens.blocks import write_blocks
from data_pipeline.tokens.datamodule import TextData
from data_pipeline.tokens.tokenizer import ByteLevelBPE
from data_pipeline.workers import available_processes


def bare_encoder(tokenizer: tokenizers.Tokenizer, documents: list[str]) -> int:
    """Return the number of tokens of one pass of the batch encoder; its word cache is cold, as in a separate stage."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    return sum(map(len, tokenizer.encode_batch_fast(documents, add_special_tokens=False)))


def whole_stage(data: TextData, documents_folder: Path, processes: int) -> int:
    """Return the number of tokens of the stage, including process start and closing files."""
    with tempfile.TemporaryDirectory() as folder:
        counts = write_blocks(documents_folder, data.hf_tokenizer, Path(folder), data.block_length, processes)
    return sum(counts[split]["tokens"] for split in SPLITS)


def measure(run: Callable[[], int]) -> tuple[float, float]:
    """Return tokens per second, and CPU seconds per million tokens of this process and its children."""
    start, processor = time.perf_counter(), sum(os.times()[:4])
    tokens = run()
    return tokens / (time.perf_counter() - start), (sum(os.times()[:4]) - processor) / tokens * 1e6


def main() -> None:
    """Measure, print the table, and write it to a file."""
    parser = CommandLine(__doc__)
    parser.add_argument("--megabytes", type=int, default=20, help="of local documentation (10^6 bytes)")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    processes = available_processes()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        source = LocalDocs(max_bytes=arguments.megabytes * 10**6)
        data = TextData(source=source, tokenizer=ByteLevelBPE(16384), data_dir=folder)
        data.prepare()
        documents_folder = next(Path(folder).glob("documents-*"))
        in_memory = [text for split in SPLITS for text in texts(documents_folder, split)]
        tokenizer = data.hf_tokenizer.backend_tokenizer
        runs = {
            "bare encoder": lambda: bare_encoder(tokenizer, in_memory),
            "whole stage": lambda: whole_stage(data, documents_folder, processes),
        }
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(arguments.repeats):
            for name, run in runs.items():
                measured[name].append(measure(run))
    size = sum(len(text.encode()) for text in in_memory)
    publish(arguments.output / "tokenization.md", report(measured, size, processes))


def report(measured: dict[str, list[tuple[float, float]]], size: int, processes: int) -> str:
    """Return the Markdown report."""
    rows, bare = [], statistics.median(rate for rate, _ in measured["bare encoder"])
    for name, values in measured.items():
        rates, processor = zip(*values, strict=True)
        median = statistics.median(rates)
        span = f"{min(rates) / 1e6:.2f} to {max(rates) / 1e6:.2f}"
        rows.append([name, f"{median / 1e6:.2f}", span, f"{median / bare:.0%}", f"{statistics.median(processor):.2f}"])
    machine = f"{platform.machine()}, {processes} cores; Python {platform.python_version()}"
    return page(
        "Tokenization",
        f"{measured_on('tokenizers', 'datasets', 'pyarrow', machine=machine)}. {size / 1e6:.1f} MB of local "
        f"documentation, byte-level BPE of 16384 tokens, {len(measured['bare encoder'])} alternating runs each. By "
        "`python -m benchmarks.data.tokenization`.",
        table(["", "M tokens/s, median", "range", "of the bare encoder", "processor s / M tokens"], rows),
        "The bare encoder is `encode_batch_fast` with the texts in memory; its tokens are not even taken out. "
        "The whole stage starts its processes, reads Parquet, encodes, packs and writes Arrow.",
    )


if __name__ == "__main__":
    main()
