"""arXiv: the metadata snapshot joined with the bulk source archives, LaTeX converted to Markdown."""

import gzip
import json
import re
import sqlite3
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any

from common.settings import SettingError
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.licences import licence_of_address
from data_pipeline.markup.latex.convert import decode, latex_markdown
from data_pipeline.markup.latex.macros import LatexError
from data_pipeline.sources.index_file import new_index, open_index
from data_pipeline.sources.parts import SourceInParts

CATEGORIES = ("cs.DC", "cs.OS", "cs.AR", "cs.PF", "cs.NI", "cs.DB", "cs.SE")
INDEX = "arxiv.sqlite"
LINE_BYTES = 16 << 20  # per metadata line; the longest, with 3,000 authors, has 0.3 MB
UNPACKED_BYTES = 512 << 20  # per paper source, figures included
FILE_BYTES = 4 << 20  # per text file of a source
TEXT_BYTES = 32 << 20  # for all text files of a source
NAME_BYTES = 1 << 20  # for a tar's long names and similar headers
BAD_HEADERS = (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError)  # type: ignore[attr-defined]  # not in stubs
NAMES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
SHORTEST_BODY = 500  # characters; a shorter body only wraps an included PDF
FIGURES = (
    ".pdf",
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".eps",
    ".ps",
    ".svg",
    ".mp4",
    ".zip",
    ".gz",
    ".tar",
    ".ttf",
    ".otf",
)
OLD_NAME = re.compile(r"([a-z-]+)(\d{7})")  # hep-th9901001, hep-th/9901001 in the metadata


