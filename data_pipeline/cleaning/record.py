"""Record of what each cleaning step removed, and why: counts and samples, a JSON file per task, merged at the end."""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.atomic_files import write_atomic
from data_pipeline.cleaning.masks import mask
from data_pipeline.executors.timed_step import PROCESSOR_SECONDS, StepTimer

SAMPLE_CHARACTERS = 2_000  # kept of a sampled document, from the beginning
BYTES_PER_TOKEN = 4.0  # of English text with code, in common vocabularies
# Statistics that are known already, or not useful here.
UNCOUNTED = ("total", "forwarded", "dropped", "doc_len", "doc_len_tokens", PROCESSOR_SECONDS)


class Recorded(PipelineStep):
    """Wrapper of a step that records what it does in `folder/name/<task>.json`; the step's behaviour does not change.

    Incoming and outgoing documents and bytes are counted by metadata "source", dropped ones also by reason: metadata
    "filter_reason" as datatrove's filters write it, else the step's name. Steps report dropped documents through
    `exclusion_writer`; a step's existing writer is still called. Of the kept and of the dropped documents, `samples`
    each are recorded, with credentials and addresses masked: those whose ids have the lowest hashes, so that the
    selection depends neither on order nor on the number of tasks. `position`: the step's position in the report.
    """

    type = "RECORDED"

    def __init__(self, step: PipelineStep, folder: str, name: str, position: int = 0, samples: int = 20) -> None:
        super().__init__()
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"corpus.cleaning.record: {name!r} cannot name a folder; give a plain word")
        self.step, self.folder, self.name = step, str(folder), name
        self.position, self.samples = position, samples
        self.stats = step.stats  # the executor reports the step's statistics, under the name given here
        self.stats.name = f"{step.type}: {name}"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Run the step, and write the record after the last document."""
        tally, before = _Tally(self.name, self.samples), _counts(self.step)
        waited, passed = StepTimer(), StepTimer()
        writer = getattr(self.step, "exclusion_writer", None)
        self.step.exclusion_writer = _Exclusions(tally, writer)
        try:
            for document in passed.measured(self.step.run(tally.arriving(waited.measured(data)), rank, world_size)):
                tally.kept(document)
                yield document
        finally:
            self.step.exclusion_writer = writer
        self.stat_update(PROCESSOR_SECONDS, value=passed.seconds - waited.seconds, unit="task")
        record = {"name": self.name, "position": self.position, "task": rank, "tasks": world_size, **tally.record()}
        record["counts"] = {label: count - before.get(label, 0) for label, count in _counts(self.step).items()}
        path = Path(self.folder, self.name, f"{rank:05d}.json")
        write_atomic(path, _json(record))


class _Tally:
    """Counts and samples of one task."""

    def __init__(self, name: str, samples: int) -> None:
        self.name = name
        self.arrived: Counter[tuple[str, str]] = Counter()  # (source, "documents" or "bytes")
        self.left: Counter[tuple[str, str]] = Counter()
        self.removed: Counter[tuple[str, str, str]] = Counter()  # (reason, source, ...)
        self.kept_samples, self.dropped_samples = _Samples(name, samples), _Samples(name, samples)

    def arriving(self, data: DocumentsPipeline) -> Iterator[Document]:
        for document in data:
            source = _source(document)
            self.arrived[source, "documents"] += 1
            self.arrived[source, "bytes"] += _bytes(document)
            yield document

    def kept(self, document: Document) -> None:
        source = _source(document)
        self.left[source, "documents"] += 1
        self.left[source, "bytes"] += _bytes(document)
        self.kept_samples.offer(document)

    def dropped(self, document: Document) -> None:
        reason, source = str(document.metadata.get("filter_reason") or self.name), _source(document)
        self.removed[reason, source, "documents"] += 1
        self.removed[reason, source, "bytes"] += _bytes(document)
        self.dropped_samples.offer(document, reason)

    def record(self) -> dict:
        return {
            "in": _nested(self.arrived),
            "out": _nested(self.left),
            "removed": _nested(self.removed),
            "kept_samples": self.kept_samples.sorted(),
            "dropped_samples": self.dropped_samples.sorted(),
        }


class _Exclusions:
    """Exclusion writer for a filter: counts each document, and forwards it to the filter's previous writer."""

    def __init__(self, tally: _Tally, writer: DiskWriter | None) -> None:
        self._tally, self._writer = tally, writer

    def write(self, document: Document, rank: int = 0, **arguments: object) -> None:
        self._tally.dropped(document)
        if self._writer is not None:
            self._writer.write(document, rank, **arguments)

    def __enter__(self) -> "_Exclusions":
        if self._writer is not None:
            self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)


