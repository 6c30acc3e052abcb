"""Sample that the LLM labels: excerpts of few documents of each category, independent of the number of tasks."""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from common.atomic_files import write_atomic
from common.settings import NO_VALUE, SettingError, check_whole

CUT = "\n[...]\n"  # marks text that an excerpt omits


@dataclass(frozen=True)
class Excerpt:
    """Numbers of characters taken from beginning, middle and end; a text within their sum is taken whole."""

    beginning: int = 1500
    middle: int = 750
    end: int = 750

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            check_whole(f"corpus.cleaning.labels.excerpt.{key}", value, 0)
        check_whole("corpus.cleaning.labels.excerpt.beginning", self.beginning, 100)

    def of(self, text: str) -> str:
        """Return the excerpt of a text, without characters that JSON or a prompt cannot hold."""
        if len(text) > self.beginning + self.middle + self.end + 2 * len(CUT):
            middle = (len(text) - self.middle) // 2
            pieces = (text[: self.beginning], text[middle : middle + self.middle], text[len(text) - self.end :])
            text = CUT.join(piece for piece in pieces if piece)
        return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def read_excerpt(settings: Mapping[str, int]) -> Excerpt:
    """Return the excerpt for a configuration; raise ValueError, naming the key, for a wrong setting."""
    known = [entry.name for entry in fields(Excerpt)]
    for key in settings:
        if key not in known:
            problem = "is not a part of an excerpt"
            raise SettingError(f"corpus.cleaning.labels.excerpt.{key}", NO_VALUE, f"give {', '.join(known)}", problem)
    return Excerpt(**settings)


@dataclass(frozen=True, slots=True, order=True)
class Sampled:
    """A document of the sample: its excerpt, and its original category and source.

    Ordered, so that the same ones of several documents with one id are taken everywhere.
    """

    id: str
    category: str
    source: str
    excerpt: str


class Sample(PipelineStep):
    """Step that writes a task's part of the sample to `folder`, and yields no documents.

    The sample has `size` documents in total, shared evenly among the documents' categories; what a rare category does
    not fill goes to the others. Within a category the documents whose ids have the lowest hashes are taken. Each task
    keeps every candidate for the whole sample, so `merged` gives the same result for any number of tasks.
    """

    type = "LABELS"
    name = "sample"

    def __init__(self, folder: str, size: int, excerpt: Excerpt) -> None:
        super().__init__()
        self.folder, self.size, self.excerpt = folder, size, excerpt

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Read every document, then write the file."""
        strata = Strata(self.size)
        seen: Counter[str] = Counter()
        for document in data:
            with self.track_time():
                category = str(document.metadata.get("category") or "")
                seen[category] += 1
                if strata.would_take(category, document.id):
                    strata.put(category, self._sampled(document, category))
        content = {"seen": seen, "sampled": [asdict(sampled) for sampled in strata.sampled()]}
        write_atomic(_part(self.folder, rank), json.dumps(content))
        self.stat_update("sampled", value=len(content["sampled"]))
        return
        yield

    def _sampled(self, document: Document, category: str) -> Sampled:
        source = str(document.metadata.get("source") or "")
        return Sampled(document.id, category, source, self.excerpt.of(document.text))


class Strata:
    """At most `size` documents: those with the lowest hashes of each category, balanced over the categories."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._total = 0
        self._heaps: dict[str, list[tuple[int, Sampled]]] = {}  # negative hash: the highest hash is popped first

    def would_take(self, category: str, identity: str) -> bool:
        """Return whether `put` would keep a document now."""
        if self._total < self.size:
            return True
        heap = self._heaps.get(category, [])
        if (len(heap) + 1, category) < self._fullest():
            return True
        return bool(heap) and _rank(identity) > heap[0][0]

    def put(self, category: str, sampled: Sampled) -> None:
        """Add a document; above `size`, drop the one with the highest hash of the fullest category."""
        heapq.heappush(self._heaps.setdefault(category, []), (_rank(sampled.id), sampled))
        self._total += 1
        if self._total > self.size:
            heapq.heappop(self._heaps[self._fullest()[1]])
            self._total -= 1

    def _fullest(self) -> tuple[int, str]:
        return max((len(heap), category) for category, heap in self._heaps.items())

    def sampled(self) -> list[Sampled]:
        """Return the documents, category by category, lowest hashes first."""
        heaps = (sorted(self._heaps[category], reverse=True) for category in sorted(self._heaps))
        return [sampled for heap in heaps for _, sampled in heap]


def merged(folder: str, tasks: int, size: int) -> tuple[list[Sampled], dict[str, int]]:
    """Return the sample merged from all tasks' parts, and the number of documents seen of each category."""
    strata = Strata(size)
    seen: Counter[str] = Counter()
    for rank in range(tasks):
        content = json.loads(_part(folder, rank).read_text(encoding="utf-8"))
        seen.update(content["seen"])
        for entry in content["sampled"]:
            sampled = Sampled(**entry)
            if strata.would_take(sampled.category, sampled.id):
                strata.put(sampled.category, sampled)
    return strata.sampled(), dict(sorted(seen.items()))


def _part(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank:05d}.json")


def _rank(identity: str) -> int:
    return -int.from_bytes(hashlib.sha256(identity.encode(errors="replace")).digest()[:8])
