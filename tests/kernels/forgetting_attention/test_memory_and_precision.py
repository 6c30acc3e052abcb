"""Long sequences: no T x T tensor, packed documents cost the sum of their squares, and sums of gates stay exact."""

import pytest
import torch

from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference


@pytest.fixture
def profiled(out_and_gradients):
    """profiled(inputs, **options) -> the profiler's events of a forward and backward pass."""

    def run(inputs, **options):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            out_and_gradients(forgetting_attention, inputs, **options)
        return profile.events()

    return run


def largest_allocation(events):
    return max(event.self_cpu_memory_usage for event in events)


@pytest.mark.parametrize("gates", [None, 5.0, -1.0], ids=["no gate", "gentle", "steep"])
def test_no_tensor_grows_with_the_square_of_the_length(make_inputs, profiled, gates):
    sizes = [
        largest_allocation(profiled(make_inputs(queries=n, heads=(1, 1, 1), dtype=torch.float32, gates=gates)))
        for n in (1024, 2048)
    ]
    assert 0 < sizes[1] <= sizes[0]


def test_decoding_over_a_long_cache_allocates_in_proportion_to_the_keys(make_inputs, profiled):
    inputs = make_inputs(queries=1, keys=20_000, heads=(1, 1, 1), head_dims=(8, 8), dtype=torch.float32)
    assert largest_allocation(profiled(inputs)) <= 20_000 * 8 * 8


def test_packed_documents_cost_their_own_squares(make_inputs, profiled):
    def allocated_by_products(**options):
        events = profiled(make_inputs(queries=1024, dtype=torch.float32), **options)
        return sum(event.self_cpu_memory_usage for event in events if event.name == "aten::bmm")

    documents = torch.arange(0, 1025, 64, dtype=torch.int32)
    assert 0 < allocated_by_products(cu_seqlens=documents) <= allocated_by_products() / 6


@pytest.mark.parametrize("gates", [6.0, 0.0, -2.0], ids=["gentle", "even", "steep"])
def test_the_last_queries_of_128k_tokens_are_as_exact_as_the_first(make_inputs, assert_close, gates):
    """A float32 sum over 128k gates of -2 would be spaced 0.016 there; a logit must not be."""
    inputs = make_inputs(queries=16, keys=131_072, heads=(1, 1, 1), dtype=torch.float32, gates=gates)
    expected = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()})
    assert_close({"out": forgetting_attention(**inputs)}, {"out": expected}, 3e-6)


def test_gradients_of_gates_do_not_gather_rounding_over_packed_documents(make_inputs, assert_close, out_and_gradients):
    inputs = make_inputs(queries=3000, dtype=torch.float32, gates=4.0)
    bounds = torch.arange(0, 3001, 60, dtype=torch.int32)
    packed = out_and_gradients(forgetting_attention, inputs, cu_seqlens=bounds)
    wide = {name: x.double() for name, x in inputs.items()}
    assert_close(packed, out_and_gradients(forgetting_attention, wide, cu_seqlens=bounds), 2e-6)
