"""Documentation repositories: the Markdown of a checkout, without markup for its site generator."""

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems, Unreadable
from data_pipeline.identity import EARLIER, SAMPLE, file_identity, settings_identity
from data_pipeline.licences import licence_of_text
from data_pipeline.sources.markdown_docs.markdown_includes import Repository
from data_pipeline.sources.markdown_docs.markdown_pages import read_page
from data_pipeline.sources.parts import SourceInParts, groups, part_names, read_part, write_parts
from data_pipeline.sources.paths import as_list, plain

log = logging.getLogger(__name__)

ENDINGS = (".md", ".markdown", ".mdx")
# Folders that are read only through includes, or hold no documentation.
LEFT_OUT_FOLDERS = frozenset(
    [
        "node_modules",
        "vendor",
        "third_party",
        "includes",
        "_includes",
        "snippets",
        "_partials",
        "archetypes",
        "reusables",
    ]
)
LEFT_OUT_FILES = frozenset(
    ["license", "licence", "code_of_conduct", "code-of-conduct", "contributing", "toc", "summary", "_sidebar"]
)
LICENCE_FILES = ("license", "license.md", "license.txt", "licence", "licence.md", "copying", "license.rst")
LICENCE_BYTES = 16 * 1024
MINIMUM_CHARACTERS = 100  # shorter pages are a title and links
PART_BYTES = 16 * 1024 * 1024
PARTS = "markdown_docs.jsonl"


@dataclass(frozen=True)
class MarkdownDocs(SourceInParts):
    """Pages of checked-out documentation repositories (Azure's, Kubernetes', GitHub's, ...).

    `paths`: a folder or a list of folders. Includes are resolved within a folder's repository (the nearest parent that
    contains .git, else the folder itself), whose licence file applies to the pages. Files read: .md, .markdown and
    .mdx. reStructuredText is excluded, because only a project's own Sphinx extensions can interpret it: build it, and
    read the HTML with `Web`. Symbolic links are not followed. Files over `max_file_bytes`, and pages that exceed it
    through includes, are reported and skipped.
    """

    paths: str | list[str]
    category: str = "general_system"
    max_file_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        check_number("max_file_bytes", self.max_file_bytes, least=1)
        object.__setattr__(self, "paths", plain(self.paths))

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every page and of all that pages may include."""
        folders = self._folders()
        files = (path for folder in folders for path in _walk(_root(folder), everything=True))
        found = {"markdown_docs": settings_identity(self, by, "paths"), "files": file_identity(files, by)}
        if by != EARLIER:  # the folders' places in their repositories: documents are named by them
            found["folders"] = [str(folder.relative_to(_root(folder).parent)) for folder in folders]
        return found

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Write the list of parts into `scratch`: files in order, about PART_BYTES per part."""
        files = ((folder, path) for folder in self._folders() for path in _walk(folder))
        items = (([str(folder), str(path)], path.stat().st_size) for folder, path in files)
        write_parts(scratch / PARTS, groups(items, PART_BYTES))

    def parts(self, scratch: Path) -> list[str]:
        """Return the parts' names; raise ValueError, naming `paths`, if there is no Markdown."""
        names = part_names(scratch / PARTS)
        if not names:
            raise SettingError("paths", self.paths, f"give {' '.join(ENDINGS)} files", "has no Markdown")
        return names

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield a part's pages; unreadable files are reported to `problems`."""
        repositories: dict[str, tuple[Repository, str | None]] = {}
        missing = 0
        for folder, name in read_part(scratch / PARTS, part):
            if folder not in repositories:
                root = _root(Path(folder))
                repositories[folder] = Repository(root, self.max_file_bytes), _licence(root)
            repository, licence = repositories[folder]
            path = Path(name)
            try:
                page = read_page(path, repository, self.max_file_bytes)
            except Unreadable as error:
                problems.skip(str(path), error.kind, error.detail)
                continue
            except OSError as error:
                problems.skip(str(path), "unreadable file", str(error.strerror or error))
                continue
            missing += page.missing
            if len(page.text) < MINIMUM_CHARACTERS:
                continue
            about = {"category": self.category, "origin": str(path), "date": page.date, "licence": licence}
            identity = f"markdown_docs:{repository.root.name}/{path.relative_to(repository.root)}"
            metadata = {"source": "markdown_docs", **{key: value for key, value in about.items() if value}}
            yield Document(page.text, identity, metadata)
        if missing:
            log.info("paths: %d includes are not in their repositories, and were left out", missing)

    def _folders(self) -> list[Path]:
        """Return the absolute folders; raise ValueError for a missing, nested or duplicate one."""
        folders = [Path(path).expanduser() for path in as_list(self.paths)]
        for folder in folders:
            if not folder.is_dir():
                raise SettingError("paths", folder, "give the folder of a checked-out repository", "is not a folder")
        folders = sorted({folder.resolve() for folder in folders})
        for folder, other in itertools.pairwise(folders):
            if other.is_relative_to(folder):
                raise SettingError("paths", other, "give one of them", f"lies in {folder}")
        names: dict[str, Path] = {}
        for root in map(_root, folders):
            if names.setdefault(root.name, root) != root:
                raise SettingError("paths", root, "rename one of them", f"has the name of {names[root.name]}")
        return folders


def _root(folder: Path) -> Path:
    """Return the repository that contains a folder, or the folder itself if none does."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), folder)


def _walk(folder: Path, everything: bool = False) -> Iterator[Path]:
    """Yield the pages under a folder in order; with `everything`, all files that an include may name too."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and (everything or name.lower() not in LEFT_OUT_FOLDERS)
        )
        for name in sorted(names):
            path = Path(parent, name)
            stem, ending = os.path.splitext(name.lower())
            wanted = everything or (ending in ENDINGS and stem not in LEFT_OUT_FILES)
            if wanted and path.is_file() and not path.is_symlink():
                yield path


def _licence(root: Path) -> str | None:
    """Return the SPDX identifier of a repository's licence file, or None if it is unknown."""
    for path in sorted(root.iterdir(), key=lambda path: path.name.lower()):
        if path.name.lower() in LICENCE_FILES and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                found = licence_of_text(file.read(LICENCE_BYTES).decode("utf-8", "replace"))
            if found:
                return found
    return None
