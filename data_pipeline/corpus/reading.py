"""The steps that read the sources: each prepared once, and then its parts, dealt to tasks."""

import hashlib
import json
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_pipeline.corpus.recipe import CATEGORY, Recipe, named
from data_pipeline.documents import Problems
from data_pipeline.files import write_whole

UNKNOWN = "other"  # the category of documents whose source names none


class PrepareSources(PipelineStep):
    """Let each source do once what its reading needs: task i prepares source i, in `scratch/<name>`."""

    type = "READER"
    name = "prepare"

    def __init__(self, recipe: Recipe, scratch: str, problems: str) -> None:
        super().__init__()
        self.sources, self.strict = recipe.sources, recipe.strict
        self.scratch, self.problems = scratch, problems

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Prepare one source; nothing comes out. Raises ValueError, naming the key, where there is nothing to read."""
        name, source = list(self.sources.items())[rank]
        folder, problems = Path(self.scratch, name), Problems(self.strict, "corpus.strict")
        folder.mkdir(parents=True, exist_ok=True)
        with named(name):
            source.prepare(folder, problems)
            source.parts(folder)
        write_problems(self.problems, f"prepare-{rank:05d}", problems)


class ReadSources(PipelineStep):
    """Read the parts of all sources: task r of n reads every n-th part, from part r on.

    Documents get metadata "split": "validation" where the sha256 of the raw text, as a fraction of 1, is under the
    recipe's fraction, else "train". The text is what the source gives, before any cleaning: the same text falls on the
    same side in every corpus, however it is cleaned.
    """

    type = "READER"
    name = "read"

    def __init__(self, recipe: Recipe, scratch: str, problems: str) -> None:
        super().__init__()
        self.sources, self.categories, self.strict = recipe.sources, recipe.categories, recipe.strict
        self.validation_fraction = recipe.validation_fraction
        self.scratch, self.problems = scratch, problems

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield a task's documents, and write what could not be read when all have been."""
        problems = Problems(self.strict, "corpus.strict")
        for name, part in self._parts()[rank::world_size]:
            with named(name):
                for document in self.sources[name].read(part, Path(self.scratch, name), problems):
                    finished = self._finished(name, document, problems)
                    if finished is not None:
                        yield finished
        write_problems(self.problems, f"read-{rank:05d}", problems)

    def _parts(self) -> list[tuple[str, str]]:
        return [
            (name, part) for name, source in self.sources.items() for part in source.parts(Path(self.scratch, name))
        ]

    def _finished(self, name: str, document: object, problems: Problems) -> Document | None:
        try:
            encoded = document.text.encode()
        except UnicodeEncodeError:
            return problems.skip(document.id, "not UTF-8", "a lone surrogate")
        fraction = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") / 2**64
        metadata = {key: value for key, value in document.metadata.items() if value}
        category = self.categories.get(name) or metadata.get("category") or metadata.get("source") or UNKNOWN
        metadata["category"] = category if CATEGORY.fullmatch(category) else UNKNOWN
        metadata["split"] = "validation" if fraction < self.validation_fraction else "train"
        made = Document(text=document.text, id=document.id, metadata=metadata)
        self.update_doc_stats(made)
        return made


def write_problems(folder: str, name: str, problems: Problems) -> None:
    """Write what could not be read to `folder/name.json`."""
    content = {"counts": dict(problems.counts), "lines": problems.lines}
    write_whole(Path(folder, f"{name}.json"), json.dumps(content, indent=1) + "\n")
