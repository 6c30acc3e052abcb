"""Sizes and checksums of files as they were written, and what has happened to them since."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READERS = 8  # threads that compute checksums; hashing and reading both let other threads run
BYTES_A_READER = 8 * 1024 * 1024  # fewer are read sooner than a thread is started


def entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what a manifest says of the named files: {name: {"bytes", "sha256"}}.

    A link has no "sha256": what it leads to is not the folder's own.
    """
    names = sorted(names)
    with reading(sum(size_of(folder / name) or 0 for name in names)) as readers:
        found = readers.map(checksum, (folder / name for name in names))
        return {
            name: {"bytes": size_of(folder / name)} | ({} if (folder / name).is_symlink() else {"sha256": digest})
            for name, digest in zip(names, found, strict=True)
        }


def wrong_size(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return which file is missing or has another size, and how; None where there is none. Nothing is read."""
    for name, written in files.items():
        found = size_of(folder / name)
        if found is None:
            return f"{name} is missing"
        if found != written["bytes"]:
            return f"{name} is truncated or damaged ({found} bytes of {written['bytes']})"
    return None


def damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return which file differs from what was written, and how; None where there is none. Every file is read once."""
    wrong = wrong_size(folder, files)
    if wrong is not None:
        return wrong
    by_size = sorted((name for name in files if "sha256" in files[name]), key=lambda name: -files[name]["bytes"])
    with reading(sum(files[name]["bytes"] for name in by_size)) as readers:
        for name, found in zip(by_size, readers.map(checksum, (folder / name for name in by_size)), strict=True):
            if found != files[name]["sha256"]:
                return f"{name} is damaged (it does not match its checksum)"
    return None


def reading(size: int) -> ThreadPoolExecutor:
    """Return threads for reading so many bytes, each of which holds a buffer."""
    return ThreadPoolExecutor(min(READERS, 1 + size // BYTES_A_READER))


def checksum(path: Path) -> str | None:
    """Return the SHA-256 of a file's content; None where it cannot be read."""
    try:
        return content_digest(path)
    except OSError:
        return None


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, read piece by piece. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: Path) -> int | None:
    """Return the bytes of a file; None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
