"""Exact substrings: cut out spans of text that occur earlier in the corpus.

Every window of n words of every document is hashed; hash and position are written to disk, in buckets by hash. Each
bucket is then sorted: all positions of a hash but the first are repeats. Repeated windows are merged into spans, whose
ends are the exact ends of the repetition, and the spans are cut. Disk: 16 bytes per word, about 2.5 times the text; a
setting bounds the memory. datatrove's own ExactSubstr steps need a Rust program that is built separately; its
SentenceDedup holds all hashes of a task in memory, and is limited to 65,535 lines per document.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.settings import check_number
from data_pipeline.cleaning.duplicates import PipelineStage
from data_pipeline.cleaning.windows import windows, word_places

WINDOW = np.dtype([("hash", "<u8"), ("document", "<u4"), ("start", "<u4")])
PLACE = np.dtype("<u8")  # the document's number in the upper 32 bits, the window's start in the lower
WINDOWS_HELD = 1 << 19  # windows in memory before they are sorted into buckets


def exact_spans(
    folder: str,
    tasks: int,
    words: int = 50,
    minimum_bytes: int = 200,
    keep_characters: int = 100,
    buckets: int = 16,
    memory: int = 512 * 1024 * 1024,
) -> list[PipelineStage]:
    """Return the stages that cut out spans of at least `words` words and `minimum_bytes` bytes that occur earlier.

    Earlier means: in a task of a lower number, in an earlier document, or before in the same document. All reading
    stages must read the same documents.

    Args:
        folder: holds the data that the stages exchange; it starts empty.
        keep_characters: documents left with fewer are dropped.
        buckets: number of tasks that search.
        memory: bytes per searching task, approximately.
    """
    for name, value, least in (("words", words, 2), ("buckets", buckets, 1), ("memory", memory, 1 << 20)):
        check_number(f"corpus.cleaning.exact_spans.{name}", value, least=least)
    signatures, repeats = str(Path(folder, "windows")), str(Path(folder, "repeats"))
    return [
        PipelineStage("windows", [SpanWindows(signatures, words, buckets)], tasks, reads=True),
        PipelineStage("find", [SpanFinder(signatures, repeats, memory)], buckets),
        PipelineStage(
            "filter", [SpanFilter(repeats, words, minimum_bytes, keep_characters)], tasks, reads=True, gives=True
        ),
    ]


class SpanWindows(PipelineStep):
    """Step that writes a task's windows to `folder/<bucket>/<task>.windows`, in the order of the documents."""

    type = "DEDUP"
    name = "exact spans: windows"

    def __init__(self, folder: str, words: int, buckets: int) -> None:
        super().__init__()
        self.folder, self.words, self.buckets = folder, words, buckets

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Read all documents; yield none."""
        paths = [Path(self.folder, f"{bucket:03d}", f"{rank:05d}.windows") for bucket in range(self.buckets)]
        partial = [path.with_suffix(".partial") for path in paths]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in partial]
            held, count = [], 0
            for number, document in enumerate(data):
                with self.track_time():
                    for block in windows(_bytes_of(document), self.words):
                        held.append(_windows(block.hashes, number, block.starts))
                        count += len(held[-1])
                    if count >= WINDOWS_HELD:
                        self._write(held, files)
                        held, count = [], 0
            self._write(held, files)
        for before, after in zip(partial, paths, strict=True):
            os.replace(before, after)

    def _write(self, held: list[np.ndarray], files: list) -> None:
        if not held:
            return
        together = np.concatenate(held)
        self.stat_update("windows", value=len(together))
        # The high bits select the bucket, the low bits the pass within it.
        bucket = (together["hash"] >> np.uint64(40)) % np.uint64(self.buckets)
        order = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[order], np.arange(self.buckets), side="right")
        for file, part in zip(files, np.split(together[order], ends[:-1]), strict=True):
            file.write(part.tobytes())


class SpanFinder(PipelineStep):
    """Step that writes the positions of a bucket's repeated windows to `output/<task>/<bucket>.places`, sorted."""

    type = "DEDUP"
    name = "exact spans: find"

    def __init__(self, folder: str, output: str, memory: int) -> None:
        super().__init__()
        self.folder, self.output, self.memory = folder, output, memory

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Search the bucket with the task's number, in as many passes as the memory limit requires."""
        files = sorted(Path(self.folder, f"{rank:03d}").glob("*.windows"))
        total = sum(file.stat().st_size for file in files)
        passes = max(1, -(-8 * total // self.memory))  # sorting takes several times the windows themselves
        places: dict[int, Path] = {}
        with self.track_time():
            for number in range(passes):
                tasks, found = _repeats(files, number, passes)
                self.stat_update("repeated_windows", value=len(found))
                for task in np.unique(tasks).tolist():
                    path = places.setdefault(task, Path(self.output, f"{task:05d}", f"{rank:03d}.partial"))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("ab" if number else "wb") as file:
                        file.write(found[tasks == task].tobytes())
            for path in places.values():
                np.sort(np.fromfile(path, PLACE)).tofile(path)
                os.replace(path, path.with_suffix(".places"))


class SpanFilter(BaseFilter):
    """Filter that cuts the spans found by `SpanFinder`, and drops documents with little text left."""

    type = "DEDUP"
    name = "exact spans"

    def __init__(
        self,
        folder: str,
        words: int,
        minimum_bytes: int,
        keep_characters: int,
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self.folder, self.words = folder, words
        self.minimum_bytes, self.keep_characters = minimum_bytes, keep_characters
        self._repeats: Iterator[np.ndarray] | None = None

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents with their repeated spans cut out."""
        self._repeats = _by_document(sorted(Path(self.folder, f"{rank:05d}").glob("*.places")))
        try:
            yield from super().run(data, rank, world_size)
        finally:
            self._repeats = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Cut the spans of the next document; return whether it stays, or (False, "repeats earlier text")."""
        assert self._repeats is not None  # set by run
        starts = next(self._repeats)
        if len(starts) == 0:
            return True
        text = _bytes_of(doc)
        spans = [(start, end) for start, end in _spans(text, starts, self.words) if end - start >= self.minimum_bytes]
        if not spans:
            return True
        self.stat_update("cut_spans", value=len(spans))
        self.stat_update("cut_bytes", value=sum(end - start for start, end in spans))
        left = _without(text, spans).decode(errors="surrogatepass")
        if len(left.strip()) < self.keep_characters:
            return False, "repeats earlier text"
        doc.text = left
        return True


def _bytes_of(document: Document) -> bytes:
    return document.text.encode(errors="surrogatepass")


def _windows(hashes: np.ndarray, document: int, starts: np.ndarray) -> np.ndarray:
    together = np.empty(len(hashes), WINDOW)
    together["hash"], together["document"], together["start"] = hashes, document, starts
    return together


def _repeats(files: list[Path], number: int, passes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (task, position) of all windows of one pass whose hash occurs earlier."""
    tasks, parts = [], []
    for path in files:
        with path.open("rb") as file:
            while len(block := np.fromfile(file, WINDOW, WINDOWS_HELD)):
                part = block[block["hash"] % np.uint64(passes) == number] if passes > 1 else block
                parts.append(part)
                tasks.append(np.full(len(part), int(path.stem), np.uint32))
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, PLACE)
    every, task = np.concatenate(parts), np.concatenate(tasks)
    order = np.argsort(every["hash"], kind="stable")  # files and their windows are in corpus order
    hashes = every["hash"][order]
    later = order[1:][hashes[1:] == hashes[:-1]]
    places = every["document"][later].astype(PLACE) << np.uint64(32) | every["start"][later]
    return task[later], places


def _by_document(paths: list[Path]) -> Iterator[np.ndarray]:
    """Yield, for each document of a task in turn, the sorted starts of its repeated windows."""
    files = [np.memmap(path, PLACE, "r") for path in paths if path.stat().st_size]
    cursors = [0] * len(files)
    following = [int(file[0]) >> 32 for file in files]
    number = 0
    while True:
        starts = [np.empty(0, PLACE)]
        for index, file in enumerate(files):
            if following[index] == number:
                end = int(np.searchsorted(file, PLACE.type((number + 1) << 32)))
                starts.append(file[cursors[index] : end] & np.uint64(0xFFFFFFFF))
                cursors[index] = end
                following[index] = int(file[end]) >> 32 if end < len(file) else -1
        yield np.sort(np.concatenate(starts)).astype(np.int64)
        number += 1


def _spans(text: bytes, starts: np.ndarray, words: int) -> list[tuple[int, int]]:
    """Return (start, end) of the spans covered by windows that start at `starts`."""
    word_starts, word_ends = word_places(text)
    first = np.searchsorted(word_starts, starts)
    last = first + words  # touching windows form one span
    breaks = np.flatnonzero(first[1:] > last[:-1])
    begins = first[np.concatenate([[0], breaks + 1])]
    ends = last[np.concatenate([breaks, [len(last) - 1]])]
    return list(zip(word_starts[begins].tolist(), word_ends[ends - 1].tolist(), strict=True))


def _without(text: bytes, spans: list[tuple[int, int]]) -> bytes:
    """Return a text without spans; a span of whole lines goes with its indentation and line ends."""
    parts, done = [], 0
    for start, end in spans:
        indentation = text[done:start].rpartition(b"\n")[2]
        after = text[end : end + 4096]
        line_end = after[: len(after) - len(after.lstrip())].rfind(b"\n") + 1
        if line_end and not indentation.strip():
            start, end = start - len(indentation), end + line_end
        parts.append(text[done:start])
        done = end
    parts.append(text[done:])
    return b"".join(parts)
