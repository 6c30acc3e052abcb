"""Text from files: plain text, Markdown, JSON lines and Parquet, compressed or not."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.sources.json_lines import COMPRESSED, open_bytes
from data_pipeline.sources.parts import SourceInParts, groups, part_names, read_part, write_parts
from data_pipeline.sources.paths import as_list, named_files, plain

log = logging.getLogger(__name__)

PLAIN = (".txt", ".md")
JSON_LINES = (".jsonl", ".json")
ENDINGS = (*(kind + end for kind in (*PLAIN, *JSON_LINES) for end in ("", *COMPRESSED)), ".parquet")
RECORDS_AT_ONCE = 256
KEYS_SHOWN = 20  # of a record without the text key
PART_BYTES = 4 * 1024 * 1024  # of text as stored, possibly compressed
PARTS = "text_files.jsonl"


@dataclass(frozen=True)
class TextFiles(SourceInParts):
    """Every file named by a glob (`**` allowed), a list of globs, a file or a folder.

    .txt and .md files are one document each. In .jsonl (or .json with one object per line) and .parquet each record is
    one, with its text in `text_key` and optionally its id in `id_key`. All but Parquet may be .gz or .zst. Shards of
    SlimPajama and FineWeb-Edu need no conversion. Documents over `max_document_bytes` are cut at line ends into pieces
    path#0, path#1, ..., so that no later stage gets a text of hundreds of megabytes.
    """

    path: str | list[str]
    text_key: str = "text"
    id_key: str = "id"
    max_document_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        check_number("max_document_bytes", self.max_document_bytes, least=4)  # the longest UTF-8 character
        object.__setattr__(self, "path", plain(self.path))

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every file; raise ValueError if no file matches."""
        return {"text_files": settings_identity(self, by, "path"), "files": file_identity(self.files(), by)}

    def files(self) -> list[Path]:
        """Return the matching files, sorted; raise ValueError, naming `path`, if there are none."""
        matched = {file for path in as_list(self.path) for file in named_files(path)}
        readable = sorted(path for path in matched if path.name.lower().endswith(ENDINGS))
        if not readable:
            found = f"{len(matched)} files, none of them readable text" if matched else "no file"
            raise SettingError("path", self.path, f"give {' '.join(ENDINGS)} files", found)
        if len(readable) < len(matched):
            log.info("path: %d files with other endings left out", len(matched) - len(readable))
        return readable

    def documents(self, problems: Problems, processes: int) -> Iterator[Document]:
        """Yield the documents of all files in order; unreadable ones are reported to `problems`.

        One process reads: decompression and hashing are faster than tokenizing.
        """
        for path in self.files():
            yield from self._read(path, problems)

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Write the groups of files that are read together."""
        write_parts(scratch / PARTS, groups(((str(path), path.stat().st_size) for path in self.files()), PART_BYTES))

    def parts(self, scratch: Path) -> list[str]:
        """Return the names of the groups of files."""
        return part_names(scratch / PARTS)

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the documents of a group of files."""
        for path in read_part(scratch / PARTS, part):
            yield from self._read(Path(path), problems)

    def _read(self, path: Path, problems: Problems) -> Iterator[Document]:
        try:
            yield from self._documents_of(path, problems)
        except OSError as error:
            problems.skip(str(path), "unreadable file", str(error.strerror or error))

    def _documents_of(self, path: Path, problems: Problems) -> Iterator[Document]:
        name = path.name.lower()
        if name.endswith(".parquet"):
            yield from self._records(path, self._parquet(path, problems), problems)
            return
        with open_bytes(path) as stream:
            if name.removesuffix(".gz").removesuffix(".zst").endswith(PLAIN):
                yield from self._plain(path, stream, problems)
            else:
                yield from self._records(path, json_records(path, stream, problems), problems)

    def _plain(self, path: Path, stream: BinaryIO, problems: Problems) -> Iterator[Document]:
        """Yield a file's text, piece by piece; from the first byte that is not text, the file is skipped."""
        offset, number, pending = 0, 0, b""
        while True:
            try:
                pending += stream.read(self.max_document_bytes + 1 - len(pending))
            except OSError as error:
                return problems.skip(f"{path}: after byte {offset}", "corrupt file", str(error))
            if not pending:
                return None
            piece = _first_piece(pending, self.max_document_bytes)
            try:
                text = piece.decode()
            except UnicodeDecodeError as error:
                return problems.skip(f"{path}: byte {offset + error.start}", "not UTF-8", "from there on")
            if "\0" in text:
                return problems.skip(f"{path}: byte {offset + piece.index(0)}", "NUL byte", "from there on")
            whole = number == 0 and len(piece) == len(pending)
            if text.strip():
                metadata = {"source": "text_files", "origin": str(path)}
                yield Document(text, str(path) if whole else f"{path}#{number}", metadata)
            offset, number, pending = offset + len(piece), number + 1, pending[len(piece) :]

    def _records(self, path: Path, records: Iterator[tuple[str, dict]], problems: Problems) -> Iterator[Document]:
        for where, record in records:
            text = record.get(self.text_key)
            place = f"{path}: {where}"
            if not isinstance(text, str):
                found = "no" if self.text_key not in record else f"{type(text).__name__}, not str, in"
                problems.skip(place, f"{found} column {self.text_key!r}", cause=self._text_key(record))
                continue
            try:
                encoded = text.encode()
            except UnicodeEncodeError:
                problems.skip(place, "not UTF-8", "a lone surrogate")
                continue
            if "\0" in text:
                problems.skip(place, "NUL byte")
                continue
            identity = str(record.get(self.id_key) or f"{path}:{where.removeprefix('line ')}")
            metadata = _metadata(record, f"{path}: {where}")
            if len(encoded) <= self.max_document_bytes:
                if text.strip():
                    yield Document(text, identity, metadata)
                continue
            for number, piece in enumerate(_pieces(encoded, self.max_document_bytes)):
                if piece.strip():
                    yield Document(piece.decode(), f"{identity}#{number}", metadata)

    def _text_key(self, names: Iterable[str]) -> str:
        return f"text_key={self.text_key} (a record has {', '.join(list(names)[:KEYS_SHOWN]) or 'nothing'})"

    def _parquet(self, path: Path, problems: Problems) -> Iterator[tuple[str, dict]]:
        row = 0
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                if self.text_key not in names:
                    detail = f"it has {', '.join(names)}: set text_key"
                    rows, cause = file.metadata.num_rows, self._text_key(names)
                    return problems.skip(str(path), f"no column {self.text_key!r}", detail, rows, cause)
                wanted = [name for name in dict.fromkeys((self.text_key, self.id_key, *METADATA)) if name in names]
                for batch in file.iter_batches(RECORDS_AT_ONCE, columns=wanted):
                    for record in batch.to_pylist():
                        yield f"row {row}", record
                        row += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            return problems.skip(f"{path}: after row {row}", "corrupt Parquet", str(error).partition("\n")[0][:200])
        return None


