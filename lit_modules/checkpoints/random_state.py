"""Saved state of the random generators, so that a resumed run continues exactly."""

import random
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


class RandomState(Callback):
    """Callback that saves this rank's random generators, which Lightning does not, for exact dropout and sampling.

    A resume with the same number of ranks restores each rank's own state; any other number restores rank 0's on all.
    """

    def __init__(self) -> None:
        self.restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.restored is not None:  # a checkpoint between loading and the first step, as of a repeated validation
            return self.restored
        of_numpy = np.random.get_state()
        assert isinstance(of_numpy, tuple)  # a dict only with legacy=False
        name, keys, position, has_gauss, cached = of_numpy
        state = {
            "torch": torch.get_rng_state(),
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()  # of this rank's device
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state  # set at the first step: code between loading and that step may draw numbers

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.restored is None:
            return
        torch.set_rng_state(self.restored["torch"].cpu())
        name, keys, position, has_gauss, cached = self.restored["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        version, internal, gauss = self.restored["python"]
        random.setstate((version, tuple(internal), gauss))
        if torch.cuda.is_available() and "cuda" in self.restored:
            torch.cuda.set_rng_state(self.restored["cuda"].cpu())
        self.restored = None
