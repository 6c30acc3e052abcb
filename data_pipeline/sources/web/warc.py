"""WARC files, read record by record with warcio; broken, truncated and oversized records are reported by offset."""

import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from data_pipeline.documents import Unreadable

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord

HEADER_BYTES = 256 * 1024  # limit for all header lines of a record together
BLOCK = 16 * 1024
GZIP_START = b"\x1f\x8b\x08"
PLAIN_START = b"WARC/"
CHUNKED, IDENTITY = "chunked", ("", "identity", "none")


@dataclass(frozen=True, slots=True)
class Capture:
    """Headers of a response or resource record, before its payload is read.

    `status` is the HTTP status, 200 for a resource; `length` the stored bytes; `media_type` is in lower case without
    parameters.
    """

    offset: int
    url: str
    status: int
    media_type: str
    charset: str
    last_modified: str
    length: int
    record: "ArcWarcRecord"


def captures(path: Path, start: int = 0) -> Generator[Capture | tuple[int, Unreadable], None, None]:
    """Yield the captures of a WARC file from byte `start` on, and (offset, error) for each broken record.

    After a broken record, reading continues at the next record with a valid start. Only after the next item has been
    requested is a capture known to be complete: a truncated one is followed by its error with the same offset. Call
    `payload` before requesting the next item.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        offset: int | None = start
        while offset is not None and offset < size:
            place = [offset]
            file.seek(offset)
            try:
                yield from _captures_from(file, size, place)
                return
            except Unreadable as error:
                at = max(place[0], offset)  # warcio's offset is below the start if members are not records
                yield at, error
            offset = _next_record(file, at + 1)


def payload(capture: Capture, limit: int) -> bytes:
    """Return a capture's body, dechunked and decompressed.

    Raises:
        Unreadable: it has more than `limit` bytes, stored or expanded, or its encoding is broken or unknown.
    """
    body = capture.record.raw_stream.read(limit + 1)
    if len(body) > limit:
        raise Unreadable("page too large", f"over {limit} bytes")
    headers = capture.record.http_headers
    if headers is None:
        return body
    if (headers.get_header("Transfer-Encoding") or "").strip().lower() == CHUNKED:
        from warcio.bufferedreaders import ChunkedDataReader

        body = ChunkedDataReader(BytesIO(body)).read()
    for encoding in reversed((headers.get_header("Content-Encoding") or "").lower().split(",")):
        if encoding.strip() not in IDENTITY:
            body = _expand(body, encoding.strip(), limit)
    return body


def _captures_from(file: BinaryIO, size: int, place: list[int]) -> Iterator[Capture]:
    """Yield captures; when this raises, `place[0]` is the offset of the faulty record."""
    from warcio.archiveiterator import WARCIterator
    from warcio.exceptions import ArchiveLoadFailed

    records = WARCIterator(file)
    records.INC_RECORD = ""  # warcio would print this; err_count has the same information
    records.reader = reader = _bounded_reader(file)
    while True:
        reader.line_bytes = 0
        try:
            record = next(records, None)
        except (ArchiveLoadFailed, AttributeError) as error:  # AttributeError: a record without its URI
            place[0] = records.offset
            raise Unreadable("broken WARC record", _first_line(error)) from error
        except Unreadable:
            place[0] = records.offset
            raise
        if records.err_count:
            raise Unreadable("broken WARC record", "it does not end where its Content-Length says")
        place[0] = records.offset
        if record is None:
            if reader.cut:
                raise Unreadable("truncated WARC file", "the end of its last gzip member is missing")
            return
        if record.length is None:
            raise Unreadable("broken WARC record", "no Content-Length")
        missing = record.length - (size - place[0])
        if missing > 0 and reader.decompressor is None:  # detect it before reading to the end of the file
            raise Unreadable("truncated WARC record", f"over {missing} bytes are missing")
        capture = _capture(record, place[0])
        if capture is not None:
            yield capture
        while record.raw_stream.read(BLOCK):
            pass
        if record.length and record.raw_stream.limit:
            raise Unreadable("truncated WARC record", f"{record.raw_stream.limit} bytes are missing")


def _capture(record: "ArcWarcRecord", offset: int) -> Capture | None:
    """Return the capture in a record, or None for others: a request, a revisit, metadata."""
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    if record.rec_type not in ("response", "resource") or not url:
        return None
    headers = record.http_headers
    if record.rec_type == "response":
        if headers is None:
            return None
        status = headers.get_statuscode()
        content_type, modified = headers.get_header("Content-Type"), headers.get_header("Last-Modified")
    else:
        status, content_type, modified = "200", record.content_type, None
    media_type, _, parameters = (content_type or "").partition(";")
    return Capture(
        offset,
        url,
        int(status) if status.isascii() and status.isdigit() else 0,
        media_type.strip().lower(),
        _charset(parameters),
        modified or "",
        record.length,
        record,
    )


def _charset(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'").lower()
    return ""


def _bounded_reader(file: BinaryIO) -> Any:
    """Return a strict version of warcio's reader of gzip members: header lines are bounded, broken gzip raises."""
    from warcio.bufferedreaders import BufferedReader

    class BoundedReader(BufferedReader):
        line_bytes = 0
        cut = False

        def readline(self, length: int | None = None) -> bytes:
            line = super().readline(min(length or HEADER_BYTES, HEADER_BYTES))
            self.line_bytes += len(line)
            if self.line_bytes > HEADER_BYTES:
                raise Unreadable("broken WARC record", f"over {HEADER_BYTES} bytes of headers")
            return line

        def _decompress(self, data: bytes) -> bytes:
            try:
                return self.decompressor.decompress(data) if self.decompressor else data
            except zlib.error as error:
                raise Unreadable("corrupt gzip", str(error)) from error

        def _process_read(self, data: bytes) -> None:
            super()._process_read(data)
            # Without more input, a member that has started but not ended is truncated.
            self.cut = not data and self.decompressor is not None and not self.decompressor.eof

    start = file.tell()
    compressed = file.read(len(GZIP_START)) == GZIP_START
    file.seek(start)
    return BoundedReader(file, block_size=BLOCK, decomp_type="gzip" if compressed else None)


