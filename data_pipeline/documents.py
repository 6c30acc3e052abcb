"""Documents, the records that could not be read, and the Parquet shards that store documents."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

log = logging.getLogger(__name__)

SPLITS = ("train", "validation")
UNIT_BYTES = 256 * 1024  # text per row group: the unit of work of later stages, small so that all cores finish together
SHARD_BYTES = 256 * 1024 * 1024  # text per file
REQUIRED = ("id", "text", "source", "origin", "length", "split")
SCHEMA = pa.schema(
    [
        *((name, pa.int64() if name == "length" else pa.string()) for name in REQUIRED),
        *((name, pa.string()) for name in ("licence", "date", "url")),
    ]
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its id and metadata.

    `metadata` has "source" (the reader) and "origin" (a path, or a package, its version and file), and, when known,
    "category", "licence" (SPDX where there is an identifier), "date" (ISO) and "url". Without a category a document is
    of its source's.
    """

    text: str
    id: str
    metadata: dict[str, str] = field(default_factory=dict)


class Unreadable(ValueError):
    """Data without a readable document. `kind` is a short name for counting, `detail` says more."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Problems:
    """Records a source could not read: one log line each, counted by kind; with `strict` the first one raises.

    Only the first `LOGGED` lines are logged and kept, so that a file of a million broken lines does not flood the log.

    Args:
        key: the command-line setting that sets `strict`.
        source: the key of the source being read.
    """

    LOGGED = 100

    def __init__(self, strict: bool = False, key: str = "data.strict", source: str = "data.source") -> None:
        self.strict, self.key, self.source = strict, key, source
        self.counts: Counter[str] = Counter()
        self.causes: dict[str, str] = {}
        self.lines: list[str] = []

    def skip(self, where: str, kind: str, detail: str = "", records: int = 1, cause: str = "") -> None:
        """Record that the data at `where` (a file, and a line or offset in it) is skipped.

        Args:
            records: number of records skipped there.
            cause: a source setting that may be wrong, as `text_key=body`, and what was found instead.

        Raises:
            ValueError: `strict` is set.
        """
        line = f"{where}: {kind}{f' ({detail})' if detail else ''}: skipped"
        if self.strict:
            raise ValueError(f"{line.removesuffix(': skipped')}; fix it, or set {self.key}=false to skip it")
        self.counts[kind] += records
        if cause:
            self.causes.setdefault(kind, f"{self.source}.{cause}")
        if len(self.lines) < self.LOGGED:
            self.lines.append(line)
            log.warning("%s", line)
            if len(self.lines) == self.LOGGED:
                log.warning("further problems are counted only")

    def check(self, read: int, most: float, group: str) -> None:
        """Check that at most a share `most` of the records was skipped.

        Args:
            read: number of records that were not skipped.
            group: the settings group with the key `most_skipped`.

        Raises:
            ValueError: more were skipped; the line names the probable setting.
        """
        skipped = sum(self.counts.values())
        if skipped <= most * (skipped + read):
            return
        share = skipped / (skipped + read)
        cause = self.causes.get(self.counts.most_common(1)[0][0], self.source)
        rest = f", or set {group}.most_skipped={math.ceil(100 * share) / 100} to read the rest" if read else ""
        raise ValueError(
            f"{cause}: {share:.1%} of {skipped + read:,} records were skipped ({self.summary()}); fix that{rest}"
        )

    def summary(self) -> str:
        """Return one line with the counts by kind."""
        return ", ".join(f"{count:,} x {kind}" for kind, count in self.counts.most_common())


class ShardWriter:
    """Parquet shards of one split: row groups of about UNIT_BYTES of text, files of about SHARD_BYTES.

    Files are `folder/<name>-00000.parquet` and so on; `name` defaults to the split. `schema` may have further metadata
    columns.
    """

    def __init__(self, folder: Path, split: str, name: str | None = None, schema: pa.Schema = SCHEMA) -> None:
        self.folder, self.split, self.name, self.schema = folder, split, name or split, schema
        self._optional = [column for column in schema.names if column not in REQUIRED]
        self.documents = self.bytes = 0
        self._shards = self._shard_bytes = self._unit_bytes = 0
        self._rows: list[dict] = []
        self._writer: pq.ParquetWriter | None = None

    def write(self, document: Document, length: int) -> None:
        """Add a document of `length` UTF-8 bytes."""
        optional = {name: document.metadata.get(name) for name in self._optional}
        source, origin = document.metadata.get("source", ""), document.metadata.get("origin", "")
        row = {"id": document.id, "text": document.text, "source": source, "origin": origin}
        self._rows.append({**row, "length": length, "split": self.split, **optional})
        self.documents += 1
        self.bytes += length
        self._unit_bytes += length
        if self._unit_bytes >= UNIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            path = self.folder / f"{self.name}-{self._shards:05d}.parquet"
            self._writer = pq.ParquetWriter(path, self.schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self.schema))
        self._shard_bytes += self._unit_bytes
        self._rows, self._unit_bytes = [], 0
        if self._shard_bytes >= SHARD_BYTES:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._shard_bytes, self._shards = None, 0, self._shards + 1

    def close(self) -> None:
        """Write pending rows and close the shard."""
        self._flush()
        self._close_shard()


def shards(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files of a split, in order."""
    return sorted(folder.glob(f"{split}-*.parquet"))


def units(folder: Path, split: str) -> list[tuple[Path, int]]:
    """Return the (file, row group) pairs of a split, in order: the fixed work units of later stages."""
    return [(path, group) for path in shards(folder, split) for group in range(pq.read_metadata(path).num_row_groups)]


def read_texts(unit: tuple[Path, int]) -> list[str]:
    """Return the texts of one unit."""
    path, group = unit
    with pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns=["text"]).column("text").to_pylist()


def read_documents(unit: tuple[Path, int]) -> Iterator[Document]:
    """Yield the documents of one unit."""
    path, group = unit
    with pq.ParquetFile(path) as file:
        for row in file.read_row_group(group).to_pylist():
            about = {name: row[name] for name in row if name not in ("id", "text", "length", "split")}
            yield Document(row["text"], row["id"], about)


def texts(folder: Path, split: str) -> Iterator[str]:
    """Yield the texts of a split, in order."""
    for unit in units(folder, split):
        yield from read_texts(unit)
