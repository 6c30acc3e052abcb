"""JSON lines from untrusted files, compressed or not, with limits on lines and on the whole."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from data_pipeline.documents import Problems

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
LINE_BYTES = 128 * 1024 * 1024
# A decompressed stream may be this many times its file (DEFLATE allows 1032; JSON events reach 10 to 30). The first
# megabytes are exempt: a small file of one repeated record is not a bomb.
EXPANSION = 200
UNSUSPECTED_BYTES = 64 * 1024 * 1024


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz or .zst.

    Arrow's decompressors read several members in one file, and raise OSError for a truncated one.
    """
    codec = COMPRESSED.get(path.suffix.lower())
    file = path.open("rb")
    return io.BufferedReader(pa.CompressedInputStream(file, codec), 1 << 20) if codec else file


def allowed_bytes(path: Path) -> int:
    """Return the number of bytes that a file may decompress to before it counts as a bomb."""
    return max(UNSUSPECTED_BYTES, EXPANSION * path.stat().st_size)


def lines(path: Path, problems: Problems | None, line_bytes: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of a file; memory stays within a line of `line_bytes`.

    A longer line is skipped; a truncated, unreadable or bomb-like file ends there. Both are reported to `problems`;
    None suppresses the reports in a second reading.
    """

    def skip(where: str, kind: str, detail: str) -> None:
        if problems is not None:
            problems.skip(where, kind, detail)

    number = taken = 0
    try:
        allowed = allowed_bytes(path)
        with open_bytes(path) as stream:
            while line := stream.readline(line_bytes + 1):
                number += 1
                taken += len(line)
                too_long = len(line) > line_bytes
                while too_long and not line.endswith(b"\n") and taken <= allowed:
                    line = stream.readline(line_bytes)
                    taken += len(line)
                    if not line:
                        break
                if taken > allowed:
                    detail = f"over {EXPANSION} times the file's size"
                    return skip(f"{path}: line {number}", "decompression bomb", detail)
                if too_long:
                    skip(f"{path}: line {number}", "line too long", f"over {line_bytes:,} bytes")
                else:
                    yield number, line
    except OSError as error:
        skip(f"{path}: after line {number}", "corrupt file", str(error.strerror or error))
    return None


def parse(place: str, line: bytes, problems: Problems) -> dict | None:
    """Return the object on a line; None for an empty line, and for a broken one, which is reported."""
    import orjson  # only sources of JSON lines need it

    if not line.strip():
        return None
    try:
        record = orjson.loads(line)
    except ValueError as error:  # includes invalid UTF-8 and excessive nesting
        problems.skip(place, "broken JSON", str(error)[:200])
        return None
    if not isinstance(record, dict):
        problems.skip(place, "not a JSON object")
        return None
    return record


def records(path: Path, problems: Problems) -> Iterator[tuple[int, dict]]:
    """Yield (line number, object) for every line of a file that holds an object."""
    for number, line in lines(path, problems):
        record = parse(f"{path}: line {number}", line, problems)
        if record is not None:
            yield number, record
