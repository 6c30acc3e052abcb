"""Initial weights drawn part by part are those that the ordinary constructor draws."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.parallel.materializing import materialize

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
NETWORKS = {
    "attention": {"num_layers": 2, "qk_norm": True, "kv_shift": True, "key_head_dim": 4, "augmented_query_dim": 24},
    "tied": {"num_layers": 2, "tie_word_embeddings": True},
    "every_mixer": {"num_layers": 6, "mixers": ["hgrn2", "gla", "mamba2", "gsa", "hgrn2", "attention"], "state_dim": 8},
    "convolved": {"num_layers": 2, "mixers": ["mamba2", "gla"], "state_dim": 8, "short_conv_width": 4},
}


def on_meta(config: PalimpsestConfig) -> PalimpsestForCausalLM:
    with torch.device("meta"):
        return PalimpsestForCausalLM(config)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_model_made_on_no_device_gets_the_weights_of_one_made_whole(network):
    config = PalimpsestConfig(**SIZES | NETWORKS[network])
    torch.manual_seed(3)
    expected = PalimpsestForCausalLM(config).state_dict()
    next_number = torch.rand(1)
    torch.manual_seed(3)
    model = on_meta(config)
    materialize(model, torch.device("cpu"))
    assert torch.rand(1).equal(next_number)
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(found[name].equal(value) for name, value in expected.items())


def test_tied_weights_stay_one():
    model = on_meta(PalimpsestConfig(**SIZES | NETWORKS["tied"]))
    materialize(model, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="processes on CPUs talk through gloo")
def test_weights_sharded_and_split_over_four_ranks_are_those_of_one_device(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, str(Path(__file__).with_name("spread_initialization.py")), "4", str(tmp_path / "point")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 6
    assert all(names == [] for of_ranks in results.values() for names in of_ranks), results