@dataclass(frozen=True)
class Arxiv(SourceInParts):
    """Papers in at least one of `categories`, from their LaTeX source.

    `metadata`: the snapshot, JSON lines, .gz or plain. `sources`: a folder of the bulk archives (`arXiv_src_*.tar`), or
    one of them. Title, abstract, date and licence come from the metadata. Papers with only a PDF count as skipped.
    """

    metadata: str
    sources: str
    categories: list[str] | tuple[str, ...] = CATEGORIES
    category: str = "general_system"
    keep_acknowledgements: bool = False

    def __post_init__(self) -> None:
        categories = [self.categories] if isinstance(self.categories, str) else [str(name) for name in self.categories]
        if not categories:
            raise SettingError("categories", [], "name at least one, such as cs.OS")
        object.__setattr__(self, "categories", categories)  # Hydra passes its own list type

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of the metadata and of every archive."""
        return {
            "arxiv": settings_identity(self, by, "metadata", "sources"),
            "files": file_identity([self._metadata_file(), *self._archives().values()], by),
        }

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Index the records of the wanted papers on disk; raise ValueError if there are none."""
        if (scratch / INDEX).exists():
            return
        path = self._metadata_file()
        with new_index(scratch / INDEX) as index:
            index.execute("CREATE TABLE papers (id TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")
            rows = ((record["id"], json.dumps(_kept(record))) for record in self._wanted(path, problems))
            index.executemany("INSERT OR REPLACE INTO papers VALUES (?, ?)", rows)
            if not index.execute("SELECT count(*) FROM papers").fetchone()[0]:
                problem = f"has no paper of categories ({', '.join(self.categories)})"
                raise SettingError("metadata", self.metadata, "give other categories, or the whole snapshot", problem)

    def parts(self, scratch: Path) -> list[str]:
        """Return the names of the archives."""
        return list(self._archives())

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the papers of one archive, in its order."""
        archive = self._archives()[part]
        with open_index(scratch / INDEX) as index:
            try:
                with tarfile.open(archive, "r:", tarinfo=_CheckedTarInfo) as members:
                    for member in members:
                        members.members = []  # type: ignore[attr-defined]  # it would keep every header in memory
                        paper = self._paper(index, member)
                        if paper is not None:
                            yield from self._read_paper(archive, members, member, paper, problems)
            except (tarfile.TarError, OSError, _BadTarError) as error:
                problems.skip(str(archive), "broken archive", _first_line(error))

    def _paper(self, index: sqlite3.Connection, member: tarfile.TarInfo) -> dict | None:
        if not member.isreg():
            return None
        name = member.name.rpartition("/")[2].removesuffix(".gz").removesuffix(".pdf")
        old = OLD_NAME.fullmatch(name)
        found = index.execute("SELECT record FROM papers WHERE id = ?", (f"{old[1]}/{old[2]}" if old else name,))
        row = found.fetchone()
        return json.loads(row[0]) if row else None

    def _read_paper(
        self, archive: Path, members: tarfile.TarFile, member: tarfile.TarInfo, paper: dict, problems: Problems
    ) -> Iterator[Document]:
        if not member.name.endswith(".gz"):
            problems.counts["paper without LaTeX source"] += 1  # the authors' choice, not an error
            return
        where = f"{archive}: {member.name}"
        try:
            stream = members.extractfile(member)
            assert stream is not None  # a regular file
            with stream:
                files = _source_files(stream, where, problems)
            body = latex_markdown(files, self.keep_acknowledgements)
        except LatexError as error:
            return problems.skip(where, "unreadable LaTeX", str(error))
        except (tarfile.TarError, EOFError, OSError, zlib.error, _BadTarError) as error:
            return problems.skip(where, "broken source", _first_line(error))
        if len(body) < SHORTEST_BODY:
            return problems.skip(where, "no text in the source", f"{len(body)} characters")
        yield self._document(paper, body, where)

    def _document(self, paper: dict, body: str, where: str) -> Document:
        text = f"# {' '.join(paper['title'].split())}\n\n## Abstract\n\n{_paragraphs(paper['abstract'])}\n\n{body}\n"
        metadata = {
            "source": "arxiv",
            "category": self.category,
            "origin": where,
            "url": f"https://arxiv.org/abs/{paper['id']}",
            "date": paper["date"],
            "licence": licence_of_address(paper["license"]) or paper["license"],  # arXiv's own has no SPDX id
        }
        return Document(text, f"arxiv:{paper['id']}", {key: value for key, value in metadata.items() if value})

    def _metadata_file(self) -> Path:
        path = Path(self.metadata).expanduser()
        if not path.is_file():
            raise SettingError("metadata", self.metadata, "give arXiv's metadata snapshot, JSON lines", "is not a file")
        return path

    def _archives(self) -> dict[str, Path]:
        folder = Path(self.sources).expanduser()
        found = [folder] if folder.is_file() else sorted(folder.rglob("*.tar"))
        if not found:
            raise SettingError("sources", self.sources, "give the folder of arXiv_src_*.tar files", "has no .tar in it")
        return {path.name if path == folder else path.relative_to(folder).as_posix(): path for path in found}

    def _wanted(self, path: Path, problems: Problems) -> Iterator[dict]:
        """Yield the records with one of the categories; others are not parsed, which is ten times as fast."""
        names = re.compile(rb"|".join(re.escape(name.encode()) for name in self.categories))
        wanted = set(self.categories)
        for number, line in _lines(path, problems):
            if names.search(line):
                try:
                    record = json.loads(line)
                    if not wanted.isdisjoint(record["categories"].split()):
                        for key in ("id", "title", "abstract"):
                            record[key].encode()  # raises for a lone surrogate, or a value that is not text
                        yield record
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    detail = f"no {error}" if isinstance(error, KeyError) else _first_line(error)
                    problems.skip(f"{path}: line {number}", "broken record", detail)


class _BadTarError(Exception):
    """A tar with an error that tarfile would not report, or with excessive sizes."""


class _CheckedTarInfo(tarfile.TarInfo):
    """Tar header that is refused if broken (tarfile would take it for the end) or if its name takes gigabytes."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_CheckedTarInfo":
        try:
            info = super().frombuf(buf, encoding, errors)
        except BAD_HEADERS as error:
            raise _BadTarError(str(error)) from error
        if info.type in NAMES and info.size > NAME_BYTES:
            raise _BadTarError(f"a name of {info.size:,} bytes")
        return info


