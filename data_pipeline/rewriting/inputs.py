"""Input of a rewriting: a folder of Parquet shards or JSON lines, read document by document in a fixed order."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from common.settings import SettingError
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE, file_identity
from data_pipeline.sources.json_lines import open_bytes
from data_pipeline.sources.text_files import json_records

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
ROWS_AT_ONCE = 64
LONGEST_LINE = 16 << 20  # bytes
Unit = tuple[Path, int | None]  # a row group of a Parquet file, or a whole file of JSON lines


class Corpus:
    """The documents of a folder (or of one file): `text`, `id`, and every other text column as metadata.

    Files are sorted by name, subfolders included. A document without an id gets its location as id. An unreadable
    document is reported to `problems` and skipped.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the files; raise ValueError, naming the key, if there is nothing to read."""
        self.path = Path(path).expanduser()
        names = [self.path] if self.path.is_file() else sorted(self.path.rglob("*")) if self.path.is_dir() else []
        hidden = {p for p in names if any(part.startswith(".") for part in p.relative_to(self.path).parts)}
        self.files = [p for p in names if p not in hidden and p.name.endswith(ENDINGS) and p.is_file()]
        if not self.files:
            found = "no such file or folder" if not self.path.exists() else f"none of {' '.join(ENDINGS)} in it"
            fix = f"{found}; give a folder of documents, such as a corpus job writes"
            raise SettingError("rewrite.input", path, fix)

    def identity(self, by: str = SAMPLE) -> str:
        """Return a digest of the files, identified as `by` says (`data_pipeline.identity.file_identity`)."""
        return file_identity(self.files, by)

    def units(self, problems: Problems) -> list[Unit]:
        """Return the units that are dealt to tasks, in order."""
        units: list[Unit] = []
        for path in self.files:
            if path.suffix != ".parquet":
                units.append((path, None))
                continue
            try:
                units += [(path, group) for group in range(pq.read_metadata(path).num_row_groups)]
            except (pa.ArrowException, OSError) as error:
                problems.skip(str(path), "corrupt Parquet", str(error).partition("\n")[0][:200])
        return units

    def rows(self, tasks: int = 1, task: int = 0) -> int | None:
        """Return the number of rows of a task, or None if only reading would tell."""
        units = self.units(Problems())[task::tasks]
        if any(group is None for _, group in units):
            return None
        metadata = {path: pq.read_metadata(path) for path in {path for path, _ in units}}
        return sum(metadata[path].row_group(group).num_rows for path, group in units)

    def documents(self, problems: Problems, tasks: int = 1, task: int = 0) -> Iterator[Document]:
        """Yield the documents of every `tasks`-th unit, starting with unit `task`."""
        for path, group in self.units(problems)[task::tasks]:
            for where, record in self._records(path, group, problems):
                place = f"{path}: {where}".encode(errors="replace").decode()
                text, name = record.get("text"), str(record.get("id") or place)
                if not isinstance(text, str):
                    problems.skip(place, "no text" if "text" in record else "no column 'text'")
                elif "\0" in text:
                    problems.skip(place, "NUL byte")
                elif not _encodes(text + name):
                    problems.skip(place, "not UTF-8", "a lone surrogate")
                elif not text.strip():
                    problems.skip(place, "empty text")
                else:
                    yield Document(text, name, _metadata(record, place))

    def _records(self, path: Path, group: int | None, problems: Problems) -> Iterator[tuple[str, dict]]:
        if group is None:
            try:
                with open_bytes(path) as stream:
                    yield from json_records(path, _lines(path, stream, problems), problems)
            except OSError as error:
                problems.skip(str(path), "unreadable file", str(error.strerror or error))
            return
        row = 0
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    for record in batch.to_pylist():
                        yield f"row group {group}, row {row}", record
                        row += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            detail = str(error).partition("\n")[0][:200]
            problems.skip(f"{path}: row group {group}, after row {row}", "corrupt Parquet", detail)


def _lines(path: Path, stream: BinaryIO, problems: Problems) -> Iterator[bytes]:
    """Yield the lines of a stream; one longer than LONGEST_LINE is replaced by a blank one, never held in memory."""
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(1 << 20)
            problems.skip(f"{path}: line {number}", "line too long", f"over {LONGEST_LINE >> 20} MiB")
            line = b"\n"
        yield line


def _metadata(record: dict, place: str) -> dict[str, str]:
    """Return the other text columns; datatrove's writers nest theirs in a column `metadata`."""
    inner = record.get("metadata")
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError:
            inner = None
    merged = {**(inner if isinstance(inner, dict) else {}), **record}
    found = {k: v for k, v in merged.items() if k not in ("id", "text") and isinstance(v, str) and _encodes(v)}
    if "license" in found:
        found.setdefault("licence", found["license"])
    return {"origin": place, **found}


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
