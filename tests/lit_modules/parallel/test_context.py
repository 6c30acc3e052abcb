"""Sequences split over processes: outputs, losses and gradients are those of one device, to rounding in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_modules.networks import PalimpsestConfig
from lit_modules.networks.positions import locate
from lit_modules.parallel.context import check_heads, check_tokens
from tests.lit_modules.networks.conftest import ABLATION, build
from tests.lit_modules.parallel.context_cases import CASES

ROUNDING = 1e-12


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict]]:
    """Return the results of every process, by the number of processes."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("processes on CPUs talk through gloo")
    folder = tmp_path_factory.mktemp("context")
    program = Path(__file__).with_name("context_cases.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, str(program), str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {size: json.loads((folder / f"results_{size}.json").read_text()) for size in CASES}


@pytest.mark.parametrize(("size", "case"), [(size, " ".join(case)) for size in CASES for case in CASES[size]])
def test_outputs_loss_and_every_gradient_equal_those_of_one_device(results, size, case):
    for found in results[size]:
        assert found[case].keys() == {"outputs", "loss", "gradients"}
        assert max(found[case].values()) < ROUNDING


def test_blocks_that_are_recomputed_in_the_backward_pass_give_the_same_gradients(results):
    assert max(results[2][0]["recomputed"].values()) < ROUNDING


def test_blocks_of_a_kind_are_compiled_once_without_a_graph_break(results):
    for found in results[2]:
        assert found["compiled"].pop("graphs") == 2  # of three blocks
        assert max(found["compiled"].values()) < ROUNDING


def test_weights_are_spread_over_the_ranks_that_share_a_sequence(results):
    assert all(found["sharded"]["gradients"] < ROUNDING for found in results[2])


def test_two_steps_of_ddp_and_a_validation_equal_those_of_one_device(results):
    for found in results[2]:
        assert found["trained"]["parameters"] < ROUNDING
        assert found["trained"]["reported_loss"] < ROUNDING
        assert found["trained"]["validation"] < ROUNDING


def test_while_suspended_each_rank_generates_for_itself(results):
    for found in results[2]:
        assert found["suspended"]["equal"]
        assert max(found["suspended"]["again"].values()) < ROUNDING


def test_each_rank_is_told_the_bounds_of_its_own_heads(results):
    assert [found["bounds"]["told"] for found in results[2]] == [[0.0, 1.0], [2.0, 3.0]]
    assert all(found["bounds"]["back"] for found in results[2])


def test_heads_that_are_views_of_one_travel_once(results):
    for found in results[2]:
        assert found["shared_heads"]["sent"] == 4 * 5 + 5  # a rank's four heads, and the one that all share
        assert found["shared_heads"]["strides"][1] == 0
        assert found["shared_heads"]["equal"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("whole", "give the model what ContextParallel.part returns"),
        ("cached", "or whole sequences under ContextParallel.suspended"),
        ("short", "strategy.context_parallel_size=2 leaves 2 tokens to a rank, and a mixer looks back at 3"),
        ("uneven", "strategy.context_parallel_size=2 does not divide the 63 tokens of a micro-batch"),
        ("heads", "strategy.context_parallel_size=2 does not divide the 1 heads of the mixer mamba2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_every_rank_in_one_line(results, case, said):
    for found in results[2]:
        assert said in found["refused"][case]
        assert "\n" not in found["refused"][case]


def test_heads_that_the_ranks_cannot_share_are_named_before_a_run_begins():
    config = PalimpsestConfig(hidden_size=48, num_heads=6, mixers=["attention", "hgrn2"], num_layers=2, state_heads=4)
    check_heads(config, 2)
    for size, heads in (
        (3, r"4 heads of the mixer hgrn2 \(model.state_heads=4\)"),
        (4, "6 heads of the mixer attention"),
    ):
        with pytest.raises(ValueError, match=f"strategy.context_parallel_size={size} does not divide the {heads}"):
            check_heads(config, size)
    with pytest.raises(
        ValueError, match=r"the 3 heads that strategy.tensor_parallel_size=2 leaves of the mixer attention"
    ):
        check_heads(config, 2, tensor_parallel_size=2)


def test_tokens_that_the_ranks_cannot_share_are_named():
    check_tokens(4096, 4)
    with pytest.raises(ValueError, match=r"strategy.context_parallel_size=3 does not divide the 4096 tokens"):
        check_tokens(4096, 3)


@pytest.mark.parametrize("name", ["fox_pro", "pro_plus_rope"])
def test_positions_that_are_given_are_those_that_would_be_found(name):
    model = build(**ABLATION[name])
    ids, cu_seqlens = torch.randint(61, (1, 12)), torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = locate(1, 12, 0, ids.device, cu_seqlens=cu_seqlens)
    assert torch.equal(model(ids, positions=positions).logits, model(ids, cu_seqlens=cu_seqlens).logits)
    with pytest.raises(ValueError, match=r"positions says all that .* give it alone"):
        model(ids, positions=positions, cu_seqlens=cu_seqlens)
