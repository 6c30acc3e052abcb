"""Posts of a Stack Exchange dump, streamed from Posts.xml, plain or inside a .7z archive."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from xml.parsers import expat

import pyarrow as pa

from data_pipeline.documents import Problems

POSTS = "Posts.xml"
BLOCK_BYTES = 1 << 20  # of a dump, parsed at once
POST_BYTES = 1 << 20  # limit; Stack Exchange accepts 30,000 characters per post
INVALID_TOKEN = expat.errors.codes[expat.errors.XML_ERROR_INVALID_TOKEN]

Row = dict[str, str]


class BrokenDumpError(ValueError):
    """A file that cannot be read as a dump's Posts.xml; the message gives the reason."""


def read_dump(path: Path, take: Callable[[Row, bytes], None], problems: Problems) -> None:
    """Call `take` with the attributes and the XML of every post in a Posts.xml or a .7z archive of one.

    A post that does not parse, or for which `take` raises KeyError or ValueError, is reported to `problems`.

    Raises:
        BrokenDumpError: the file is truncated or something else; posts before that point have been passed on.
    """
    rows = PostRows(str(path), problems)

    def taken(found: Iterable[tuple[Row, bytes]]) -> None:
        for row, xml in found:
            try:
                take(row, xml)
            except (KeyError, ValueError) as error:
                detail = f"no {error}" if isinstance(error, KeyError) else str(error)
                problems.skip(f"{path}: row Id={row.get('Id', '?')[:20]}", "broken row", detail[:200])

    if path.suffix == ".7z":
        _unpack(path, lambda block: taken(rows.feed(block)))
    else:
        for block in _blocks(path):
            taken(rows.feed(block))
    taken(rows.close())


