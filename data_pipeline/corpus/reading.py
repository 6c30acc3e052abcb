"""Steps that read the sources: each source is prepared once, then its parts are dealt to tasks."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from common.atomic_files import write_atomic
from common.settings import under
from data_pipeline.corpus.recipe import CATEGORY, Recipe
from data_pipeline.documents import Document as SourceDocument
from data_pipeline.documents import Problems

UNKNOWN = "other"  # category of documents whose source names none


class PrepareSources(PipelineStep):
    """Step that prepares each source once before it is read: task i prepares source i, in `scratch/<name>`."""

    type = "READER"
    name = "prepare"

    def __init__(self, recipe: Recipe, scratch: str, problems: str) -> None:
        super().__init__()
        self.sources, self.strict = recipe.sources, recipe.strict
        self.scratch, self.problems = scratch, problems

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Prepare one source; yield no documents.

        Raises:
            ValueError: there is nothing to read; the line names the key.
        """
        name, source = list(self.sources.items())[rank]
        folder, problems = Path(self.scratch, name), _problems_of(name, self.strict)
        folder.mkdir(parents=True, exist_ok=True)
        with under(f"corpus.sources.{name}"):
            source.prepare(folder, problems)
            source.parts(folder)
        write_problems(self.problems, f"prepare-{rank:05d}", {name: problems}, Counter())


class ReadSources(PipelineStep):
    """Step that reads the parts of all sources: task r of n reads every n-th part, starting with part r.

    Documents get metadata "split": "validation" if the sha256 of the raw text, as a fraction of 1, is below the
    recipe's fraction, else "train". The raw text is the source's, before any cleaning, so the same text gets the same
    split in every corpus, however it is cleaned.
    """

    type = "READER"
    name = "read"

    def __init__(self, recipe: Recipe, scratch: str, problems: str) -> None:
        super().__init__()
        self.sources, self.categories, self.strict = recipe.sources, recipe.categories, recipe.strict
        self.validation_fraction = recipe.validation_fraction
        self.scratch, self.problems = scratch, problems

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield a task's documents, then write the report of what could not be read."""
        found: dict[str, Problems] = {}
        documents: Counter[str] = Counter()
        for name, part in self._parts()[rank::world_size]:
            problems = found.setdefault(name, _problems_of(name, self.strict))
            with under(f"corpus.sources.{name}"):
                for document in self.sources[name].read(part, Path(self.scratch, name), problems):
                    documents[name] += 1
                    finished = self._finished(name, document, problems)
                    if finished is not None:
                        yield finished
        write_problems(self.problems, f"read-{rank:05d}", found, documents)

    def _parts(self) -> list[tuple[str, str]]:
        return [
            (name, part) for name, source in self.sources.items() for part in source.parts(Path(self.scratch, name))
        ]

    def _finished(self, name: str, document: SourceDocument, problems: Problems) -> Document | None:
        try:
            encoded = document.text.encode()
        except UnicodeEncodeError:
            problems.skip(document.id, "not UTF-8", "a lone surrogate")
            return None
        fraction = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") / 2**64
        metadata = {key: value for key, value in document.metadata.items() if value}
        category = self.categories.get(name) or metadata.get("category") or metadata.get("source") or UNKNOWN
        metadata["category"] = category if CATEGORY.fullmatch(category) else UNKNOWN
        metadata["split"] = "validation" if fraction < self.validation_fraction else "train"
        made = Document(text=document.text, id=document.id, metadata=metadata)
        self.update_doc_stats(made)
        return made


def _problems_of(name: str, strict: bool) -> Problems:
    return Problems(strict, "corpus.strict", f"corpus.sources.{name}")


def write_problems(folder: str, name: str, found: Mapping[str, Problems], documents: Counter[str]) -> None:
    """Write to `folder/name.json` what could not be read, and how many documents of each source could."""
    counts = sum((problems.counts for problems in found.values()), Counter())
    content = {
        "counts": dict(counts),
        "lines": [line for problems in found.values() for line in problems.lines],
        "sources": {
            source: {"documents": documents[source], "counts": dict(problems.counts), "causes": problems.causes}
            for source, problems in found.items()
        },
    }
    write_atomic(Path(folder, f"{name}.json"), json.dumps(content, indent=1) + "\n")


def check_problems(folder: Path, most_skipped: float) -> None:
    """Raise ValueError, naming the source, if more than `most_skipped` of its records could not be read."""
    found: dict[str, Problems] = {}
    documents: Counter[str] = Counter()
    for path in sorted(folder.glob("read-*.json")):
        for name, part in json.loads(path.read_text(encoding="utf-8")).get("sources", {}).items():
            problems = found.setdefault(name, _problems_of(name, strict=False))
            problems.counts.update(part["counts"])
            problems.causes = {**part["causes"], **problems.causes}
            documents[name] += part["documents"]
    for name, problems in found.items():
        problems.check(documents[name], most_skipped, "corpus")
