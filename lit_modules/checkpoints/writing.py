"""Background writing of checkpoints: training waits only while tensors are copied to main memory."""

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
from lit_modules.checkpoints.folders import METADATA, TRAINER, partial_path, publish

log = logging.getLogger(__name__)

VISIBLE_SECONDS = 60.0  # seconds; a shared disk may show another node's files late


class CheckpointNotWritten(Exception):
    """Error for a checkpoint that the disk refused; the message names the rank and the reason."""


@dataclass(frozen=True)
class WriteOutcome:
    """The outcome of writing a checkpoint; equal on every rank except for `seconds`.

    Attributes:
        path: the checkpoint's folder.
        error: why it was not written; None on success.
        seconds: time that this rank spent in the background.
    """

    path: Path
    error: str | None
    seconds: float


class TensorFileWriter(FileSystemWriter):
    """Torch's writer, but it raises the disk's own error and keeps the folder's path out of the files."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:  # torch's archives replace the disk's error by their own
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None

    def storage_meta(self) -> None:
        return None


class BackgroundWriter:
    """Writer of a training's checkpoints, one at a time, with every rank taking part.

    All ranks call `start` and `wait` in the same order. In the background, ranks communicate over a separate gloo
    group, which does not interfere with the training's collectives.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # joined when the process ends
        self.stager: BlockingAsyncStager | None = None
        self.staged_shapes: dict[str, torch.Size] = {}
        self.pending: Future[WriteOutcome] | None = None

    def start(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        copies: dict[str, Tensor],
        rest: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """Copy the current state, and return while it is written.

        Args:
            path: the final folder of the checkpoint.
            tensors: this rank's part of the tensors that training changes.
            copies: further tensors of this rank that nothing changes.
            rest: plain values; rank 0's are written.
            then: called on rank 0, in the background, once the checkpoint is complete.
        """
        self.wait()
        if self.group is None and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
        record = io.BytesIO()
        if self.rank == 0:
            torch.save(rest, record)
        staged = self.copy_to_memory(tensors) | copies
        self.pending = self.thread.submit(self.write, path, staged, record.getvalue(), then)

    def copy_to_memory(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to main memory; with GPUs, to pinned memory that is reused for the next checkpoint."""
        if not torch.cuda.is_available():
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if self.stager is None or shapes != self.staged_shapes:
            self.stager, self.staged_shapes = BlockingAsyncStager(cache_staged_state_dict=True), shapes
        return self.stager.stage(tensors)

    def wait(self) -> WriteOutcome | None:
        """Wait for the pending checkpoint and return its outcome; None if none is pending.

        Errors of the background thread are raised here, except for disk errors.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        return pending.result()

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def write(self, path: Path, staged: dict[str, Tensor], record: bytes, then: Callable[[], None]) -> WriteOutcome:
        """Write, check and publish one checkpoint (in the background). A disk error becomes the outcome's error."""
        began = time.perf_counter()
        error = None
        try:
            self.write_parts(path, staged, record, then)
        except (CheckpointNotWritten, CheckpointException) as failure:
            error = str(failure) if isinstance(failure, CheckpointNotWritten) else first_disk_error(failure)
            if self.rank == 0:
                log.error("%s could not be written (%s); the checkpoints before it are intact", path, error)
        finally:
            shutil.rmtree(partial_path(path), ignore_errors=True)
        return WriteOutcome(path, error, time.perf_counter() - began)

    def write_parts(self, path: Path, staged: dict[str, Tensor], record: bytes, then: Callable[[], None]) -> None:
        """Write and publish a checkpoint in steps; all ranks complete each step before any starts the next."""
        partial = partial_path(path)
        run_on_all_ranks(self.group, lambda: prepare(partial, record) if self.rank == 0 else None)
        dcp.save(staged, storage_writer=TensorFileWriter(partial), process_group=self.group, no_dist=self.group is None)
        parts = run_on_all_ranks(
            self.group, lambda: (socket.gethostname(), checksums.manifest_entries(partial, self.own_files(partial)))
        )
        run_on_all_ranks(self.group, lambda: finish(path, parts, then) if self.rank == 0 else None)

    def own_files(self, partial: Path) -> list[str]:
        """Return the names of the files that this rank has written."""
        shards = [file.name for file in partial.glob(f"__{self.rank}_*.distcp")]
        return [*shards, METADATA, TRAINER] if self.rank == 0 else shards


def prepare(partial: Path, record: bytes) -> None:
    """Create an empty folder to write into, with Lightning's part in it."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    atomic_files.write_atomic(partial / TRAINER, record)


def finish(path: Path, parts: list[tuple[str, dict[str, Any]]], then: Callable[[], None]) -> None:
    """Publish a checkpoint after every rank has written its part; `parts` is (host, manifest entries) by rank.

    Raises:
        CheckpointNotWritten: a rank's files do not appear here.
    """
    partial = partial_path(path)
    deadline = time.monotonic() + VISIBLE_SECONDS
    for rank, (host, written) in enumerate(parts):
        for name, entry in written.items():
            while checksums.size_of(partial / name) != entry["bytes"]:
                if time.monotonic() > deadline:
                    raise CheckpointNotWritten(
                        f"rank {rank} on {host} wrote {name}, which rank 0 on {parts[0][0]} does not see: "
                        f"{path.parent} has to be on a disk that all nodes share"
                    )
                time.sleep(0.1)
    publish(path, {name: entry for _, written in parts for name, entry in written.items()}, len(parts))
    try:
        then()
    except OSError as error:
        log.error("%s: %s; %s is written, and what it replaces stays", path.parent, error.strerror or error, path.name)


def run_on_all_ranks(group: dist.ProcessGroup | None, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on every rank and return the results by rank. An error on one rank is raised on all.

    Raises:
        CheckpointNotWritten: a rank's disk refused, or `function` raised this.
        RuntimeError: `function` raised something else.
    """
    value, refused, broken = None, None, None
    try:
        value = function()
    except CheckpointNotWritten as error:
        refused = str(error)
    except OSError as error:
        refused = system_reason(error)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    answers = [(value, refused, broken)] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(answers, (value, refused, broken), group=group)
    for rank, (_, refused, broken) in enumerate(answers):
        if broken is not None:
            raise RuntimeError(f"rank {rank} could not write its part of a checkpoint: {broken}")
        if refused is not None:
            raise CheckpointNotWritten(refused if rank == 0 else f"rank {rank}: {refused}")
    return [value for value, _, _ in answers]


def first_disk_error(failure: CheckpointException) -> str:
    """Return the disk error of the first rank that failed.

    Raises:
        RuntimeError: something other than a disk failed.
    """
    rank, (error, _) = min(failure.failures.items())
    if not isinstance(error, OSError):
        raise RuntimeError(f"rank {rank} could not write its part of a checkpoint: {error}") from failure
    return system_reason(error) if rank == 0 else f"rank {rank}: {system_reason(error)}"


def system_reason(error: OSError) -> str:
    """Return the operating system's reason, as in "No space left on device"."""
    return error.strerror or str(error)
