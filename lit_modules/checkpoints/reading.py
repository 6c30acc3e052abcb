"""Reading of checkpoints into any sharding, without executing code from their files."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lit_modules.checkpoints.folders import METADATA, TRAINER, step_folders

WEIGHTS, OPTIMIZER, RANDOM = "weights.", "optimizer.", "random."  # prefixes of tensor names

METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_StorageInfo.__module__, "_StorageInfo"),
    *(
        (Metadata.__module__, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""Names that a metadata file of tensors may contain. It is a pickle, which would execute any other name."""

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that accepts METADATA_NAMES and torch's dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")


class SafeReader(FileSystemReader):
    """Torch's reader of a checkpoint's folder, restricted to metadata that names tensors only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the names, shapes and locations of all tensors.

        Raises:
            ValueError: the file is missing or damaged, or names anything but tensors.
        """
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as handle:
                metadata = MetadataUnpickler(handle).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it holds something else")
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path} is not the metadata of a checkpoint: {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor of a checkpoint.

    Raises:
        ValueError: its metadata cannot be read.
    """
    return {name: entry.size for name, entry in tensor_entries(path).items()}


def tensor_entries(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape and dtype of every tensor of a checkpoint, which holds only tensors; raises as `tensor_shapes`."""
    entries = SafeReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def read_into(tensors: dict[str, Tensor], path: Path, *, alone: bool = False) -> None:
    """Fill tensors, sharded or not, with the tensors of the same names in a checkpoint of any sharding.

    Args:
        alone: only this process reads; otherwise every rank of the process group, if any, must call this.

    Raises:
        ValueError: a file cannot be read.
    """
    try:
        dcp.load(tensors, storage_reader=SafeReader(path), no_dist=alone)
    except CheckpointException as failure:  # not an Exception subclass; its text is every rank's traceback
        rank, (error, _) = min(failure.failures.items())
        raise ValueError(f"{path} cannot be read by rank {rank}: {str(error).splitlines()[0]}") from failure


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read Lightning's part of a checkpoint: loops, callbacks, schedulers, and the module's own entries.

    Raises:
        ValueError: the file cannot be read, or holds more than plain values and tensors.
    """
    try:
        return torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path / TRAINER} cannot be read: {str(error).splitlines()[0]}") from error


def data_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of the data that a run started with; None if no checkpoint has one.

    Args:
        folder: the run's `checkpoints/`.
    """
    for _, path in step_folders(folder):
        try:
            return read_trainer_state(path)["palimpsest"]["data_fingerprint"]
        except (ValueError, KeyError):  # damaged: the next one has the same fingerprint
            continue
    return None


def read_unsharded_weights(path: Path) -> dict[str, Tensor]:
    """Return the unsharded weights of a checkpoint in main memory, by the trained module's names.

    Args:
        path: a checkpoint's folder, of any strategy and number of ranks.

    Raises:
        ValueError: a file cannot be read.
    """
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensor_entries(path).items()
        if name.startswith(WEIGHTS)
    }
    read_into(weights, path, alone=True)
    return {name.removeprefix(WEIGHTS): weight for name, weight in weights.items()}
