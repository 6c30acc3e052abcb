"""Documentation on this machine: Python docstrings, manual pages, /usr/share/doc."""

import ast
import gzip
import hashlib
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from common.settings import SettingError, check_whole
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.markup.roff import plain_text
from data_pipeline.sources.parts import SourceInParts, groups, part_names, read_part, write_parts
from data_pipeline.workers import ordered_map

MINIMUM_BYTES = 100  # shorter texts ("Utilities.") are worthless
CHANGELOG_BYTES = 16 * 1024  # the newest entries: changelogs can be endless
ITEMS_AT_ONCE = 16
ITEMS_IN_PART = 1024
PARTS = "local_docs.jsonl"
DOC_NAMES = ("readme", "news", "changelog", "changes", "todo", "faq", "authors", "howto")
DOC_SUFFIXES = (".txt", ".md", ".rst")


@dataclass(frozen=True)
class LocalDocs(SourceInParts):
    """Docstrings of installed Python packages, manual pages in English, and texts under /usr/share/doc.

    `packages`: distribution names, or None for all in the environment. They are parsed with `ast`, never imported; each
    module is one document, tests are excluded. `man_pages`, `doc_folder`: folders, or None to exclude them; a missing
    folder gives no documents. `max_bytes`: UTF-8 bytes in total, or None. Files are sorted by a hash of their names, so
    the limit takes a fair share of everything, and always the same on one machine.
    """

    packages: list[str] | None = None
    man_pages: str | None = "/usr/share/man"
    doc_folder: str | None = "/usr/share/doc"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_whole("max_bytes", self.max_bytes, 1, null=True)
        if self.packages is not None:  # Hydra passes its own list type
            object.__setattr__(self, "packages", list(self.packages))

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, package versions, and the folders' files; raise ValueError for a missing package."""
        versions = [f"{_name(package)} {package.version}" for package in self._distributions()]
        files = [path for _, path in self._folder_files()]
        return {"local_docs": settings_identity(self, by), "versions": versions, "files": file_identity(files, by)}

    def documents(self, problems: Problems, processes: int) -> Iterator[Document]:
        """Yield documents up to `max_bytes`; files that do not parse are reported to `problems`."""
        yield from self._documents_of(self._sorted_items(), problems, processes)

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Write the groups of files that are read together; with a limit, all files are one group."""
        items = (([item.id, str(item.path), item.metadata], 1) for item in self._sorted_items())
        write_parts(scratch / PARTS, groups(items, ITEMS_IN_PART if self.max_bytes is None else math.inf))

    def parts(self, scratch: Path) -> list[str]:
        """Return the names of the groups of files."""
        return part_names(scratch / PARTS)

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the documents of a group of files."""
        items = [_Item(name, Path(path), about) for name, path, about in read_part(scratch / PARTS, part)]
        yield from self._documents_of(items, problems, processes=1)

    def _sorted_items(self) -> list["_Item"]:
        return sorted(self._items(), key=lambda item: hashlib.sha256(item.id.encode()).digest())

    def _documents_of(self, items: list["_Item"], problems: Problems, processes: int) -> Iterator[Document]:
        batches = (items[start : start + ITEMS_AT_ONCE] for start in range(0, len(items), ITEMS_AT_ONCE))
        total = 0
        for results in ordered_map(_make_reader, batches, processes):
            for item, text, problem in results:
                if problem:
                    problems.skip(str(item.path), problem)
                length = len(text.encode())
                if length < MINIMUM_BYTES:
                    continue
                total += length
                if self.max_bytes is not None and total > self.max_bytes:
                    return
                yield Document(text, item.id, item.metadata)

    def _distributions(self) -> list[Distribution]:
        if self.packages is None:
            found = {_name(package): package for package in distributions() if package.metadata["Name"]}
            return [found[name] for name in sorted(found)]
        try:
            return [distribution(name) for name in sorted(set(self.packages))]
        except PackageNotFoundError as error:
            fix = "install it, or take it off the list"
            raise SettingError("packages", error.name, fix, "is not installed") from error

    def _items(self) -> Iterator["_Item"]:
        for package in self._distributions():
            name = _name(package)
            metadata: Any = package.metadata  # also an email.message.Message
            licence = metadata.get("License-Expression") or (metadata.get("License") or "").partition("\n")[0][:100]
            about = {"source": "docstrings", "licence": licence or None, "url": metadata.get("Home-page")}
            for file in package.files or ():
                if file.suffix == ".py" and not {"..", "test", "tests"}.intersection(file.parts):
                    origin = f"{name} {package.version}: {file}"
                    yield _Item(
                        f"python:{name}/{file}", Path(str(package.locate_file(file))), {**about, "origin": origin}
                    )
        for kind, path in self._folder_files():
            yield _Item(f"{kind}:{path}", path, {"source": kind, "origin": str(path)})

    def _folder_files(self) -> Iterator[tuple[str, Path]]:
        if self.man_pages is not None:
            for path in sorted(Path(self.man_pages).glob("man[1-8]/*")):
                if path.is_file() and not path.is_symlink():
                    yield "man", path
        if self.doc_folder is not None:
            for path in sorted(Path(self.doc_folder).rglob("*")):
                if _is_documentation(path.name) and path.is_file() and not path.is_symlink():
                    yield "doc", path


@dataclass(frozen=True, slots=True)
class _Item:
    """A file to read: its document's id, its path, its document's metadata."""

    id: str
    path: Path
    metadata: dict[str, str | None]


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> str:
    """Return a module's docstrings in order, each under its dotted name within the module.

    Only the bodies of modules, classes and functions are searched.

    Raises:
        SyntaxError, ValueError: as `ast.parse` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    parts: list[str] = []
    _collect(tree, "", parts)
    return "\n\n".join(parts)


def _collect(node: Documented, name: str, parts: list[str]) -> None:
    text = ast.get_docstring(node)
    if text:
        parts.append(f"{name}\n\n{text}" if name else text)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # Without the module's name, so that a module vendored by two packages gives one document.
            _collect(child, f"{name}.{child.name}" if name else child.name, parts)


def _is_documentation(name: str) -> bool:
    stem = name.lower().removesuffix(".gz")
    if stem.startswith("copyright") or stem.endswith((".html", ".htm")):
        return False
    return stem.startswith(DOC_NAMES) or stem.endswith(DOC_SUFFIXES)


def _name(package: Distribution) -> str:
    return package.metadata["Name"].lower().replace("_", "-")


def _make_reader() -> Callable[[list[_Item]], list[tuple[_Item, str, str | None]]]:
    return _read_items


def _read_items(items: list[_Item]) -> list[tuple[_Item, str, str | None]]:
    return [(item, *_read(item)) for item in items]


def _read(item: _Item) -> tuple[str, str | None]:
    """Return the file's text and None, or an empty text and the problem with the file."""
    try:
        raw = item.path.read_bytes()
        if item.path.suffix == ".gz":
            raw = gzip.decompress(raw)
        kind = item.metadata["source"]
        if kind == "doc" and item.path.name.lower().startswith("change"):
            raw = raw[:CHANGELOG_BYTES].rpartition(b"\n")[0]
        text = raw.decode()
        if "\0" in text:
            return "", "NUL byte"
        if kind == "docstrings":
            return docstrings(text), None
        return (plain_text(text) if kind == "man" else text), None
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return "", "corrupt gzip"
    except OSError as error:
        return "", f"unreadable: {error.strerror}"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", "does not parse as Python"
