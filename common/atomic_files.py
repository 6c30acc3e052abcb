"""Atomic writes of files and folders."""

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota or file size limit exhausted


def is_full_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error means that nothing more can be written."""
    return isinstance(error, OSError) and error.errno in FULL_DISK


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file to a temporary name, sync it, and rename it, so that readers see the old or the new content.

    The old content stays if the write fails. Parent folders are created.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_figure(path: Path, figure: Any, **settings: Any) -> Path:
    """Write a matplotlib figure atomically as a PNG and return its path; `settings` go to `savefig`."""
    image = io.BytesIO()
    figure.savefig(image, format="png", **{"dpi": 150, "bbox_inches": "tight", **settings})
    write_atomic(path, image.getvalue())
    return path


@contextlib.contextmanager
def replace_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block ends, or is deleted if it fails."""
    partial, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "replaced"))
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)  # a process died between the two renames below
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
