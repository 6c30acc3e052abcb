"""Checkpoints that appear atomically, are verified before loading, and restore the complete state.

One format for every strategy and any number of ranks, written in the background by torch.distributed.checkpoint; see
`folders` for its layout. `Checkpoints` decides when to write, `Checkpointed` makes a Lightning strategy write,
`newest_whole` finds the checkpoint to resume from, `consolidated` loads the weights on one device.
"""

from lit_modules.checkpoints.folders import (
    BEST,
    METADATA,
    TRAINER,
    damage,
    is_checkpoint,
    name_of,
    newest,
    newest_whole,
    step_folders,
    step_of,
)
from lit_modules.checkpoints.random_state import RandomState
from lit_modules.checkpoints.reading import consolidated, data_fingerprint, read_trainer
from lit_modules.checkpoints.saving import Checkpoints, folder_of
from lit_modules.checkpoints.strategy import Checkpointed

__all__ = [
    "BEST",
    "METADATA",
    "TRAINER",
    "Checkpointed",
    "Checkpoints",
    "RandomState",
    "consolidated",
    "damage",
    "data_fingerprint",
    "folder_of",
    "is_checkpoint",
    "name_of",
    "newest",
    "newest_whole",
    "read_trainer",
    "step_folders",
    "step_of",
]
