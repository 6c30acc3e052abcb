"""A run's `checkpoints/`: complete checkpoints by step, the link `best`, and verification.

step_00000016/           appears once every rank has written its part
    __0_0.distcp ...     the tensors, one or more files per rank (torch.distributed.checkpoint)
    .metadata            the location of each tensor in them
    trainer.pt           everything else: loops, callbacks, schedulers
    manifest.json        written last: the size and SHA-256 of every other file
best -> step_00000016    the checkpoint with the best validation loss
.step_00000020.partial/  being written, or left by a kill
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from common import checksums
from common.atomic_files import write_atomic

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d+)")
BEST = "best"
MANIFEST = "manifest.json"
METADATA = ".metadata"
TRAINER = "trainer.pt"
FORMAT = 1


def folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the optimizer step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step_"))


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint, complete or damaged: a folder named after a step, or `best`."""
    return path.is_dir() and STEP.fullmatch(path.resolve().name) is not None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return (optimizer step, folder) of each checkpoint of a run, oldest first."""
    return sorted((step_of(f), f) for f in Path(folder).glob("step_*") if STEP.fullmatch(f.name) and f.is_dir())


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's `checkpoints/`, complete or damaged; None without one."""
    return next((path for _, path in reversed(step_folders(folder))), None)


def newest_intact(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint in a run's `checkpoints/`; log and skip damaged ones. None without any.

    This reads the newest checkpoint completely, with several threads. Only one rank should call it; the strategy's
    `load_checkpoint` broadcasts that rank's path. Other ranks can use `newest_checkpoint`, which is None in the same
    cases.

    Raises:
        ValueError: there are checkpoints, but all are damaged.
    """
    found = step_folders(folder)
    for _, path in reversed(found):
        wrong = find_damage(path)
        if wrong is None:
            return path
        log.warning("%s/%s: trying the checkpoint before it", path, wrong)
    if found:
        raise ValueError(
            f"{folder} has no undamaged checkpoint to go on from: start a new run without resume "
            f"(job=generate reads {BEST}, if that is whole)"
        )
    return None


def find_damage(path: Path) -> str | None:
    """Return a checkpoint's damage, starting with the file's name; None if every file is as written."""
    try:
        files = read_manifest(path)["files"]
    except ValueError as error:
        return str(error)
    return checksums.find_damage(path, files)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest: format, step, world_size, and the bytes and sha256 of each file by name.

    Raises:
        ValueError: it is missing, or this version did not write it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        plain = all(
            Path(name).name == name and {"bytes", "sha256"} <= entry.keys() for name, entry in manifest["files"].items()
        )
        known = manifest["format"] == FORMAT and plain and {METADATA, TRAINER} <= manifest["files"].keys()
    except OSError as error:
        raise ValueError(f"{MANIFEST} is missing ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is truncated or damaged") from error
    if not known:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    return manifest


def partial_path(path: Path) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def publish(path: Path, files: dict[str, dict[str, Any]], world_size: int) -> None:
    """Write the manifest of a checkpoint whose files are complete, and give it its name."""
    partial = partial_path(path)
    manifest = {"format": FORMAT, "step": step_of(path), "world_size": world_size, "files": files}
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    flush_folder(partial)
    if path.exists():  # an earlier one of the same step, which the run has skipped
        remove_checkpoint(path)
    os.replace(partial, path)
    flush_folder(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; an interruption leaves nothing under a checkpoint's name."""
    aside = path.with_name(f".{path.name}.removed.partial")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside)


def clear_partials(folder: Path) -> None:
    """Remove the remains of interrupted writes."""
    for left in Path(folder).glob(".*.partial"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def link_best(path: Path) -> None:
    """Point the link `best` to the checkpoint at `path`."""
    beside = path.with_name(f".{BEST}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(path.name)
    os.replace(beside, path.with_name(BEST))


def best_name(folder: Path) -> str | None:
    """Return the name of the checkpoint that `best` points to; None without one."""
    try:
        return os.readlink(folder / BEST)
    except OSError:
        return None


def remove_older(folder: Path, count: int, step: int) -> None:
    """Remove the checkpoints up to `step` except the newest `count` and the best.

    Later ones are damaged: the run was resumed before them, and will overwrite them.
    """
    past = [path for number, path in step_folders(folder) if number <= step]
    for old in past[:-count]:
        if old.name != best_name(folder):
            remove_checkpoint(old)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