def _expand(body: bytes, encoding: str, limit: int) -> bytes:
    """Return `body` decompressed to at most `limit` bytes; raise Unreadable if that fails."""
    if encoding in ("gzip", "x-gzip"):
        expanded = _inflate(body, 16 + zlib.MAX_WBITS, limit)
    elif encoding == "deflate":  # with zlib's header, or raw, as some servers send it
        zlib_header = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        expanded = _inflate(body, zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS, limit)
    elif encoding == "br":
        expanded = _unbrotli(body, limit)
    else:
        raise Unreadable("unknown content encoding", encoding[:40])
    if len(expanded) > limit:
        raise Unreadable("page too large", f"over {limit} bytes when expanded")
    return expanded


def _inflate(body: bytes, window: int, limit: int) -> bytes:
    try:
        return zlib.decompressobj(window).decompress(body, limit + 1)
    except zlib.error as error:
        if body[:3] != GZIP_START and window > zlib.MAX_WBITS:
            return body  # not gzip: a wrong header by the server, or kept by a crawler that decompressed the body
        raise Unreadable("broken content encoding", str(error)) from error


def _unbrotli(body: bytes, limit: int) -> bytes:
    import brotli

    decompressor, pieces, length = brotli.Decompressor(), [], 0
    try:
        piece = decompressor.process(body, output_buffer_limit=limit + 1)
        while piece and length <= limit:
            pieces.append(piece)
            length += len(piece)
            piece = decompressor.process(b"", output_buffer_limit=limit + 1)
    except brotli.error as error:
        raise Unreadable("broken content encoding", f"brotli: {error}") from error
    return b"".join(pieces)


def _next_record(file: BinaryIO, start: int) -> int | None:
    """Return the first offset, from `start` on, where a record seems to start, or None."""
    file.seek(0)
    mark = GZIP_START if file.read(3) == GZIP_START else PLAIN_START
    offset, kept = start, b""
    while True:
        file.seek(offset + len(kept))
        block = file.read(1 << 20)
        window = kept + block
        found = window.find(mark)
        while found >= 0:
            if _begins(file, offset + found, mark):
                return offset + found
            found = window.find(mark, found + 1)
        if not block:
            return None
        kept = window[-len(mark) :]
        offset += len(window) - len(kept)


def _begins(file: BinaryIO, offset: int, mark: bytes) -> bool:
    file.seek(offset - 1)
    head = file.read(512)
    if mark == PLAIN_START:
        return head.startswith(b"\n" + PLAIN_START)
    try:
        return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head[1:], len(PLAIN_START)) == PLAIN_START
    except zlib.error:
        return False


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("non-chunked" in line for line in lines):
        return "the file is one gzip member: give each record its own with `warcio recompress`"
    return lines[0][:200] if lines else type(error).__name__
