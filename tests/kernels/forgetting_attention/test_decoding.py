"""Decoding: few queries over a cache, against the parallel pass."""

import torch

from kernels import forgetting_attention


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_decoding_one_by_one_equals_the_parallel_pass_with_left_padding(make_inputs, assert_close):
    inputs, starts = make_inputs(batch=3, queries=40, heads=(4, 2, 1)), int32(0, 5, 31)
    parallel = forgetting_attention(**inputs, kv_start=starts)
    steps = [
        forgetting_attention(
            inputs["q"][:, t : t + 1], *(inputs[name][:, : t + 1] for name in ("k", "v", "log_forget")), kv_start=first
        )
        for t, first in ((t, starts.clamp(max=t + 1)) for t in range(40))
    ]
    assert_close({"out": torch.cat(steps, 1)}, {"out": parallel}, 1e-12)


def test_a_cache_of_fixed_size_equals_one_that_grows(make_inputs, assert_close):
    inputs = make_inputs(batch=2, queries=30, heads=(2, 1, 2))
    parallel = forgetting_attention(**inputs)
    decay = inputs["log_forget"].cumsum(1)
    cache = {name: torch.full((2, 64, *x.shape[2:]), torch.nan).double() for name, x in inputs.items() if name != "q"}
    steps = []
    for begin, end in ((0, 10), (10, 11), (11, 12), (12, 29), (29, 30)):
        for name, new in (("k", inputs["k"]), ("v", inputs["v"]), ("log_forget", decay)):
            cache[name][:, begin:end] = new[:, begin:end]
        held = torch.full((2,), end, dtype=torch.int32)
        steps.append(forgetting_attention(inputs["q"][:, begin:end], **cache, kv_end=held, cumulative=True))
    assert_close({"out": torch.cat(steps, 1)}, {"out": parallel}, 1e-12)


def test_rows_that_hold_different_lengths_equal_each_row_alone(make_inputs, assert_close):
    inputs, starts, ends = make_inputs(batch=3, queries=4, keys=50, gates=3.0), (0, 3, 20), (4, 50, 33)
    together = forgetting_attention(**inputs, kv_start=int32(*starts), kv_end=int32(*ends))
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        alone = {name: x[row : row + 1, start:end] for name, x in inputs.items() if name != "q"}
        out = forgetting_attention(inputs["q"][row : row + 1], **alone)
        assert_close({"out": together[row : row + 1]}, {"out": out}, 1e-12)


def test_a_cumulative_sum_gives_the_same_output_and_its_own_gradient(make_inputs, assert_close, out_and_gradients):
    inputs = make_inputs(batch=2, queries=140, keys=150, heads=(4, 2, 2))
    from_gates = out_and_gradients(forgetting_attention, inputs)
    summed = out_and_gradients(
        forgetting_attention, {**inputs, "log_forget": inputs["log_forget"].cumsum(1)}, cumulative=True
    )
    summed["log_forget"] = summed["log_forget"].flip(1).cumsum(1).flip(1)
    assert_close(summed, from_gates, 1e-11)
