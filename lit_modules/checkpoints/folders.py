"""A run's `checkpoints/`: whole checkpoints by step, `best`, and what tells a whole one from a damaged one.

step_00000016/           there once every rank has written its part
    __0_0.distcp ...     the tensors, a file or more of each rank (torch.distributed.checkpoint)
    .metadata            which tensor lies where in them
    trainer.pt           everything else: loops, callbacks, schedulers
    manifest.json        written last: the size and SHA-256 of every other file
best -> step_00000016    the one with the best validation loss
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


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The optimizer step of a checkpoint's folder name."""
    return int(STEP.fullmatch(path.name).group(1))


def is_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint, whole or damaged, at `path`: a folder with the name of a step, or `best`."""
    return path.is_dir() and STEP.fullmatch(path.resolve().name) is not None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step, oldest first: (optimizer step, folder)."""
    return sorted((step_of(f), f) for f in Path(folder).glob("step_*") if STEP.fullmatch(f.name) and f.is_dir())


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a run's `checkpoints/`, whole or damaged; None where there is none."""
    return next((path for _, path in reversed(step_folders(folder))), None)


def newest_whole(folder: Path) -> Path | None:
    """The newest undamaged checkpoint in a run's `checkpoints/`; each damaged one is named in the log and passed over.

    It reads the newest checkpoint from end to end, with several threads: one rank is to call it, and to tell the others
    (a strategy's `load_checkpoint` takes the first rank's path on every rank). `newest` is None where this is.

    Raises:
        ValueError: there are checkpoints, and every one is damaged.
    """
    found = step_folders(folder)
    for _, path in reversed(found):
        wrong = damage(path)
        if wrong is None:
            return path
        log.warning(f"{path}/{wrong}: trying the checkpoint before it")
    if found:
        raise ValueError(
            f"{folder} has no undamaged checkpoint to go on from: start a new run without resume "
            f"(job=generate reads {BEST}, if that is whole)"
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, beginning with the name of the file, or None if every file is as written."""
    try:
        files = read_manifest(path)["files"]
    except ValueError as error:
        return str(error)
    return checksums.damage(path, files)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: format, step, world_size, and by name the bytes and sha256 of its files.

    Raises:
        ValueError: there is none, or it is not one that this version wrote.
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


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.with_name(f".{path.name}.partial")


def publish(path: Path, files: dict[str, dict[str, Any]], world_size: int) -> None:
    """Give a checkpoint whose files are all written its manifest and its name."""
    partial = partial_of(path)
    manifest = {"format": FORMAT, "step": step_of(path), "world_size": world_size, "files": files}
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    flush_folder(partial)
    if path.exists():  # a damaged one of the same step, which the run has passed over
        remove(path)
    os.replace(partial, path)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint; if it is interrupted, what is left has no checkpoint's name."""
    aside = path.with_name(f".{path.name}.removed.partial")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside)


def clear_partials(folder: Path) -> None:
    """Remove what a kill in mid-write has left."""
    for left in Path(folder).glob(".*.partial"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def link_best(path: Path) -> None:
    """Let `best` be another name of the checkpoint at `path`."""
    beside = path.with_name(f".{BEST}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(path.name)
    os.replace(beside, path.with_name(BEST))


def best_of(folder: Path) -> str | None:
    """The name of the checkpoint that `best` is; None where there is none."""
    try:
        return os.readlink(folder / BEST)
    except OSError:
        return None


def keep_newest(folder: Path, count: int, step: int) -> None:
    """Remove the checkpoints up to `step` except the newest `count` and the best. Later ones are not this run's past:
    they are damaged, and it will come to them again."""
    past = [path for number, path in step_folders(folder) if number <= step]
    for old in past[:-count]:
        if old.name != best_of(folder):
            remove(old)


def flush_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
