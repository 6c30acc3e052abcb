"""Checkpoints written in the background: training waits while tensors are copied to main memory, and no longer."""

import io
import logging
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from common import atomic_files, checksums
from lit_modules.checkpoints.folders import METADATA, TRAINER, partial_of, publish

log = logging.getLogger(__name__)

APPEARS_WITHIN = 60.0  # seconds; a shared disk may show another node's files late


class NotWritten(Exception):
    """The disk did not take a checkpoint; the line says of which rank, and why."""


@dataclass(frozen=True)
class Outcome:
    """How the writing of a checkpoint ended: the same on every rank but for the seconds.

    Attributes:
        path: the checkpoint's folder.
        error: why it is not there; None where it is.
        seconds: what this rank took in the background.
    """

    path: Path
    error: str | None
    seconds: float


class ShardWriter(FileSystemWriter):
    """Torch's writer, which says what the disk said, and keeps the folder's own path out of the files."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:  # torch's archives answer the disk's error with one of their own
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None

    def storage_meta(self) -> None:
        return None


class Writer:
    """Writes the checkpoints of a training, one at a time, with every rank taking part.

    All ranks call `begin` and `wait` in the same order. Ranks talk in the background over a gloo group of their own,
    which does not meet the training's collectives.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # joined when the process ends
        self.stager: BlockingAsyncStager | None = None
        self.staged_shapes: dict[str, torch.Size] = {}
        self.pending: Future[Outcome] | None = None

    def begin(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        copies: dict[str, Tensor],
        rest: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """Copy the state of this moment, and return while it is written.

        Args:
            path: where the checkpoint's folder is to appear.
            tensors: this rank's part of those that training changes.
            copies: more tensors of this rank, which nobody changes.
            rest: plain values, of which the first rank's are written.
            then: called on the first rank, in the background, once the checkpoint is there.
        """
        self.wait()
        if self.group is None and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
        record = io.BytesIO()
        if self.rank == 0:
            torch.save(rest, record)
        staged = self.stage(tensors) | copies
        self.pending = self.thread.submit(self.write, path, staged, record.getvalue(), then)

    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in main memory; where there are GPUs, in pinned memory that is kept for the next checkpoint."""
        if not torch.cuda.is_available():
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != self.staged_shapes:
            self.stager, self.staged_shapes = BlockingAsyncStager(cache_staged_state_dict=True), shapes
        return self.stager.stage(tensors)

    def wait(self) -> Outcome | None:
        """How the checkpoint under way ended, once it has; None if none is under way.

        Raises what the background raised, unless the disk was at fault.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        return pending.result()

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def write(self, path: Path, staged: dict[str, Tensor], record: bytes, then: Callable[[], None]) -> Outcome:
        """Write, check and publish one checkpoint (in the background). What the disk refuses is the outcome's error."""
        began = time.perf_counter()
        error = None
        try:
            self.write_parts(path, staged, record, then)
        except (NotWritten, CheckpointException) as failure:
            error = str(failure) if isinstance(failure, NotWritten) else refusal(failure)
            if self.rank == 0:
                log.error(f"{path} could not be written ({error}); the checkpoints before it are intact")
        finally:
            shutil.rmtree(partial_of(path), ignore_errors=True)
        return Outcome(path, error, time.perf_counter() - began)

    def write_parts(self, path: Path, staged: dict[str, Tensor], record: bytes, then: Callable[[], None]) -> None:
        """Write and publish a checkpoint step by step: no rank takes one before all have taken the one before it."""
        partial = partial_of(path)
        together(self.group, lambda: prepare(partial, record) if self.rank == 0 else None)
        dcp.save(staged, storage_writer=ShardWriter(partial), process_group=self.group, no_dist=self.group is None)
        parts = together(
            self.group, lambda: (socket.gethostname(), checksums.entries(partial, self.own_files(partial)))
        )
        together(self.group, lambda: finish(path, parts, then) if self.rank == 0 else None)

    def own_files(self, partial: Path) -> list[str]:
        """The names of the files that this rank has written."""
        shards = [file.name for file in partial.glob(f"__{self.rank}_*.distcp")]
        return [*shards, METADATA, TRAINER] if self.rank == 0 else shards


def prepare(partial: Path, record: bytes) -> None:
    """An empty folder to write into, with Lightning's part in it."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    atomic_files.write_atomic(partial / TRAINER, record)


def finish(path: Path, parts: list[tuple[str, dict[str, Any]]], then: Callable[[], None]) -> None:
    """Publish a checkpoint of which every rank has written its part: (host, manifest entries) by rank.

    Raises:
        NotWritten: the files of a rank do not appear here.
    """
    partial = partial_of(path)
    deadline = time.monotonic() + APPEARS_WITHIN
    for rank, (host, written) in enumerate(parts):
        for name, entry in written.items():
            while checksums.size_of(partial / name) != entry["bytes"]:
                if time.monotonic() > deadline:
                    raise NotWritten(
                        f"rank {rank} on {host} wrote {name}, which rank 0 on {parts[0][0]} does not see: "
                        f"{path.parent} has to be on a disk that all nodes share"
                    )
                time.sleep(0.1)
    publish(path, {name: entry for _, written in parts for name, entry in written.items()}, len(parts))
    try:
        then()
    except OSError as error:
        log.error(f"{path.parent}: {error.strerror or error}; {path.name} is written, and what it replaces stays")


def together(group: dist.ProcessGroup | None, function: Callable[[], Any]) -> list[Any]:
    """What `function` gives on every rank, by rank. It raises on all ranks if it does on one.

    Raises:
        NotWritten: the disk of a rank refused, or `function` raised this.
        RuntimeError: `function` raised something else.
    """
    value, refused, broken = None, None, None
    try:
        value = function()
    except NotWritten as error:
        refused = str(error)
    except OSError as error:
        refused = because(error)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    answers = [(value, refused, broken)]
    if group is not None:
        answers = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, (value, refused, broken), group=group)
    for rank, (_, refused, broken) in enumerate(answers):
        if broken is not None:
            raise RuntimeError(f"rank {rank} could not write its part of a checkpoint: {broken}")
        if refused is not None:
            raise NotWritten(refused if rank == 0 else f"rank {rank}: {refused}")
    return [value for value, _, _ in answers]


def refusal(failure: CheckpointException) -> str:
    """What the disk of the first rank that failed has said.

    Raises:
        RuntimeError: something other than a disk failed.
    """
    rank, (error, _) = min(failure.failures.items())
    if not isinstance(error, OSError):
        raise RuntimeError(f"rank {rank} could not write its part of a checkpoint: {error}") from failure
    return because(error) if rank == 0 else f"rank {rank}: {because(error)}"


def because(error: OSError) -> str:
    """The reason that the system gives, as in "No space left on device"."""
    return error.strerror or str(error)
