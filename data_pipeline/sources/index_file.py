"""Indexes on disk: SQLite files that one process writes once, and others read."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def new_index(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield an empty database to fill; the file appears at `path` only after the block has succeeded.

    Raises:
        OSError: the disk is full (ENOSPC).
    """
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(beside)) as database:
            # The file is written once and renamed, so it needs no journal. The cache bounds its memory.
            for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-65536"):
                database.execute(f"PRAGMA {pragma}")
            yield database
            database.commit()
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            raise OSError(errno.ENOSPC, "the disk is full", str(path)) from error
        raise


@contextmanager
def open_index(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a finished index for reading."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        yield database
