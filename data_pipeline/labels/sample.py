"""The sample that the LLM labels: excerpts of few documents of each category, the same ones whatever the tasks."""

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
from common.settings import check_whole

CUT = "\n[...]\n"  # stands where an excerpt leaves text out


@dataclass(frozen=True)
class Excerpt:
    """How many characters are taken from the beginning, the middle and the end; a text no longer is taken whole."""

    beginning: int = 1500
    middle: int = 750
    end: int = 750

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            check_whole(f"corpus.cleaning.labels.excerpt.{key}", value, 0)
        if self.beginning < 100:
            raise ValueError(f"corpus.cleaning.labels.excerpt.beginning={self.beginning}: give 100 characters or more")

    def of(self, text: str) -> str:
        """Return the excerpt of a text, without what no JSON or prompt can hold."""
        if len(text) > self.beginning + self.middle + self.end + 2 * len(CUT):
            middle = (len(text) - self.middle) // 2
            pieces = (text[: self.beginning], text[middle : middle + self.middle], text[len(text) - self.end :])
            text = CUT.join(piece for piece in pieces if piece)
        return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def read_excerpt(settings: Mapping[str, int]) -> Excerpt:
    """Return the excerpt that a configuration describes. Raises ValueError, naming the key, for a wrong setting."""
    known = [entry.name for entry in fields(Excerpt)]
    for key in settings:
        if key not in known:
            raise ValueError(f"corpus.cleaning.labels.excerpt.{key} is no part of an excerpt: give {', '.join(known)}")
    return Excerpt(**settings)


@dataclass(frozen=True, slots=True, order=True)
class Sampled:
    """A document of the sample: its excerpt, and the category and source that it came with.

    They have an order, so that of documents with one id the same ones are taken everywhere.
    """

    id: str
    category: str
    source: str
    excerpt: str


class Sample(PipelineStep):
    """Takes a task's documents and writes its part of the sample to `folder`; gives none.

    The sample is `size` documents in all, shared evenly among the categories that documents come with; what a rare
    category does not fill goes to the others. Within a category those documents are in whose ids have the least
    hashes. Each task keeps what may be in the whole sample, so `merged` gives the same one for any number of tasks.
    """

    type = "LABELS"
    name = "sample"

    def __init__(self, folder: str, size: int, excerpt: Excerpt) -> None:
        super().__init__()
        self.folder, self.size, self.excerpt = folder, size, excerpt

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Read every document; the file is written when all have been seen."""
        strata, seen = Strata(self.size), Counter()
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
    """At most `size` documents: the least hashes of each category, no category ahead of another that has more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._total = 0
        self._heaps: dict[str, list[tuple[int, Sampled]]] = {}  # the negative hash: the greatest goes first

    def would_take(self, category: str, identity: str) -> bool:
        """Return whether a document would be kept if it were put in now."""
        if self._total < self.size:
            return True
        heap = self._heaps.get(category, ())
        if (len(heap) + 1, category) < self._fullest():
            return True
        return bool(heap) and _rank(identity) > heap[0][0]

    def put(self, category: str, sampled: Sampled) -> None:
        """Put a document in; where there are too many then, the last of the fullest category goes."""
        heapq.heappush(self._heaps.setdefault(category, []), (_rank(sampled.id), sampled))
        self._total += 1
        if self._total > self.size:
            heapq.heappop(self._heaps[self._fullest()[1]])
            self._total -= 1

    def _fullest(self) -> tuple[int, str]:
        return max((len(heap), category) for category, heap in self._heaps.items())

    def sampled(self) -> list[Sampled]:
        """Return the documents, category by category, least hashes first."""
        heaps = (sorted(self._heaps[category], reverse=True) for category in sorted(self._heaps))
        return [sampled for heap in heaps for _, sampled in heap]


def merged(folder: str, tasks: int, size: int) -> tuple[list[Sampled], dict[str, int]]:
    """Return the sample out of all tasks' parts, and how many documents of each category there were."""
    strata, seen = Strata(size), Counter()
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
