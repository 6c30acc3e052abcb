"""Random generators after a resume."""

import random

import numpy as np
import torch

from lit_modules import checkpoints
from lit_modules.checkpoints import tensors


def test_random_state_comes_back_in_every_generator():
    kept = checkpoints.RandomState()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    random.gauss(0, 1)
    state = tensors.unpack(tensors.pack(kept.state_dict()))
    drawn = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    torch.rand(7), np.random.rand(7), random.random()
    kept.load_state_dict(state)
    kept.on_train_start(None, None)
    again = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0])
    assert np.array_equal(drawn[1], again[1])
    assert drawn[2:] == again[2:]


def test_a_checkpoint_before_the_first_step_holds_what_was_loaded():
    kept = checkpoints.RandomState()
    state = kept.state_dict()
    kept.load_state_dict(state)
    torch.rand(7), np.random.rand(7), random.random()
    again = kept.state_dict()
    assert torch.equal(again["torch"], state["torch"])
    assert again["python"] == state["python"]
    assert torch.equal(again["numpy"][1], state["numpy"][1])
    assert again["numpy"][2] == state["numpy"][2]
