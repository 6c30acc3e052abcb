"""Append-only journal of paid answers, so that no kill at any moment makes a run pay twice.

A record is one line with its checksum, written with one call as soon as it exists: from then on it survives the death
of this process. `sync` flushes to the disk, against a crash of the machine; it is called for groups of records.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


class Journal:
    """An append-only file of JSON records; one process holds it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._size = 0
        self._unsynced = False

    def read(self) -> Iterator[dict]:
        """Yield the complete records, and cut off a torn end.

        A broken line between complete ones is skipped with a warning; its answer is requested again.
        """
        if not self.path.exists():
            return
        good_end = offset = broken = 0
        with self.path.open("rb") as file:
            for line in file:
                offset += len(line)
                record = _parsed(line)
                if record is None:
                    broken += 1
                    continue
                if broken:
                    log.warning("%s: before byte %d: broken record passed over", self.path, offset - len(line))
                    broken = 0
                good_end = offset
                yield record
        if good_end < offset:
            os.truncate(self.path, good_end)

    def append(self, record: dict) -> None:
        """Append a record; raise OSError, leaving no part of it, if the disk refuses it."""
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._handle).st_size
        body = json.dumps(record, separators=(",", ":")).encode()
        line = memoryview(b"%08x %s\n" % (zlib.crc32(body), body))
        written = 0
        try:
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += written
        self._unsynced = True

    def sync(self) -> None:
        """Flush appended records to the disk."""
        if self._handle is not None and self._unsynced:
            self._unsynced = False
            os.fsync(self._handle)

    def close(self) -> None:
        """Sync and close."""
        if self._handle is not None:
            self.sync()
            os.close(self._handle)
            self._handle = None

    def remove(self) -> None:
        """Close and delete the journal; its content is stored elsewhere by now."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self.path.unlink(missing_ok=True)


def _parsed(line: bytes) -> dict | None:
    """Return the record on a line, or None if the line is damaged."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    return json.loads(body)
