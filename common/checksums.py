"""Sizes and checksums of files, and checks against recorded ones."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READER_THREADS = 8  # checksum threads; hashing and reading release the GIL
BYTES_PER_READER = 8 * 1024 * 1024  # below this, starting a thread costs more than reading


def manifest_entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of the named files: {name: {"bytes", "sha256"}}.

    A symbolic link has no "sha256", because its target is outside the folder.
    """
    names = sorted(names)
    with reader_threads(sum(size_of(folder / name) or 0 for name in names)) as readers:
        found = readers.map(checksum, (folder / name for name in names))
        return {
            name: {"bytes": size_of(folder / name)} | ({} if (folder / name).is_symlink() else {"sha256": digest})
            for name, digest in zip(names, found, strict=True)
        }


def find_wrong_size(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a message for the first missing file or wrong size, or None. No file is read."""
    for name, written in files.items():
        found = size_of(folder / name)
        if found is None:
            return f"{name} is missing"
        if found != written["bytes"]:
            return f"{name} is truncated or damaged ({found} bytes of {written['bytes']})"
    return None


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a message for the first file that differs from its entry, or None. Every file is read once."""
    wrong = find_wrong_size(folder, files)
    if wrong is not None:
        return wrong
    by_size = sorted((name for name in files if "sha256" in files[name]), key=lambda name: -files[name]["bytes"])
    with reader_threads(sum(files[name]["bytes"] for name in by_size)) as readers:
        for name, found in zip(by_size, readers.map(checksum, (folder / name for name in by_size)), strict=True):
            if found != files[name]["sha256"]:
                return f"{name} is damaged (it does not match its checksum)"
    return None


def reader_threads(size: int) -> ThreadPoolExecutor:
    """Return threads for reading `size` bytes; each holds a buffer."""
    return ThreadPoolExecutor(min(READER_THREADS, 1 + size // BYTES_PER_READER))


def checksum(path: Path) -> str | None:
    """Return the SHA-256 of a file's content, or None if it cannot be read."""
    try:
        return content_digest(path)
    except OSError:
        return None


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, read in chunks.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or None if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None
