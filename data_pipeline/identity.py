"""Identity of the input files of a data set: their content, not their path or modification time."""

import functools
import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.checksums import content_digest, reader_threads, size_of

# How files are identified. SAMPLE reads SAMPLED_BLOCKS blocks of BLOCK_BYTES of a file larger than WHOLE_BYTES.
SAMPLE, WHOLE = "sample", "whole"
EARLIER = "earlier"  # by path, size and time: finds older versions' data; new sources need not tell it from SAMPLE
WHOLE_BYTES = 1024 * 1024
SAMPLED_BLOCKS = 16
BLOCK_BYTES = 16 * 1024


def file_identity(paths: Iterable[Path], by: str = SAMPLE) -> str:
    """Return one digest of files, in the order given.

    Args:
        by: SAMPLE: size and content, of large files 16 evenly spaced blocks. WHOLE: all content. Both include each
            file's path within the deepest common folder, so that this folder may be moved or copied. EARLIER: path,
            size and modification time.
    """
    paths = [Path(path) for path in paths]
    digest = hashlib.sha256()
    if by == EARLIER:
        for path in paths:
            status = path.stat()
            _add(digest, f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n")
        return digest.hexdigest()
    absolute = [Path(os.path.abspath(path)) for path in paths]
    root = Path(os.path.commonpath([path.parent for path in absolute])) if absolute else Path()
    with reader_threads(sum(size_of(path) or 0 for path in absolute)) as readers:
        contents = readers.map(functools.partial(_content, by), absolute)
        for path, content in zip(absolute, contents, strict=True):
            _add(digest, f"{path.relative_to(root)}\0{content}\n")
    return f"{by}:{digest.hexdigest()}"


def content_identity(folder: Path, paths: Iterable[Path]) -> str:
    """Return one digest of the (name within `folder`, whole content) of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        _add(digest, f"{path.relative_to(folder)}\0{content_digest(path)}\n")
    return digest.hexdigest()


def settings_identity(source: Any, by: str, *places: str) -> dict:
    """Return the fields of a dataclass without those that only locate its files (EARLIER: with them)."""
    return {name: value for name, value in asdict(source).items() if by == EARLIER or name not in places}


def sampled_digest(path: Path) -> str:
    """Return a SHA-256 of a file's size and content: all of it up to WHOLE_BYTES, else evenly spaced blocks."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{size}\n".encode())
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _content(by: str, path: Path) -> str:
    try:
        return content_digest(path) if by == WHOLE else sampled_digest(path)
    except PermissionError:  # the reader of the text reports the file and skips it
        return "unreadable"
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error


def _add(digest: Any, line: str) -> None:
    digest.update(line.encode(errors="surrogateescape"))
