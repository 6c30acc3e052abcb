"""Prepared folders: named by a hash of their inputs, built once, and either complete or absent."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from common import checksums
from common.atomic_files import is_full_disk, write_atomic
from common.settings import SettingError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKED = "checked.json"  # modification times of the files when their checksums last matched


def fingerprint(identity: object) -> str:
    """Return 16 hexadecimal digits that name a JSON-able `identity` (sha256 of its canonical JSON)."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def prepared_folder(
    data_dir: str | Path, stage: str, identity: object, build: Callable[[Path], dict], earlier: object = None
) -> Path:
    """Return the folder `data_dir/stage-fingerprint`; build it first if it is missing or damaged.

    `build(folder)` fills an empty temporary folder and returns the manifest, which is written last, with the size and
    checksum of every file; then the folder is renamed. A lock file makes processes that start together build once, and
    leftovers of killed ones are removed. Sizes are compared each time. Checksums are compared only if a file's times
    have changed since the last comparison, as after a copy: reading terabytes at every start would cost more than it
    finds.

    Args:
        earlier: the identity that an earlier version gave to the same content. Its folder is used if it exists and the
            new one does not.

    Raises:
        ValueError: the disk is full. Errors of `build` pass through; nothing is left behind.
    """
    data_dir = Path(data_dir)
    final = folder_of(data_dir, stage, identity, earlier)
    if final != folder_of(data_dir, stage, identity):
        identity = earlier
    if (final / MANIFEST).exists() and _known_whole(final):
        return final
    _make_folder(data_dir)
    with FileLock(_lock_of(final)):
        if (final / MANIFEST).exists():
            wrong = _damage(final)
            if wrong is None:
                return final
            log.warning("%s/%s: prepared again", final, wrong)
        _remove_stale(data_dir)
        _build_beside(final, identity, build)
    return final


def _build_beside(final: Path, identity: object, build: Callable[[Path], dict]) -> None:
    """Build in a temporary folder, and rename it when everything is written."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        manifest = {"identity": identity, **build(partial)}
        names = (path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
        manifest["files"] = checksums.manifest_entries(partial, names)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _note_whole(partial, manifest["files"])
        shutil.rmtree(final, ignore_errors=True)  # damaged, or foreign: it has no manifest
        os.replace(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_full_disk(error):
            raise SettingError(
                "data_dir", final.parent, "free some space, or give another", "is on a full disk"
            ) from error
        raise


def folder_of(data_dir: str | Path, stage: str, identity: object, earlier: object = None) -> Path:
    """Return the folder that `prepared_folder` would return; it may not exist yet."""
    new, old = (Path(data_dir) / f"{stage}-{fingerprint(given)}" for given in (identity, earlier))
    return old if earlier is not None and not (new / MANIFEST).exists() and (old / MANIFEST).exists() else new


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a prepared folder."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _files(folder: Path) -> dict[str, dict]:
    """Return the manifest's file entries; empty for folders of earlier versions.

    Raises:
        ValueError: the manifest is damaged.
    """
    try:
        return read_manifest(folder).get("files", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is truncated or damaged") from error


def _known_whole(folder: Path) -> bool:
    """Return whether sizes match and no file has changed since its checksum was last compared."""
    try:
        files = _files(folder)
        if checksums.find_wrong_size(folder, files) is not None:
            return False
        if not os.access(folder, os.W_OK):  # read-only: the result of a full check could not be stored
            return True
        known = json.loads((folder / CHECKED).read_text(encoding="utf-8")) if files else {}
        return known == _times(folder, files)
    except (OSError, ValueError):
        return False


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a folder, starting with the file's name, or None; reads every file once."""
    try:
        files = _files(folder)
    except ValueError as error:
        return str(error)
    wrong = checksums.find_damage(folder, files)
    if wrong is None:
        _note_whole(folder, files)
    return wrong


def _note_whole(folder: Path, files: dict[str, dict]) -> None:
    write_atomic(folder / CHECKED, json.dumps(_times(folder, files)) + "\n")


def _times(folder: Path, files: dict[str, dict]) -> dict[str, list[int]]:
    """Return when each file was last changed; a write, a copy and a move from another disk all show."""
    found = {name: (folder / name).lstat() for name in files}
    return {name: [status.st_mtime_ns, status.st_ctime_ns] for name, status in found.items()}


def other_text(began: str, now: str) -> str:
    """Return the error line for a resumed run whose data fingerprint differs from the one it started with."""
    return (
        f"data: the text is not what this run began with (blocks {began}, now {now}): bring back the files and "
        "data_dir as they were, or start a new run without resume"
    )


def _make_folder(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("data_dir", data_dir, "give another folder", f"cannot be made ({error.strerror})") from error


def _lock_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _remove_stale(data_dir: Path) -> None:
    """Remove partial folders whose builder has ended; a running builder holds its lock."""
    for partial in data_dir.glob(".*.partial"):
        final = data_dir / partial.name.removeprefix(".").removesuffix(".partial")
        with contextlib.suppress(Timeout), _nonblocking(_lock_of(final)):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _nonblocking(path: Path) -> Iterator[None]:
    with FileLock(path, timeout=0):
        yield