class _Bounded:
    """A stream limited to `UNPACKED_BYTES`: a decompression bomb costs that much work, and no memory."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._left = stream, UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _BadTarError(f"it unpacks to over {UNPACKED_BYTES:,} bytes")
        return data


def _source_files(compressed: IO[bytes], where: str, problems: Problems) -> dict[str, str]:
    """Return the text files of a paper's source (a gzipped tar or a gzipped TeX file), by path."""
    with gzip.GzipFile(fileobj=compressed) as plain:
        head = plain.peek(tarfile.BLOCKSIZE)[: tarfile.BLOCKSIZE]
        if not _is_tar(head):
            if head.startswith((b"%!PS", b"%PDF", b"\x1f\x8b")):
                return {}
            data = plain.read(FILE_BYTES + 1)
            if len(data) > FILE_BYTES:
                raise _BadTarError(f"one file of over {FILE_BYTES:,} bytes")
            return {"main.tex": decode(data)}
        bounded: Any = _Bounded(plain)  # tarfile calls nothing of a stream but read
        with tarfile.open(fileobj=bounded, mode="r|", tarinfo=_CheckedTarInfo, bufsize=1 << 18) as members:
            return _text_files(members, where, problems)


def _text_files(members: tarfile.TarFile, where: str, problems: Problems) -> dict[str, str]:
    """Return the files of a source that may be text. Nothing is written to disk; links are ignored."""
    files: dict[str, str] = {}
    total = 0
    for member in members:
        members.members = []  # type: ignore[attr-defined]  # as above
        name = member.name.removeprefix("./")
        if not member.isreg() or member.issparse() or name.lower().endswith(FIGURES):
            continue
        if member.size > FILE_BYTES:
            if name.lower().endswith(".tex"):
                problems.skip(f"{where}: {name[:200]}", "file too long", f"{member.size:,} bytes")
            continue
        total += member.size
        if total > TEXT_BYTES:
            raise _BadTarError(f"its text files have over {TEXT_BYTES:,} bytes")
        stream = members.extractfile(member)
        assert stream is not None  # a regular file
        data = stream.read()
        if b"\0" not in data or name.lower().endswith(".tex"):
            files[name] = decode(data)
    return files


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _lines(path: Path, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, counted from 1; a line that is too long is reported and skipped."""
    number, overlong = 1, False
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as stream:
            while line := stream.readline(LINE_BYTES):
                whole = line.endswith(b"\n") or len(line) < LINE_BYTES
                if not whole and not overlong:
                    problems.skip(f"{path}: line {number}", "line too long", f"over {LINE_BYTES:,} bytes")
                if whole and not overlong:
                    yield number, line
                overlong = not whole
                number += whole
    except (OSError, EOFError, zlib.error) as error:
        problems.skip(f"{path}: after line {number - 1}", "corrupt file", _first_line(error))


def _kept(record: dict) -> dict[str, str]:
    """Return the fields of a record that a document needs. The date is the newest, archived version's."""
    date = record.get("update_date")
    try:
        date = parsedate_to_datetime(record["versions"][-1]["created"]).date().isoformat()
    except (KeyError, IndexError, TypeError, ValueError):
        date = date if isinstance(date, str) else ""
    licence = record.get("license")
    kept = {name: record[name] for name in ("id", "title", "abstract")}
    return {**kept, "date": date, "license": licence if isinstance(licence, str) else ""}


def _paragraphs(abstract: str) -> str:
    """Return an abstract with its lines joined; an indented line starts a paragraph."""
    paragraphs = re.split(r"\n[ \t]*\n|\n(?=[ \t]{2})", abstract.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
