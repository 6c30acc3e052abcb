"""Prepared folders: named by a hash of what made them, built once, and whole or absent."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"


def fingerprint(identity: object) -> str:
    """Return 16 hexadecimal digits that name a JSON-able `identity` (sha256 of its canonical JSON)."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_identity(paths: Iterable[Path]) -> str:
    """Return one digest of the (path, size, modification time) of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def content_identity(folder: Path, paths: Iterable[Path]) -> str:
    """Return one digest of the (name within `folder`, content) of files, in the order given: all of them are read."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder)}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def prepared_folder(data_dir: Path, stage: str, identity: object, build: Callable[[Path], dict]) -> Path:
    """Return the folder `data_dir/stage-fingerprint`, building it first where it is missing.

    `build(folder)` fills an empty folder beside the final one and returns the manifest, which is written last; then the
    folder is renamed. Processes that start together build once (a lock file), and what a killed one left is removed.
    Raises ValueError when the disk is full; whatever `build` raises passes through, and leaves nothing behind.
    """
    final = data_dir / f"{stage}-{fingerprint(identity)}"
    if (final / MANIFEST).exists():
        return final
    _make_folder(data_dir)
    with FileLock(_lock_of(final)):
        if (final / MANIFEST).exists():
            return final
        partial = data_dir / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _remove_stale(data_dir)
        try:
            partial.mkdir()
            manifest = {"identity": identity, **build(partial)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)  # a folder without a manifest is not one of ours
            os.replace(partial, final)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ValueError(f"data_dir={data_dir}: the disk is full; free some space or set data_dir") from error
            raise
    return final


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a prepared folder."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _make_folder(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data_dir={data_dir}: cannot be made ({error.strerror}); set data_dir") from error


def _lock_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _remove_stale(data_dir: Path) -> None:
    """Remove partial folders whose builder is gone: the lock of a running one is held."""
    for partial in data_dir.glob(".*.partial"):
        final = data_dir / partial.name.removeprefix(".").removesuffix(".partial")
        with contextlib.suppress(Timeout), _nonblocking(_lock_of(final)):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _nonblocking(path: Path) -> Iterator[None]:
    with FileLock(path, timeout=0):
        yield
