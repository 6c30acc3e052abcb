"""Heads split over ranks: the same training as on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_modules.networks import PalimpsestConfig
from lit_modules.parallel.tensor import check_split

NETWORKS = ["fox_pro", "fox_pro_pruned", "llama", "sigma", "learned_times", "fixed_times"]
SHARDED = ["fox_pro", "sigma", "llama"]
LAYERS = 2


def results(ranks: int, tmp_path_factory) -> dict:
    """Return the results of `split_training.py` with this number of ranks."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("processes on CPUs talk through gloo")
    meeting_point = tmp_path_factory.mktemp("meeting") / "point"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, str(Path(__file__).with_name("split_training.py")), str(ranks), str(meeting_point)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict:
    return results(2, tmp_path_factory)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory) -> dict:
    return results(4, tmp_path_factory)


def assert_same_training(found: dict) -> None:
    assert found["loss"] < 1e-5
    assert found["norm"] < 1e-5
    assert found["gradient"] < 1e-4
    assert found["weight"] < 1e-4


@pytest.mark.parametrize("network", NETWORKS)
def test_two_ranks_that_share_the_heads_train_as_one_device(of_two, network):
    assert_same_training(of_two[network])


@pytest.mark.parametrize("network", NETWORKS)
def test_every_rank_has_the_losses_of_all_tokens_and_all_logits(of_two, network):
    assert of_two[network]["losses"] < 1e-5
    assert of_two[network]["logits"] < 1e-5


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_holds_its_heads_alone(of_two, network):
    own, all_of_them = of_two[network]["rows"]
    assert own * 2 == all_of_them


@pytest.mark.parametrize("network", NETWORKS)
def test_a_block_sums_over_the_ranks_once_for_each_of_its_halves_in_either_direction(of_two, network):
    halves = 1 if network == "fixed_times" else 2  # it has no SwiGLU
    messages = of_two[network]["messages"]
    assert messages.pop("all_reduce") == 2 * halves * LAYERS
    # augmented queries are gathered before and dealt out after, and their gradients the other way
    gathered = {"all_gather_into_tensor": 2 * LAYERS, "reduce_scatter_tensor": 2 * LAYERS}
    assert messages == (gathered if network == "sigma" else {})


@pytest.mark.parametrize("network", SHARDED)
def test_heads_over_two_ranks_and_weights_over_two_train_as_one_device(of_four, network):
    assert_same_training(of_four[network])


def test_compiled_blocks_that_recompute_and_are_sharded_train_as_one_device(of_two):
    assert_same_training(of_two["compiled"])


def config(**switches) -> PalimpsestConfig:
    return PalimpsestConfig(hidden_size=48, num_layers=2, num_heads=12, intermediate_size=96, **switches)


@pytest.mark.parametrize(
    ("switches", "ranks", "named"),
    [
        ({}, 8, "model.num_heads=12"),
        ({"num_key_heads": 2}, 4, "model.num_key_heads=2"),
        ({"num_value_heads": 1}, 2, "model.num_value_heads=1"),
        ({"augmented_query_dim": 50}, 4, "model.augmented_query_dim=50"),
        ({"mixers": ["attention", "hgrn2"]}, 2, "model.mixers has hgrn2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_its_key(switches, ranks, named):
    with pytest.raises(ValueError, match=f"^strategy.tensor_parallel_size={ranks} .*{named}: give .*$"):
        check_split(config(**switches), ranks)
    check_split(config(**switches), 1)


def test_heads_that_divide_are_accepted():
    check_split(config(num_key_heads=4, num_value_heads=4), 4)
