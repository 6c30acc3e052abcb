"""Adaptive pruning in the Triton kernels: its error bound, and that it skips keys."""

import math

import pytest
import torch

from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.triton.decay import sum_gates
from kernels.forgetting_attention.triton.ranges import GRAIN, find_ranges


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def decaying(make_inputs):
    """Return gates that lose about 0.8 nats per token: keys vanish within 300 tokens."""
    return make_inputs(queries=300, heads=(2, 1, 2), head_dims=(16, 16), gates=0.0, dtype=torch.float32)


@pytest.mark.parametrize("prune", [0.0, -1.0, -4.0, -10.0])
def test_pruning_changes_no_output_beyond_its_bound(decaying, triton_forgetting_attention, prune):
    wide = {name: x.double() for name, x in decaying.items()}
    pruned = triton_forgetting_attention(**decaying, prune=prune)
    rounding = 1e-5
    error = (pruned - forgetting_attention_reference(**wide)).abs().max()
    assert error <= (2 * math.exp(prune) + rounding) * decaying["v"].abs().max()


@pytest.mark.parametrize("prune", [-7.0, -12.0])
def test_pruning_changes_no_gradient_beyond_the_mass_lost_over_all_queries(
    decaying, out_and_gradients, triton_forgetting_attention, prune
):
    exact = out_and_gradients(triton_forgetting_attention, decaying)
    pruned = out_and_gradients(triton_forgetting_attention, decaying, prune=prune)
    lost = decaying["q"].shape[1] * math.exp(prune)
    rounding = 1e-5
    for name in decaying:
        assert (pruned[name] - exact[name]).abs().max() <= (lost + rounding) * exact[name].abs().max(), name


def test_blocks_that_are_pruned_do_not_reach_outputs_or_gradients(
    decaying, out_and_gradients, triton_forgetting_attention
):
    # Nothing but skipping keeps what is NaN from all that it is multiplied with.
    bound = {"prune": -1.0, "logit_bound": 8.0}
    before = out_and_gradients(triton_forgetting_attention, decaying, **bound)
    far = slice(0, GRAIN)
    late = slice(2 * GRAIN, None)
    spoilt = {name: x.clone() for name, x in decaying.items()}
    spoilt["k"][:, far] = spoilt["v"][:, far] = torch.nan
    after = out_and_gradients(triton_forgetting_attention, spoilt, **bound)
    assert before["out"].isfinite().all()
    for name in ("out", "q", "k", "v"):
        assert torch.equal(before[name][:, late], after[name][:, late]), name
    spoilt = {name: x.clone() for name, x in decaying.items()}
    spoilt["q"][:, late] = torch.nan
    after = out_and_gradients(triton_forgetting_attention, spoilt, **bound)
    for name in ("out", "q", "k", "v"):
        assert torch.equal(before[name][:, far], after[name][:, far]), name


def test_pruning_changes_the_output_when_the_bound_is_reckless(decaying, triton_forgetting_attention):
    decaying["log_forget"] = decaying["log_forget"] / 20
    exact = triton_forgetting_attention(**decaying)
    reckless = triton_forgetting_attention(**decaying, prune=0.0, logit_bound=0.0)
    assert (reckless - exact).abs().max() > 1e-6


def test_ranges_end_where_a_hand_made_decay_says(device):
    keys, queries, prune, bound = 1000, 600, -3.0, torch.tensor([2.0, 0.5])
    gates = torch.tensor([-0.5, -0.125]).expand(1, keys, 2).contiguous().to(device)
    decay, first = sum_gates(gates, None, None, None, None, False, 1, keys, device)
    ranges = find_ranges(first, decay, None, queries, keys, prune, bound.to(device))
    for head, (step, logit) in enumerate(zip((0.5, 0.125), bound.tolist(), strict=True)):
        reach = math.floor((2 * logit + math.log(keys) - prune) / step)
        for block, kept_from in enumerate(ranges.kept_from[0, head].tolist()):
            assert kept_from == max(0, keys - queries + block * GRAIN - reach)
        for block, seen_until in enumerate(ranges.seen_until[0, head].tolist()):
            last_key = min(block * GRAIN + GRAIN, keys) - 1
            assert seen_until == min(keys - 1, last_key + reach)


@pytest.mark.parametrize("heads", [(4, 2, 1), (4, 1, 4)], ids=str)
def test_the_default_bound_holds_for_every_head(make_inputs, triton_forgetting_attention, heads):
    inputs = make_inputs(batch=2, queries=150, heads=heads, head_dims=(16, 16), gates=0.0, dtype=torch.float32)
    inputs["q"] *= torch.tensor([0.1, 3.0, 1.0, 0.5])[:, None]
    exact = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()})
    error = (triton_forgetting_attention(**inputs, prune=-6.0) - exact).abs().max()
    assert error <= 2 * math.exp(-6.0) * inputs["v"].abs().max()


def test_the_default_bound_counts_on_keys_that_fit_best_where_they_are_farthest(triton_forgetting_attention):
    # Logits of 8 in far keys and -8 in near ones: for the last query, far keys outweigh what a decay of 15 took.
    keys, far = 200, 124
    q = torch.zeros(1, keys, 1, 16)
    q[..., 0] = 32**0.5
    k, v = q.clone(), torch.ones(1, keys, 1, 16)
    k[:, far:] *= -1
    v[:, far:] = -1
    inputs = {"q": q, "k": k, "v": v, "log_forget": torch.full((1, keys, 1), -0.2)}
    exact = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()})
    error = (triton_forgetting_attention(**inputs, prune=-2.0) - exact).abs().max()
    assert error <= 2 * math.exp(-2.0)


def test_a_bound_given_as_a_number_or_by_head_does_the_same(decaying, triton_forgetting_attention):
    by_number = triton_forgetting_attention(**decaying, prune=-5.0, logit_bound=7.5)
    by_head = triton_forgetting_attention(**decaying, prune=-5.0, logit_bound=torch.full((2,), 7.5))
    assert torch.equal(by_number, by_head)


def test_documents_windows_and_padding_are_pruned_within_the_bound(make_inputs, triton_forgetting_attention):
    sizes = {"heads": (2, 1, 1), "head_dims": (16, 16), "gates": 0.0, "closed": 0.005, "dtype": torch.float32}
    layouts = [
        (make_inputs(queries=260, **sizes), {"cu_seqlens": int32(0, 3, 100, 100, 260)}),
        (make_inputs(queries=260, **sizes), {"window": 150}),
        (make_inputs(batch=2, queries=130, keys=260, **sizes), {"kv_start": int32(9, 150), "kv_end": int32(260, 200)}),
    ]
    for inputs, options in layouts:
        exact = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()}, **options)
        error = (triton_forgetting_attention(**inputs, prune=-6.0, **options) - exact).abs().max()
        assert error <= 2 * math.exp(-6.0) * inputs["v"].abs().max()


def test_what_lies_outside_the_keys_in_use_does_not_unsettle_the_bound(make_inputs, triton_forgetting_attention):
    inputs = make_inputs(queries=70, keys=420, heads=(1, 1, 1), head_dims=(16, 16), gates=2.0, dtype=torch.float32)
    options = {"kv_start": int32(3), "kv_end": int32(200)}
    exact = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()}, **options)
    for value in (torch.nan, torch.inf):
        for name in "kv":
            inputs[name][:, :3] = inputs[name][:, 200:] = value
        out = triton_forgetting_attention(**inputs, **options, prune=-6.0)
        assert (out - exact).abs().max() <= 2 * math.exp(-6.0) * inputs["v"][:, 3:200].abs().max()