class _Samples:
    """The `count` documents whose ids have the lowest hashes."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self._heap: list[tuple[int, str, dict]] = []  # negative hash: the highest hash is popped first

    def offer(self, document: Document, reason: str | None = None) -> None:
        rank = -int.from_bytes(hashlib.sha256(f"{self.name}\0{document.id}".encode(errors="replace")).digest()[:8])
        full = len(self._heap) >= self.count
        if self.count == 0 or (full and rank <= self._heap[0][0]):
            return
        sample = {"id": document.id, "source": _source(document), "category": document.metadata.get("category")}
        if reason is not None:
            sample["reason"] = reason
        # Twice the length: a cut key would escape the patterns that mask it.
        sample["text"] = mask(document.text[: 2 * SAMPLE_CHARACTERS])[0][:SAMPLE_CHARACTERS]
        sample["length"] = len(document.text)
        entry = (rank, document.id, {"hash": f"{-rank:016x}", **sample})
        heapq.heapreplace(self._heap, entry) if full else heapq.heappush(self._heap, entry)

    def sorted(self) -> list[dict]:
        return [sample for _, _, sample in sorted(self._heap, key=lambda entry: (-entry[0], entry[1]))]


def merge_records(folder: str | Path, samples: int = 20, bytes_per_token: float = BYTES_PER_TOKEN) -> dict:
    """Return the sum of all tasks' records under `folder`, and write it there as merged.json.

    {"steps": [{"name", "in", "out": {"documents", "bytes", "tokens"}, "sources": {source: {"in", "out"}},
    "reasons": {reason: {"documents", "bytes", "tokens", "sources": {source: ...}}}, "counts": {label: number},
    "kept_samples", "dropped_samples"}]}, steps by position. Tokens are estimated from bytes.

    Raises:
        ValueError: the record of a task is missing.
    """
    steps = [_merge_step(path, samples, bytes_per_token) for path in sorted(Path(folder).iterdir()) if path.is_dir()]
    steps.sort(key=lambda step: (step["position"], step["name"]))
    merged = {"steps": steps}
    write_atomic(Path(folder, "merged.json"), _json(merged))
    return merged


def _merge_step(folder: Path, samples: int, bytes_per_token: float) -> dict:
    totals: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in ("in", "out", "removed")}
    counts: Counter[str] = Counter()
    kept: list[dict] = []
    dropped: list[dict] = []
    seen, tasks, position = set(), None, 0
    for path in sorted(folder.glob("[0-9]*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if tasks is not None and record["tasks"] != tasks:
            raise ValueError(f"{path}: one of {record['tasks']} tasks among records of {tasks}; clear {folder}")
        tasks, position = record["tasks"], record["position"]
        seen.add(record["task"])
        for name, total in totals.items():
            total.update(_flat(record[name]))
        counts.update(record["counts"])
        kept = _least(kept + record["kept_samples"], samples)
        dropped = _least(dropped + record["dropped_samples"], samples)
    missing = sorted(set(range(tasks or 1)) - seen)
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{folder}: no record of task {some} of {tasks or 1}: run what is missing, then merge")
    return {
        "name": folder.name,
        "position": position,
        **{name: _summed(totals[name], (), bytes_per_token) for name in ("in", "out")},
        "sources": {
            source: {name: _summed(totals[name], (source,), bytes_per_token) for name in ("in", "out")}
            for source in sorted({keys[0] for keys in totals["in"]})
        },
        "reasons": {
            reason: {
                **_summed(totals["removed"], (reason,), bytes_per_token),
                "sources": {
                    source: _summed(totals["removed"], (reason, source), bytes_per_token)
                    for source in sorted({keys[1] for keys in totals["removed"] if keys[0] == reason})
                },
            }
            for reason in sorted({keys[0] for keys in totals["removed"]})
        },
        "counts": dict(sorted(counts.items())),
        "kept_samples": kept,
        "dropped_samples": dropped,
    }


def _least(samples: list[dict], count: int) -> list[dict]:
    return sorted(samples, key=lambda sample: (sample["hash"], sample["id"]))[:count]


def _summed(counter: Counter, prefix: tuple[str, ...], bytes_per_token: float) -> dict[str, int]:
    """Return documents, bytes and tokens of all keys that start with `prefix`."""
    chosen = [(keys[-1], count) for keys, count in counter.items() if keys[: len(prefix)] == prefix]
    sums = {unit: sum(count for kind, count in chosen if kind == unit) for unit in ("documents", "bytes")}
    return {**sums, "tokens": round(sums["bytes"] / bytes_per_token)}


def _nested(counter: Counter) -> dict:
    """Return {(a, b): n} as {a: {b: n}}, to any depth."""
    nested: dict = {}
    for keys, count in sorted(counter.items()):
        inner = nested
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = count
    return nested


def _flat(nested: dict, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Undo `_nested`."""
    flat: dict[tuple[str, ...], int] = {}
    for key, value in nested.items():
        flat.update(_flat(value, (*prefix, key)) if isinstance(value, dict) else {(*prefix, key): value})
    return flat


def _counts(step: PipelineStep) -> dict[str, int]:
    """Return the step's other counters: `stat_update` labels and their totals."""
    return {
        label: stat.total
        for label, stat in step.stats.stats.items()
        if label not in UNCOUNTED and not label.startswith("dropped_")
    }


def _source(document: Document) -> str:
    return str(document.metadata.get("source") or "unknown")


def _bytes(document: Document) -> int:
    return len(document.text) if document.text.isascii() else len(document.text.encode(errors="replace"))


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")
