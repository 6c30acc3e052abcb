"""Long sequences: errors do not accumulate, memory is linear in the length, documents cost the same as their tokens."""

import pytest
import torch

from kernels import gated_recurrence
from kernels.gated_recurrence import gated_recurrence_reference


@pytest.fixture
def profiled(out_and_gradients):
    """profiled(inputs, **options) -> the profiler's events of a forward and backward pass."""

    def run(inputs, **options):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            out_and_gradients(gated_recurrence, inputs, **options)
        return profile.events()

    return run


@pytest.mark.parametrize("strength", [1e-5, 1 / 16, 1.0, 30.0])
def test_float32_over_64k_tokens_is_right_to_3e_6(make_inputs, assert_close, out_and_gradients, strength):
    """Results and gradients against float64; the same sums by chunks, which the next test holds to the definition."""
    inputs = make_inputs(1, 65_536, (1, 1), (4, 3), strength=strength, dtype=torch.float32)
    expected = out_and_gradients(gated_recurrence, {name: x.double() for name, x in inputs.items()})
    assert_close(out_and_gradients(gated_recurrence, inputs), expected, 3e-6)


@pytest.mark.parametrize("strength", [1e-5, 1.0])
def test_float64_over_64k_tokens_is_the_definition(make_inputs, assert_close, strength):
    inputs = make_inputs(1, 65_536, (1, 1), (4, 3), strength=strength)
    actual, expected = (f(**inputs) for f in (gated_recurrence, gated_recurrence_reference))
    names = ("out", "state")
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)), 1e-11)


@pytest.mark.parametrize("form", ["key", "value", "head"])
def test_no_tensor_grows_with_the_square_of_the_length(make_inputs, profiled, form):
    options = {"decay_axis": "value" if form == "value" else "key"}
    sizes = []
    for length in (2048, 8192):
        events = profiled(make_inputs(1, length, (1, 1), (8, 8), form=form, dtype=torch.float32), **options)
        sizes.append(max(event.self_cpu_memory_usage for event in events))
    assert 0 < sizes[1] <= 4 * sizes[0]


@pytest.mark.parametrize("short", [2, 3, 40], ids=lambda length: f"documents of {length}")
def test_hundreds_of_short_documents_beside_a_long_one_cost_little_more_than_their_tokens(make_inputs, profiled, short):
    bounds = torch.cat([torch.arange(300) * short, torch.tensor([300 * short + 400])]).int()
    inputs = make_inputs(1, int(bounds[-1]), (1, 1), (16, 16), dtype=torch.float32, states=0)

    def allocated_by_products(**options):
        events = profiled(inputs, **options)
        return sum(event.self_cpu_memory_usage for event in events if event.name == "aten::bmm")

    assert 0 < allocated_by_products(cu_seqlens=bounds) <= 3 * allocated_by_products()
