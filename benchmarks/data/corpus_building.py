"""`job=corpus` against the same datatrove steps by hand, and how its cost scales with the input.

`python -m benchmarks.data.corpus_building text/*.jsonl` (or a folder; text, not WARC files). "By hand" is a script with
datatrove alone: its executor, readers and writers, and the same steps in the same pipelines, without the record of
removals, the split by text, the card and the manifest. Runs alternate; the table gives medians.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from data_pipeline.documents import Problems
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.workers import available_processes

TASKS = 16
FILES = 16
PR_SET_CHILD_SUBREAPER = 36
RECIPE = """
defaults:
  - base
  - /source@sources.text: text_files
  - /cleaning@cleaning.language: language
  - /cleaning@cleaning.quality: quality
  - /cleaning@cleaning.masks: masks
  - /cleaning@cleaning.exact_documents: exact_documents
  - /cleaning@cleaning.near_duplicates: near_duplicates
  - /cleaning@cleaning.exact_spans: exact_spans
  - _self_
"""


def write_input(paths: list[str], folder: Path, size: int) -> int:
    """Write about `size` bytes of the documents in `paths` as FILES files of JSON lines; return the bytes of text."""
    folder.mkdir()
    outputs = [(folder / f"{number:02d}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
    written = 0
    for number, document in enumerate(TextFiles(paths).documents(Problems(), 1)):
        record = {"id": document.id, "text": document.text}
        print(json.dumps(record, ensure_ascii=False), file=outputs[number % FILES])
        written += len(document.text.encode())
        if written >= size:
            break
    for output in outputs:
        output.close()
    if written < 0.9 * size:
        raise SystemExit(
            f"{' '.join(paths)}: {written / 1e6:.0f} MB of text; give {size / 1e6:.0f} MB, or a lesser --megabytes"
        )
    return written


def by_job(text: Path, out: Path, workers: int, recipes: Path) -> None:
    """Build a corpus with the command."""
    command = [sys.executable, "-m", "palimpsest", "job=corpus", "corpus=measured", f"corpus.output={out}"]
    settings = [f"corpus.sources.text.path={text}", f"corpus.tasks={TASKS}", f"executor.workers={workers}"]
    _measured([*command, *settings, f"hydra.searchpath=[file://{recipes}]"])


def by_hand(text: Path, out: Path, workers: int) -> None:
    """Build the same corpus with a script of datatrove's steps."""
    _measured([sys.executable, "-m", "benchmarks.data.corpus_by_hand", str(text), str(out), str(TASKS), str(workers)])


def _measured(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")


def measure(run: object, *arguments: object) -> tuple[float, float]:
    """Return wall-clock seconds and CPU seconds of a run and all its processes."""
    # A pool leaves orphans, whose CPU time counts only for the process that reaps them: reap them here (Linux).
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run(*arguments)
    seconds = time.perf_counter() - start
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def overhead(text: Path, scratch: Path, recipes: Path, workers: int, repeats: int) -> tuple[str, list[float]]:
    """Return the table of both, and the ratios of their medians: wall-clock and CPU time."""
    runs = {"datatrove's steps by hand": (by_hand,), "job=corpus": (by_job, recipes)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    documents = {}
    for _ in range(repeats):
        for name, (run, *more) in runs.items():
            out = scratch / "out"
            found[name].append(measure(run, text, out, workers, *more))
            documents[name] = _bytes_kept(out)
            shutil.rmtree(out)
    if len(set(documents.values())) != 1:
        raise SystemExit(f"they did not keep the same text: {documents}")
    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in found.items()
    }
    base = medians["datatrove's steps by hand"]
    lines = [
        [name, f"{seconds:.1f}", f"{seconds / base[0]:.3f}", f"{cpu:.1f}", f"{cpu / base[1]:.3f}"]
        for name, (seconds, cpu) in medians.items()
    ]
    return table(["", "seconds", "ratio", "processor s", "ratio"], lines), [
        a / b for a, b in zip(medians["job=corpus"], base, strict=True)
    ]


def _bytes_kept(out: Path) -> int:
    import pyarrow.parquet as pq

    paths = sorted((out / "documents").rglob("*.parquet"))
    return sum(
        len(text.encode()) for path in paths for text in pq.read_table(path, columns=["text"])["text"].to_pylist()
    )


def scaling(paths: list[str], scratch: Path, recipes: Path, workers: int, size: int) -> str:
    """Return the table of the job on 1, 4 and 16 times `size` bytes of text."""
    lines = []
    for times in (1, 4, 16):
        text, out = scratch / f"text-{times}", scratch / f"out-{times}"
        written = write_input(paths, text, times * size)
        seconds, cpu = measure(by_job, text, out, workers, recipes)
        peaks = _peaks(out)
        worst = max(peaks, key=peaks.get)
        read = max(peak for phase, peak in peaks.items() if phase.endswith("-read"))
        cells = f"{written / 1e6:.1f}", f"{seconds:.0f}", f"{cpu / written * 1e6:.2f}", f"{read / 1e6:.0f}"
        lines.append([times, *cells, f"{peaks[worst] / 1e6:.0f} ({worst.partition('-')[2]})"])
        shutil.rmtree(text)
        shutil.rmtree(out)
    header = ["times", "MB of text", "seconds", "processor s / MB", "peak MB, read", "peak MB, greatest"]
    return table(header, lines)


def _peaks(out: Path) -> dict[str, int]:
    """Return the peak memory of any task of each phase, in bytes."""
    found: dict[str, int] = {}
    for path in (out / "logs").glob("*/resources/*.json"):
        phase = path.parent.parent.name
        found[phase] = max(found.get(phase, 0), json.loads(path.read_text())["peak_rss_bytes"])
    return found


def main() -> None:
    """Measure, print the tables, and write them to a file."""
    parser = CommandLine(__doc__)
    parser.add_argument("text", nargs="+", help="files or folders of text: .txt .md .jsonl .parquet")
    parser.add_argument("--megabytes", type=float, default=20, help="of text, for the comparison (10^6 bytes)")
    parser.add_argument("--least", type=float, default=5, help="megabytes at 1 of the scaling")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    workers = available_processes()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        recipes = scratch / "recipes"
        (recipes / "corpus").mkdir(parents=True)
        (recipes / "corpus" / "measured.yaml").write_text(RECIPE)
        text = scratch / "text"
        written = write_input(arguments.text, text, int(arguments.megabytes * 1e6))
        compared, ratios = overhead(text, scratch, recipes, workers, arguments.repeats)
        scaled = scaling(arguments.text, scratch, recipes, workers, int(arguments.least * 1e6))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {workers} workers, {TASKS} tasks; Python "
    machine += platform.python_version()
    text = page(
        "Building a corpus",
        f"{measured_on('datatrove', machine=machine)}. By `python -m benchmarks.data.corpus_building`.",
        f"{written / 1e6:.1f} MB of text, {arguments.repeats} alternating runs each, medians; language, quality, "
        "masks, exact and near duplicates, exact spans:",
        compared,
        f"Overhead: {ratios[0] - 1:+.1%} of the time, {ratios[1] - 1:+.1%} of the processor time.",
        "Over the size of the input, one run each:",
        scaled,
    )
    publish(arguments.output / "corpus_building.md", text)


if __name__ == "__main__":
    main()