METADATA = ("url", "date", "timestamp", "licence", "license", "source", "meta")


def _metadata(record: dict, origin: str) -> dict[str, str]:
    """Return the metadata of C4, FineWeb and SlimPajama records, under this project's names."""
    meta = record.get("meta")
    subset = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    known = {
        "source": subset or record.get("source") or "text_files",
        "date": record.get("date") or record.get("timestamp"),
        "url": record.get("url"),
        "licence": record.get("licence") or record.get("license"),
    }
    return {"origin": origin, **{name: str(value) for name, value in known.items() if value}}


def json_records(path: Path, stream: Iterable[bytes], problems: Problems) -> Iterator[tuple[str, dict]]:
    """Yield ("line n", object) for every line that holds an object, counting from 1."""
    number = 0
    lines = iter(stream)
    while True:
        number += 1
        try:
            line = next(lines)
        except StopIteration:
            return
        except OSError as error:
            problems.skip(f"{path}: after line {number - 1}", "corrupt file", str(error))
            return
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            problems.skip(f"{path}: line {number}, byte {error.start}", "not UTF-8")
        except (ValueError, RecursionError) as error:
            problems.skip(f"{path}: line {number}", "broken JSON", str(error)[:200])
        else:
            if isinstance(record, dict):
                yield f"line {number}", record
            else:
                problems.skip(f"{path}: line {number}", "not a JSON object")


def _pieces(encoded: bytes, limit: int) -> Iterator[bytes]:
    start = 0
    while start < len(encoded):
        piece = _first_piece(encoded[start : start + limit + 1], limit)
        yield piece
        start += len(piece)


def _first_piece(encoded: bytes, limit: int) -> bytes:
    """Return at most `limit` bytes from the start, cut after a line end, else between two characters."""
    if len(encoded) <= limit:
        return encoded
    line_end = encoded.rfind(b"\n", 0, limit) + 1
    if line_end:
        return encoded[:line_end]
    end = limit
    while end > limit - 3 and encoded[end] & 0xC0 == 0x80:  # a UTF-8 continuation byte: do not cut here
        end -= 1
    return encoded[:end]
