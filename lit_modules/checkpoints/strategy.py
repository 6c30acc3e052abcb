"""Checkpoints for Lightning's strategies: one format, so that each can resume from any other."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lit_modules.checkpoints import tensors
from lit_modules.checkpoints.folders import read_manifest
from lit_modules.checkpoints.random_state import RandomState
from lit_modules.checkpoints.reading import OPTIMIZER, RANDOM, WEIGHTS, read_into, read_trainer_state, tensor_shapes
from lit_modules.checkpoints.writing import BackgroundWriter, WriteOutcome

RATES = "learning_rates"
RANDOM_STATE = RandomState().state_key


class CheckpointsTensors(Strategy):
    """Mixin for a Lightning strategy of one device, DDP or FSDP2; put it before the strategy in the bases.

    A checkpoint stores tensors by name, independent of sharding. Optimizer hyperparameters come from the configuration,
    the current learning rates from the checkpoint. `save_checkpoint` returns before the checkpoint is written.
    """

    restore_checkpoint_after_setup = True  # tensors are read in place
    lightning_restore_optimizer = False  # already restored by then
    _writer: BackgroundWriter | None = None

    @property
    def checkpoint_writer(self) -> BackgroundWriter:
        """The writer of this strategy's checkpoints, created on first access."""
        if self._writer is None:
            self._writer = BackgroundWriter()
        return self._writer

    @property
    def _trained(self) -> lightning.LightningModule:
        assert self.lightning_module is not None  # Lightning has set it before it saves or loads
        return self.lightning_module

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        return tensors.model_tensors(self._trained)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return tensors.optimizer_tensors(self._trained, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path | str, storage_options: Callable[[], None] | None = None
    ) -> None:
        """Copy the current state, and write it to the folder `filepath` in the background (`wait_for_checkpoint`).

        Args:
            checkpoint: Lightning's checkpoint, with tensors as this class returns them.
            storage_options: called on rank 0, in the background, once the checkpoint is complete.
        """
        rank, world_size = rank_and_world_size()
        state = {WEIGHTS + name: tensor for name, tensor in checkpoint.pop("state_dict").items()}
        for optimizer in checkpoint.pop("optimizer_states", []):
            state |= {OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        callbacks = checkpoint.get("callbacks", {})
        random = {}
        if RANDOM_STATE in callbacks:
            random[f"{RANDOM}{rank:05d}"] = tensors.pack(callbacks.pop(RANDOM_STATE))
        checkpoint[RATES] = tensors.learning_rates(self._trained, self.optimizers)
        mine = tensors.rank_share(state, rank, world_size)
        self.checkpoint_writer.start(Path(filepath), mine, random, checkpoint, storage_options or (lambda: None))

    def wait_for_checkpoint(self) -> WriteOutcome | None:
        """Wait for the pending checkpoint and return its outcome; None if none is pending."""
        return self.checkpoint_writer.wait()

    def load_checkpoint(self, checkpoint_path: Path | str, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the tensors of a checkpoint, of any strategy and number of ranks, in place, and return the rest.

        Args:
            checkpoint_path: its folder; rank 0's value is used.
            weights_only: ignored: only tensors and plain values are ever read.

        Raises:
            ValueError: a tensor that the model needs is missing or has another shape.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self._trained
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        found, checkpoint = tensor_shapes(path), read_trainer_state(path)
        state = {WEIGHTS + name: tensor for name, tensor in self.lightning_module_state_dict().items()}
        if fitting:
            state |= self._made_optimizer_states(found)
        check_tensor_shapes(state, found, path)
        rank, world_size = rank_and_world_size()
        own = f"{RANDOM}{rank if read_manifest(path)['world_size'] == world_size else 0:05d}"
        if own in found:
            state[own] = torch.empty(found[own], dtype=torch.uint8)
        read_into(state, path)
        if own in found:
            checkpoint.setdefault("callbacks", {})[RANDOM_STATE] = tensors.unpack(state[own])
        if fitting:
            tensors.restore_learning_rates(module, self.optimizers, checkpoint[RATES])
            for config, schedule in zip(module.trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
                if "base_lrs" in schedule:  # per group, and the groups may be split differently now
                    schedule["base_lrs"] = config.scheduler.base_lrs
                    schedule["_last_lr"] = [group["lr"] for group in config.scheduler.optimizer.param_groups]
        return checkpoint

    def _made_optimizer_states(self, found: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Create the optimizers' state tensors that the checkpoint has."""
        state: dict[str, Tensor] = {}
        if not any(name.startswith(OPTIMIZER) for name in found):
            return state  # every earlier step was skipped
        names = tensors.parameter_names(self._trained)
        for optimizer in self.optimizers:
            made = tensors.optimizer_tensors(self._trained, optimizer, make=True)
            state |= {OPTIMIZER + name: tensor for name, tensor in made.items() if OPTIMIZER + name in found}
            for parameter in list(optimizer.state):
                if not any(f"{OPTIMIZER}{names[parameter]}.{key}" in found for key in optimizer.state[parameter]):
                    del optimizer.state[parameter]  # it had no gradient yet
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has read them."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has read them."""

    def remove_checkpoint(self, filepath: Path | str) -> None:
        if self.is_global_zero:
            shutil.rmtree(filepath)

    def teardown(self) -> None:
        self.wait_for_checkpoint()
        super().teardown()


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank's number and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_tensor_shapes(state: dict[str, Tensor], found: dict[str, torch.Size], path: Path) -> None:
    """Raise ValueError for the first tensor that a checkpoint lacks or has in another shape."""
    for name, tensor in state.items():
        if name not in found:
            raise ValueError(f"{path} has no {name}: it is of another model")
        if found[name] != tensor.shape:
            raise ValueError(f"{path} has {name} of shape {list(found[name])}, and this model {list(tensor.shape)}")
