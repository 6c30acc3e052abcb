"""`job=pretrain` of recurrent and mixed stacks: trains, and exports a model that loads and generates with a cache."""

import csv
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import lit_modules.networks  # noqa: F401 (registers the architecture)
from tests.conftest import PICTURES


@pytest.mark.parametrize(
    ("model", "mixers", "pictured"),
    [("hgrn2_125m", "hgrn2", False), ("mamba2_125m", "[mamba2,attention]", True)],
    ids=["hgrn2", "mamba2_with_attention"],
)
def test_a_recurrent_model_trains_and_its_export_generates(run, command, model, mixers, pictured):
    sizes = ("model.state_heads=2", "model.state_dim=8")
    finished = run(f"model={model}", f"model.mixers={mixers}", *sizes, *PICTURES)
    assert finished.status == 0, finished.err
    (folder,) = command.runs()
    with open(folder / "metrics.csv", newline="") as handle:
        losses = [float(row["validation/loss"]) for row in csv.DictReader(handle) if row["validation/loss"]]
    assert losses[-1] < losses[0] < math.log(384)
    assert (folder / "figures" / "forget_gates.png").exists() == pictured
    exported = AutoModelForCausalLM.from_pretrained(folder / "export").double()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(5, 25).view(2, 10)
    assert exported.generate(ids, **settings).equal(exported.generate(ids, **settings, use_cache=False))
