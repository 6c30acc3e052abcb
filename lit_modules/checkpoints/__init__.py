"""Checkpoints that appear whole or not at all, that are checked before they are loaded, and that bring everything back.

One format for every strategy and any number of ranks, written in the background by torch.distributed.checkpoint:
`folders` has its layout. `Checkpoints` says when one is written, `Checkpointed` makes a Lightning strategy write it,
`newest_whole` finds the one to go on from, `consolidated` gives its weights to who has one device.
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
