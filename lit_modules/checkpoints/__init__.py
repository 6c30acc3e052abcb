"""Checkpoints that appear atomically, are verified before loading, and restore the state of training.

One format for every strategy and any number of ranks, written in the background by torch.distributed.checkpoint; see
`folders` for its layout. `Checkpoints` decides when to write, `CheckpointsTensors` makes a Lightning strategy write,
`newest_intact` finds the checkpoint to resume from, `read_unsharded_weights` loads the weights on one device.
"""

from lit_modules.checkpoints.folders import (
    BEST,
    METADATA,
    TRAINER,
    find_damage,
    folder_name,
    is_checkpoint,
    newest_checkpoint,
    newest_intact,
    step_folders,
    step_of,
)
from lit_modules.checkpoints.random_state import RandomState
from lit_modules.checkpoints.reading import data_fingerprint, read_trainer_state, read_unsharded_weights
from lit_modules.checkpoints.saving import Checkpoints, checkpoints_folder
from lit_modules.checkpoints.strategy import CheckpointsTensors

__all__ = [
    "BEST",
    "METADATA",
    "TRAINER",
    "Checkpoints",
    "CheckpointsTensors",
    "RandomState",
    "checkpoints_folder",
    "data_fingerprint",
    "find_damage",
    "folder_name",
    "is_checkpoint",
    "newest_checkpoint",
    "newest_intact",
    "read_trainer_state",
    "read_unsharded_weights",
    "step_folders",
    "step_of",
]
