"""The decay and the ranges that the Triton kernels read, against plain PyTorch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.forgetting_attention.reference import CLOSED_GATE
from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, gradient_of_gates, sum_gates
from kernels.forgetting_attention.triton.ranges import GRAIN, find_ranges


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def moved(device, *tensors):
    return (None if x is None else x.to(device) for x in tensors)


@pytest.fixture(scope="session")
def summed(device):
    """summed(gates, ...) -> c [B, Hq, S] in float64, and `first` [B, H, S], on the CPU; None where there is none."""

    def run(gates, kv_start=None, kv_end=None, cu_seqlens=None, window=None, cumulative=False, batch=None, keys=None):
        batch, keys = gates.shape[:2] if gates is not None else (batch, keys)
        bounds = moved(device, gates, kv_start, kv_end, cu_seqlens)
        decay, first = sum_gates(*bounds, window, cumulative, batch, keys, device)
        total = None
        if decay is not None:
            total = (decay.base.repeat_interleave(CHUNK, -1) + decay.local.double())[..., :keys].cpu()
        return total, None if first is None else first[..., :keys].cpu()

    return run


def random_gates(batch, keys, heads, mean=0.0, closed=0.0):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(batch, keys, heads, generator=generator)
    chance = torch.rand(batch, keys, heads, generator=generator)
    return torch.nn.functional.logsigmoid(normal + mean).masked_fill(chance < closed, -torch.inf)


def first_by_rules(gates, batch, keys, kv_start, cu_seqlens, window):
    """Return the maximum of the first keys by each rule, [B, H, S]."""
    position = torch.arange(keys)
    heads = 1 if gates is None else gates.shape[2]
    first = torch.zeros(batch, heads, keys, dtype=torch.int64)
    if gates is not None:
        closed = (gates < CLOSED_GATE).mT & (position >= (0 if kv_start is None else kv_start[:, None, None]))
        first = torch.where(closed, position, 0).cummax(-1).values
    if window is not None:
        first = first.maximum(position - window + 1)
    if kv_start is not None:
        first = first.maximum(kv_start[:, None, None])
    if cu_seqlens is not None:
        first = first.maximum(torch.stack([cu_seqlens[cu_seqlens <= i].max() for i in position]))
    return first


@pytest.mark.parametrize("mean", [6.0, -8.0], ids=["gentle", "steep"])
def test_the_sum_of_128k_gates_is_wrong_by_the_rounding_of_one_chunk(summed, mean):
    gates = random_gates(1, 131_072, 1, mean)
    exact = gates.double().cumsum(1).mT * LOG2_E
    within_chunk = (exact.diff(prepend=exact.new_zeros(1, 1, 1)).unflatten(-1, (-1, CHUNK)).cumsum(-1)).flatten(-2)
    error = (summed(gates)[0] - exact).abs()
    assert (error <= torch.finfo(torch.float32).eps / 2 * within_chunk.abs() + 1e-9).all()


@pytest.mark.parametrize(("keys", "closed"), [(300, 0.02), (5000, 0.0005)])
def test_a_closed_gate_is_left_out_of_the_sum_and_hides_what_came_before(summed, keys, closed):
    gates = random_gates(2, keys, 2, closed=closed)
    total, first = summed(gates)
    closed = gates < CLOSED_GATE
    torch.testing.assert_close(
        total, gates.double().masked_fill(closed, 0.0).cumsum(1).mT * LOG2_E, rtol=1e-6, atol=1e-9
    )
    assert torch.equal(first.long(), first_by_rules(gates, 2, keys, None, None, None))


def test_gates_outside_the_keys_in_use_are_not_read(summed):
    gates, starts, ends = random_gates(2, 300, 2), int32(5, 140), int32(300, 150)
    held = (torch.arange(300) >= starts[:, None]) & (torch.arange(300) < ends[:, None])
    total, first = summed(gates.masked_fill(~held[..., None], torch.nan), kv_start=starts, kv_end=ends)
    expected = gates.double().where(held[..., None], 0.0).cumsum(1).mT * LOG2_E
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(first.long(), first_by_rules(gates, 2, 300, starts, None, None))


def test_a_sum_that_was_given_is_kept_to_float64_precision_between_chunks(summed):
    given_sum = random_gates(2, 300, 2).double().cumsum(1) - 1e6
    starts, ends = int32(5, 140), int32(300, 150)
    held = ((torch.arange(300) >= starts[:, None]) & (torch.arange(300) < ends[:, None]))[:, None].expand(2, 2, 300)
    spoilt = given_sum.masked_fill(~held.mT, torch.nan)
    total, _ = summed(spoilt, kv_start=starts, kv_end=ends, cumulative=True)
    torch.testing.assert_close(total[held], (given_sum.mT * LOG2_E)[held], rtol=0, atol=2e-5)


def test_where_causality_alone_hides_keys_nothing_is_computed(summed):
    assert summed(None, batch=2, keys=40) == (None, None)


@st.composite
def layouts(draw):
    keys = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 300]))
    queries, batch = draw(st.sampled_from([1, keys // 2 + 1, keys])), 2
    layout = draw(st.sampled_from(["plain", "documents", "padded"]))
    starts = ends = bounds = None
    if layout == "documents":
        batch, queries = 1, keys
        bounds = int32(0, *sorted(draw(st.lists(st.integers(0, keys), max_size=6))), keys)
    if layout == "padded":
        ends = [draw(st.integers(queries, keys)) for _ in range(batch)]
        starts = int32(*(draw(st.integers(0, end)) for end in ends))
        ends = int32(*ends)
    window = draw(st.sampled_from([None, 1, 50, 2**40]))
    mean = draw(st.sampled_from([-2.0, 2.0] if layout == "plain" and window is None else [None, -2.0, 2.0]))
    return mean, batch, queries, keys, starts, ends, bounds, window


@settings(max_examples=25, deadline=None, derandomize=True)
@given(layout=layouts(), prune=st.sampled_from([None, -3.0]))
def test_ranges_hold_all_that_is_seen_and_matters_and_no_block_that_does_not(device, summed, layout, prune):
    mean, batch, queries, keys, starts, ends, bounds, window = layout
    gates = None if mean is None else random_gates(batch, keys, 2, mean, closed=0.02)
    prune = None if gates is None else prune
    on_device = list(moved(device, gates, starts, ends, bounds))
    decay, first = sum_gates(*on_device, window, False, batch, keys, device)
    ranges = find_ranges(first, decay, on_device[2], queries, keys, prune, 1.0 if prune is not None else None)
    expected = first_by_rules(gates, batch, keys, starts, bounds, window)
    threshold = -torch.inf
    total = torch.zeros(batch, expected.shape[1], keys, dtype=torch.float64)
    if prune is not None:
        threshold = (prune - 2.0 - torch.tensor(float(keys)).log().item()) * LOG2_E
        total = summed(gates, starts, ends)[0]
    for row in range(batch):
        end = keys if ends is None else int(ends[row])
        assert torch.equal(first[row, :, :end].cpu().long(), expected[row, :, :end])
        for head in range(expected.shape[1]):
            check_ranges(ranges, row, head, expected[row, head], total[row, head], threshold, end, queries)


def check_ranges(ranges, row, head, first, total, threshold, end, queries):
    """Check one head's ranges on all pairs of a query (any position: a key block has no first query) and a key."""
    position = torch.arange(end)
    visible = (position <= position[:, None]) & (position >= first[:end, None])
    # Rounding may decide what lies on the threshold itself.
    bias = total[:end, None] - total[None, :end]
    for index, begin in enumerate(range(0, end, GRAIN)):
        block = slice(begin, min(begin + GRAIN, end))
        seen_until, whole_until = (int(x[row, head, index]) for x in (ranges.seen_until, ranges.whole_until))
        assert not (visible & (bias >= threshold + 1e-3))[seen_until + 1 :, block].any()
        if seen_until >= begin:
            assert (visible & (bias >= threshold - 1e-3))[seen_until, block].any()
        causal = position[block] <= position[begin : whole_until + 1, None]
        assert torch.equal(visible[begin : whole_until + 1, block], causal)
        if whole_until + 1 < end:
            hidden = ~visible[whole_until + 1, block] & (position[block] <= whole_until + 1)
            assert hidden.any() or whole_until + 1 == begin
    if ranges.kept_from is not None:
        offset = end - queries
        for index, begin in enumerate(range(offset, end, GRAIN)):
            kept_from = int(ranges.kept_from[row, head, index])
            rows = slice(begin, min(begin + GRAIN, end))
            assert not (visible & (bias >= threshold + 1e-3))[rows, :kept_from].any()
            assert bias[begin, kept_from] >= threshold - 1e-3


