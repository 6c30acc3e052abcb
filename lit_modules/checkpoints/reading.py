"""Tensors out of a checkpoint, into whatever holds them now, and without running anything that is written in it."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from lit_modules.checkpoints.folders import METADATA, TRAINER, step_folders

WEIGHTS, OPTIMIZER, RANDOM = "weights.", "optimizer.", "random."  # what the names of tensors begin with

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
"""What a metadata file of tensors may name. Anything else would be run by the pickle that it is: not read."""

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is a choice, and not a mistake


class MetadataUnpickler(pickle.Unpickler):
    """Knows METADATA_NAMES and torch's dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")


class Reader(FileSystemReader):
    """Torch's reader of a checkpoint's folder, with a metadata file that can name nothing but tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The names, shapes and places of all tensors.

        Raises:
            ValueError: the file is not there, damaged, or names what is no tensor.
        """
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as handle:
                metadata = MetadataUnpickler(handle).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it holds something else")
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path} is no metadata of a checkpoint: {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def sizes(path: Path) -> dict[str, torch.Size]:
    """The shape of every tensor of a checkpoint. Raises ValueError where its metadata cannot be read."""
    return {name: entry.size for name, entry in Reader(path).read_metadata().state_dict_metadata.items()}


def read_into(tensors: dict[str, Tensor], path: Path, *, alone: bool = False) -> None:
    """Fill tensors, which may be spread over ranks, with those of the same names in a checkpoint of any spread.

    Args:
        alone: only this process reads; else every rank of the process group, if there is one, calls this.

    Raises:
        ValueError: a file of it cannot be read.
    """
    try:
        dcp.load(tensors, storage_reader=Reader(path), no_dist=alone)
    except CheckpointException as failure:  # it is no Exception, and has a traceback of every rank for its text
        rank, (error, _) = min(failure.failures.items())
        raise ValueError(f"{path} cannot be read by rank {rank}: {str(error).splitlines()[0]}") from failure


def read_trainer(path: Path) -> dict[str, Any]:
    """Lightning's part of a checkpoint: loops, callbacks, schedulers, and the module's own entries.

    Raises:
        ValueError: the file cannot be read, or holds more than plain values and tensors.
    """
    try:
        return torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path / TRAINER} cannot be read: {str(error).splitlines()[0]}") from error


def data_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the data that a run was begun with; None where no checkpoint of it says one.

    Args:
        folder: the run's `checkpoints/`.
    """
    for _, path in step_folders(folder):
        try:
            return read_trainer(path)["palimpsest"]["data_fingerprint"]
        except (ValueError, KeyError):  # damaged: the next one says the same
            continue
    return None


def consolidated(path: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint in main memory, by the names that the trained module has for them.

    Args:
        path: a checkpoint's folder, of any strategy and number of ranks.

    Raises:
        ValueError: a file of it cannot be read.
    """
    entries = Reader(path).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(WEIGHTS)
    }
    read_into(weights, path, alone=True)
    return {name.removeprefix(WEIGHTS): weight for name, weight in weights.items()}
