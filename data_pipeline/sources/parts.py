"""Sources whose input is split into parts, to be read by several processes or nodes."""

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.atomic_files import write_atomic
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE


class SourceInParts(ABC):
    """A source that the corpus job can split.

    `prepare` comes first, and again after a kill: it writes data about the whole input (an index, a join). `parts` then
    names pieces of about equal work, with the same names in the same order on every node. `read` yields the documents
    of one part, independently of other parts. The object keeps nothing between these calls: they may run in different
    processes.
    """

    @abstractmethod
    def identity(self, by: str = SAMPLE) -> dict:
        """Return a JSON-able description of settings and input digests, different whenever documents may be.

        Args:
            by: how files are identified, see `data_pipeline.identity.file_identity`.
        """

    def prepare(self, scratch: Path, problems: Problems) -> None:  # noqa: B027  (most sources need nothing)
        """Write what reading needs into the folder `scratch`, each file atomically."""

    @abstractmethod
    def parts(self, scratch: Path) -> list[str]:
        """Return the names of the parts; raise SettingError if there is no input."""

    @abstractmethod
    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the documents of a part; memory does not grow with its size."""

    def documents(self, problems: Problems, processes: int) -> Iterator[Document]:
        """Yield all documents, part by part, in this process: the interface of `data.source` in pretraining."""
        with tempfile.TemporaryDirectory(prefix="palimpsest-source-") as folder:
            scratch = Path(folder)
            self.prepare(scratch, problems)
            for part in self.parts(scratch):
                yield from self.read(part, scratch, problems)


def groups(items: Iterable[tuple[object, int]], part_bytes: float) -> Iterator[list]:
    """Yield the items of (item, bytes) pairs in order, in groups of about part_bytes."""
    group, size = [], 0
    for item, item_bytes in items:
        group.append(item)
        size += item_bytes
        if size >= part_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_parts(path: Path, parts: Iterable[list]) -> None:
    """Write a list of parts, each a JSON-able list of its items."""
    write_atomic(path, "".join(f"{json.dumps(part)}\n" for part in parts))


def part_names(path: Path) -> list[str]:
    """Return the names of the parts in a file of `write_parts`: their numbers."""
    with path.open(encoding="utf-8") as lines:
        return [f"{number:05d}" for number, _ in enumerate(lines)]


def read_part(path: Path, name: str) -> list:
    """Return the items of a part."""
    with path.open(encoding="utf-8") as lines:
        return json.loads(next(line for number, line in enumerate(lines) if number == int(name)))
