"""Adaptive pruning: its error bound, and that it skips keys."""

import math

import pytest
import torch

from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.cpu.blocks import Decay, Segment, blocks

pytestmark = pytest.mark.core


@pytest.fixture
def decaying(make_inputs):
    """Return gates that lose about 0.3 nats per token: keys vanish within 700 tokens."""
    return make_inputs(queries=700, heads=(4, 2, 1), head_dims=(8, 8), gates=1.0)


@pytest.mark.parametrize("prune", [0.0, -1.0, -4.0, -10.0])
def test_pruning_changes_no_output_beyond_its_bound(decaying, prune):
    exact = forgetting_attention_reference(**decaying)
    error = (forgetting_attention(**decaying, prune=prune) - exact).abs().max()
    assert error <= 2 * math.exp(prune) * decaying["v"].abs().max()


@pytest.mark.parametrize("prune", [-4.0, -10.0])
def test_pruning_changes_no_gradient_beyond_the_mass_lost_over_all_queries(decaying, out_and_gradients, prune):
    exact = out_and_gradients(forgetting_attention, decaying)
    pruned = out_and_gradients(forgetting_attention, decaying, prune=prune)
    lost = decaying["q"].shape[1] * math.exp(prune)
    for name in decaying:
        assert (pruned[name] - exact[name]).abs().max() <= lost * exact[name].abs().max(), name


def test_blocks_that_are_pruned_change_the_output_only_when_the_mass_says_so(decaying):
    # With U = 0 claimed, far more is skipped than is safe: the skipping is real, and seen.
    exact = forgetting_attention(**decaying)
    reckless = forgetting_attention(**decaying, prune=0.0, logit_bound=0.0)
    assert (reckless - exact).abs().max() > 1e-6


def test_pruning_skips_keys_up_to_the_first_that_can_matter_in_any_head():
    total = torch.stack([-1.0 * torch.arange(600), -0.5 * torch.arange(600)]).double()
    segment = Segment(slice(0, 1), 0, 600, 0, 600)
    threshold = torch.tensor([-10.0, -10.0], dtype=torch.float64)
    for block in blocks(segment, 100, None, Decay(total, None), threshold):
        # Head 1 decays half as fast, so it decides: 0.5 (first - key) > 10 + log 600.
        assert block.keys_from == max(0, block.first - math.floor((10 + math.log(600)) / 0.5))


def test_pruning_does_less_work_forward_and_backward(make_inputs, out_and_gradients):
    inputs = make_inputs(queries=900, dtype=torch.float32, gates=0.0)

    def work(**options):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profile:
            out_and_gradients(forgetting_attention, inputs, **options)
        return sum(event.flops or 0 for event in profile.events() if event.name == "aten::bmm")

    assert 0 < work(prune=-10.0) < 0.4 * work()


@pytest.mark.parametrize("heads", [(4, 2, 1), (4, 1, 4)], ids=str)
def test_the_default_bound_holds_for_every_head(make_inputs, heads):
    inputs = make_inputs(batch=2, queries=400, heads=heads)
    inputs["q"] *= torch.tensor([0.1, 3.0, 1.0, 0.5])[:, None]
    exact = forgetting_attention_reference(**inputs)
    error = (forgetting_attention(**inputs, prune=-6.0) - exact).abs().max()
    assert error <= 2 * math.exp(-6.0) * inputs["v"].abs().max()


def test_a_bound_given_as_a_number_or_by_head_does_the_same(decaying):
    by_number = forgetting_attention(**decaying, prune=-5.0, logit_bound=7.5)
    by_head = forgetting_attention(**decaying, prune=-5.0, logit_bound=torch.full((4,), 7.5))
    assert torch.equal(by_number, by_head)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_what_lies_outside_the_keys_in_use_does_not_unsettle_the_bound(make_inputs, garbage):
    inputs = make_inputs(queries=70, keys=420)
    bounds = {"kv_start": torch.tensor([3], dtype=torch.int32), "kv_end": torch.tensor([200], dtype=torch.int32)}
    before = forgetting_attention(**inputs, **bounds, prune=-6.0)
    inputs["k"][:, :3] = inputs["k"][:, 200:] = garbage
    after = forgetting_attention(**inputs, **bounds, prune=-6.0)
    assert (after - before).abs().max() <= 4 * math.exp(-6.0) * inputs["v"].abs().max()