@pytest.mark.parametrize("together", [1, 64])
@pytest.mark.parametrize("layout", ["plain", "documents", "padded", "cumulative"])
def test_the_gradient_of_gates_is_the_sum_over_all_later_keys_of_the_document(device, layout, together):
    batch, keys, heads = (1 if layout == "documents" else 2), 4300, 2
    queries = keys if layout == "documents" else 4200
    gates = random_gates(batch, keys, heads, closed=0.001)
    starts = ends = bounds = None
    if layout == "documents":
        bounds = int32(0, 0, 1, 2000, 2048, 2048, 2049, 4100, keys)
    if layout == "padded":
        starts, ends = int32(7, 2100), int32(4300, 4250)
    generator = torch.Generator().manual_seed(1)
    grad_keys = torch.randn(batch, heads, 4352, generator=generator)
    parts = 16 if together > 1 else 1
    grad_queries = torch.randn(batch, heads, -(-queries // together), parts, generator=generator)
    args = moved(device, gates, grad_keys, grad_queries)
    bounds_there = moved(device, starts, ends, bounds)
    actual = gradient_of_gates(*args, together, *bounds_there, queries, layout == "cumulative").cpu()

    expected = grad_keys[..., :keys].double().clone()
    groups = grad_queries.double().sum(-1)
    for row in range(batch):
        start, end = 0 if starts is None else int(starts[row]), keys if ends is None else int(ends[row])
        expected[row, :, :start] = expected[row, :, end:] = 0.0
        for query in range(max(0, start - (end - queries)), queries):
            group = query // together
            size = min(queries - group * together, together)
            expected[row, :, end - queries + query] += groups[row, :, group] / size
        if layout == "cumulative":
            continue
        documents = [start, end] if bounds is None else bounds.tolist()
        for begin, stop in pairwise(documents):
            expected[row, :, begin:stop] = expected[row, :, begin:stop].flip(-1).cumsum(-1).flip(-1)
            expected[row, :, begin : min(begin + 1, stop)] = 0.0
    if layout != "cumulative":
        expected.masked_fill_((gates < CLOSED_GATE).mT, 0.0)
    torch.testing.assert_close(actual.mT.double(), expected, rtol=1e-5, atol=1e-5)