def read_rows(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the posts of a zstd file of bare rows; none if there is no such file."""
    if not path.exists():
        return
    rows = PostRows(str(path), problems)
    with path.open("rb") as file, pa.CompressedInputStream(file, "zstd") as stream:
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        for block in chain((b"<posts>",), blocks, (b"</posts>",)):
            yield from (row for row, _ in rows.feed(block))
    yield from (row for row, _ in rows.close())


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from iter(lambda: file.read(BLOCK_BYTES), b"")
    except OSError as error:
        raise BrokenDumpError(error.strerror or str(error)) from error


class _ConsumerError(Exception):
    """Wrapper that carries a consumer's error through the archive reader, whose own errors mean a broken archive."""


def _unpack(path: Path, consume: Callable[[bytes | memoryview], None]) -> None:
    """Pass the archive's Posts.xml to `consume` block by block, without disk space and with little memory."""
    import py7zr
    from py7zr.io import Py7zIO, WriterFactory

    class Writer(Py7zIO):
        def write(self, data: bytes | bytearray) -> int:
            view = memoryview(data)  # up to 128 MB
            try:
                for start in range(0, len(view), BLOCK_BYTES):
                    consume(view[start : start + BLOCK_BYTES])
            except Exception as error:
                raise _ConsumerError from error
            return len(data)

        def read(self, size: int | None = None) -> bytes:
            return b""

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def flush(self) -> None: ...

        def size(self) -> int:
            return 0

    class Factory(WriterFactory):
        def create(self, filename: str) -> Py7zIO:
            return Writer()

    try:
        # py7zr reads an archive given as an open file in this thread, one member after the other.
        with path.open("rb") as file, py7zr.SevenZipFile(file) as archive:
            names = [info.filename for info in archive.list() if _is_posts(info)]
            if len(names) != 1:
                raise BrokenDumpError(f"{len(names) or 'no'} {POSTS} in the archive, where one is wanted")
            archive.extract(targets=names, factory=Factory())
    except _ConsumerError as error:
        raise (error.__cause__ or error) from None
    except BrokenDumpError:
        raise
    except py7zr.PasswordRequired as error:
        raise BrokenDumpError("the archive is encrypted") from error
    except Exception as error:  # py7zr's decompressors raise a dozen kinds of errors
        reason = str(error).partition("\n")[0][:200]
        raise BrokenDumpError(f"corrupt or truncated archive: {type(error).__name__} {reason}".rstrip()) from error


def _is_posts(info: Any) -> bool:
    return info.filename.rpartition("/")[2] == POSTS and not info.is_directory and not info.is_symlink


class PostRows:
    """Parser of the rows of a Posts.xml that arrives in blocks of any size.

    Blocks are cut at the start of a row and each piece gets a fresh expat parser, so that a broken row costs only that
    row. Document types are rejected, so there are no entities but XML's five.
    """

    def __init__(self, name: str, problems: Problems) -> None:
        self.name, self.problems = name, problems
        self._offset = 0  # file offset of the first byte of _pending
        self._pending = bytearray()
        self._begun = self._skipping = False

    def feed(self, block: bytes | memoryview) -> Iterator[tuple[Row, bytes]]:
        """Yield (attributes, XML) of the complete rows; raise BrokenDumpError if this is not a Posts.xml."""
        self._pending += block
        if len(self._pending) < BLOCK_BYTES:
            return
        yield from self._complete()
        if len(self._pending) > POST_BYTES:
            if not self._begun:
                raise BrokenDumpError(f"no row in its first {len(self._pending)} bytes")
            if not self._skipping:
                self.problems.skip(f"{self.name}: byte {self._offset}", "post too long", f"over {POST_BYTES} bytes")
            self._skipping = True
            self._drop(len(self._pending) - len(b"</posts>"))  # the end may hold half of a mark

    def close(self) -> Iterator[tuple[Row, bytes]]:
        """Yield the last rows."""
        yield from self._complete()
        if not self._begun:
            self._check_head(bytes(self._pending))
            return
        end = self._pending.rfind(b"</posts>")
        if end < 0:
            place = self._offset + len(self._pending)
            self.problems.skip(f"{self.name}: byte {place}", "truncated file", "no </posts>")
            end = self._pending.rfind(b"/>") + len(b"/>")  # the truncated row has none
        if not self._skipping and end > len(b"/>"):
            yield from self._parse(bytes(self._pending[:end]))

    def _complete(self) -> Iterator[tuple[Row, bytes]]:
        if not self._begun or self._skipping:
            start = self._pending.find(b"<row ")
            if start < 0:
                return
            if not self._begun:
                self._check_head(bytes(self._pending[:start]))
            self._begun, self._skipping = True, False
            self._drop(start)
        end = self._pending.rfind(b"<row ")
        if end > 0:
            data = bytes(self._pending[:end])
            yield from self._parse(data)
            self._drop(end)

    def _drop(self, count: int) -> None:
        del self._pending[:count]
        self._offset += count

    def _check_head(self, head: bytes) -> None:
        if self._pending[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise BrokenDumpError("UTF-16, where dumps are UTF-8")
        names: list[str] = []
        parser = expat.ParserCreate()
        parser.StartElementHandler = lambda name, attributes: names.append(name)
        parser.StartDoctypeDeclHandler = _refuse_doctype
        try:
            parser.Parse(head)
        except expat.ExpatError as error:
            raise BrokenDumpError(f"no XML: {error}") from error
        if names != ["posts"]:
            raise BrokenDumpError(f"its root is {names[0]}, not posts" if names else "no XML")

    def _parse(self, data: bytes) -> Iterator[tuple[Row, bytes]]:
        """Yield the rows of `data`, which starts with a row; broken ones are reported to `problems`."""
        at = 0
        while 0 <= at < len(data):
            found: list[tuple[int, Row]] = []
            fault = _parse_rows(memoryview(data)[at:], found)
            end = len(data)
            if fault is not None:
                position, before, reason = fault
                end = max(data.rfind(b"<row ", at, at + before), at)
            starts = [at + start for start, _ in found if at + start < end]
            for (_, row), start, stop in zip(found, starts, (*starts[1:], end), strict=False):
                yield row, data[start:stop]
            if fault is None:
                return
            self.problems.skip(f"{self.name}: byte {self._offset + end}", "broken XML", reason)
            at = data.find(b"<row ", max(at + position, end + 1))


def _refuse_doctype(*_: object) -> None:
    raise BrokenDumpError("it declares a document type, which no dump has: its entities could fill the memory")


def _parse_rows(data: memoryview, found: list[tuple[int, Row]]) -> tuple[int, int, str] | None:
    """Add (position, attributes) of rows to `found`.

    Returns the position of the first fault, the position before which its row starts, and the reason; None if there is
    no fault.
    """
    head = b"<posts>"
    parser = expat.ParserCreate("utf-8")

    def element(name: str, attributes: Row) -> None:
        if name == "row":
            found.append((parser.CurrentByteIndex - len(head), attributes))

    parser.StartElementHandler = element
    try:
        parser.Parse(head)
        parser.Parse(data)
        parser.Parse(b"</posts>", True)
    except expat.ExpatError as error:
        position = min(max(parser.ErrorByteIndex - len(head), 0), len(data))
        # expat's position of an invalid token is exact, even if it starts a row (after an unclosed quote); for other
        # faults it gives the position of the row.
        before = position if error.code == INVALID_TOKEN else position + len(b"<row ")
        return position, before, expat.ErrorString(error.code)
    finally:
        parser.StartElementHandler = None  # break the reference cycle with the parser, which would keep the rows
    return None
