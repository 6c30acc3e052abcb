"""The public function against the reference: outputs and all gradients, over shapes and options."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="session")
def agree(assert_close, out_and_gradients):
    def check(inputs, **options):
        actual = out_and_gradients(forgetting_attention, inputs, **options)
        expected = out_and_gradients(
            forgetting_attention_reference, {name: x.double() for name, x in inputs.items()}, **options
        )
        # A gradient that nearly cancels (all weight on one key) has few right digits in float32, whatever computes it:
        # the definition itself, evaluated in the inputs' dtype, says how few.
        same_dtype = out_and_gradients(forgetting_attention_reference, inputs, **options)
        assert_close(actual, expected, TOLERANCE[inputs["q"].dtype], or_as_close_as=same_dtype)

    return check


@st.composite
def problems(draw):
    """Draw consistent sizes and options; lengths on both sides of a chunk."""
    length = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 300]))
    queries, batch, options = draw(length), draw(st.integers(1, 3)), {}
    keys = queries + draw(st.one_of(st.just(0), st.integers(1, 30), st.just(515)))
    layout = draw(st.sampled_from(["plain", "documents", "padded", "cache"]))
    if layout == "documents":
        batch, keys = 1, queries
        inner = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        options["cu_seqlens"] = int32(0, *inner, queries)
    if layout == "cache":
        ends = [draw(st.integers(queries, keys)) for _ in range(batch)]
        options["kv_end"] = int32(*ends)
    if layout in ("padded", "cache"):
        ends = options["kv_end"].tolist() if layout == "cache" else [keys] * batch
        options["kv_start"] = int32(*(draw(st.integers(0, end)) for end in ends))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 7, 128, 1000]))
    if draw(st.booleans()):
        options["scale"] = 0.3
    heads = draw(st.sampled_from([(1, 1, 1), (4, 4, 4), (4, 2, 1), (6, 2, 3), (4, 1, 4)]))
    head_dims = draw(st.sampled_from([(8, 8), (5, 3), (1, 7)]))
    gates = draw(st.sampled_from([None, -8.0, 1.0, 6.0]))
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (1.0, 0.0), (0.0, 1.0)]))
    shape = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "head_dims": head_dims}
    return {**shape, "gates": gates, "closed": closed, "open_": open_, "seed": draw(st.integers(0, 99))}, options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problem=problems())
def test_output_and_gradients_equal_the_definition(make_inputs, agree, dtype, problem):
    shape, options = problem
    agree(make_inputs(dtype=dtype, **shape), **options)


def test_many_key_chunks_join_as_one_softmax(make_inputs, agree):
    agree(make_inputs(queries=150, keys=1400, heads=(4, 2, 1), gates=7.0))


def test_short_batch_rows_taken_together_stay_apart(make_inputs, agree):
    starts = int32(0, 0, 0, 2, 2, 9, 0, 0)
    agree(make_inputs(batch=8, queries=9, heads=(4, 2, 1), closed=0.1), kv_start=starts)


def test_packed_documents_equal_the_same_documents_alone(make_inputs, assert_close, out_and_gradients):
    inputs, bounds = make_inputs(queries=290, heads=(4, 2, 1)), [0, 3, 3, 140, 141, 290, 290]
    packed = out_and_gradients(forgetting_attention, inputs, cu_seqlens=int32(*bounds))
    weight = torch.randn(packed["out"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for begin, end in pairwise(bounds):
        document = {name: x[:, begin:end].clone().requires_grad_() for name, x in inputs.items()}
        out = forgetting_attention(**document)
        gradients = torch.autograd.grad(out, list(document.values()), weight[:, begin:end])
        alone = {"out": out.detach(), **dict(zip(document, gradients, strict=True))}
        assert_close({name: x[:, begin:end] for name, x in packed.items()}, alone, 1e-12)


def test_the_first_gate_of_a_document_changes_nothing(make_inputs, assert_close, out_and_gradients):
    inputs, options = make_inputs(queries=20), {"cu_seqlens": int32(0, 7, 20)}
    before = out_and_gradients(forgetting_attention, inputs, **options)
    inputs["log_forget"][:, [0, 7]] = -torch.inf
    after = out_and_gradients(forgetting_attention, inputs, **options)
    assert_close(after, before, 1e-12)
    assert (before["log_forget"][:, [0, 7]] == 0).all()
    assert (after["log_forget"][:, [0, 7]] == 0).all()


def test_queries_of_left_padding_give_zero_and_take_no_gradient(make_inputs, out_and_gradients):
    results = out_and_gradients(forgetting_attention, make_inputs(batch=2, queries=10), kv_start=int32(4, 10))
    for x in results.values():
        assert (x[0, :4] == 0).all()
        assert (x[1] == 0).all()
    assert (results["log_forget"][0, 4] == 0).all()


def test_what_lies_outside_the_keys_in_use_does_not_matter_even_if_it_is_nan(make_inputs, out_and_gradients):
    inputs, options = make_inputs(batch=2, queries=3, keys=12), {"kv_start": int32(2, 0), "kv_end": int32(9, 7)}
    before = out_and_gradients(forgetting_attention, inputs, **options)
    for name in ("k", "v", "log_forget"):
        for row, (start, end) in enumerate([(2, 9), (0, 7)]):
            inputs[name][row, :start] = torch.nan
            inputs[name][row, end:] = torch.nan
    after = out_and_gradients(forgetting_attention, inputs, **options)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_closed_gate_is_the_limit_of_gates_that_close(make_inputs, assert_close, out_and_gradients):
    inputs = make_inputs(queries=30)
    inputs["log_forget"][:, 11] = -torch.inf
    closed = out_and_gradients(forgetting_attention, inputs)
    inputs["log_forget"][:, 11] = -80.0
    assert_close(out_and_gradients(forgetting_attention, inputs), closed, 1e-12)
    assert (closed["log_forget"][:, 11] == 0).all()


@pytest.mark.parametrize("gate", [-200.0, -1e4, torch.finfo(torch.float32).min], ids=str)
def test_gates_that_forget_all_but_everything_cost_the_others_no_precision(make_inputs, agree, gate):
    inputs = make_inputs(queries=300, heads=(2, 1, 1), dtype=torch.float32, gates=5.0)
    inputs["log_forget"][:, ::9] = gate
    agree(inputs)


def test_open_gates_are_plain_causal_attention(make_inputs, assert_close):
    inputs = make_inputs(batch=2, queries=40, open_=1.0)
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert_close({"out": forgetting_attention(**inputs)}, {"out": expected}, 1e-12)


def test_no_queries_and_no_rows_give_empty_results(make_inputs, out_and_gradients):
    for inputs in (make_inputs(queries=0), make_inputs(queries=0, keys=5), make_inputs(batch=0)):
        results = out_and_gradients(forgetting_attention, inputs)
        assert results["out"].numel() == 0
        assert all((x == 0).all() for x in results.values())


def test_inputs_of_any_strides_are_read_right_and_left_untouched(make_inputs, agree):
    inputs = make_inputs(batch=2, queries=7, heads=(1, 1, 1), head_dims=(6, 6), dtype=torch.float32)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    agree(strided)
    assert all(torch.equal(strided[name], inputs[name]) for name in inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_rounding_its_results(make_inputs, assert_close, out_and_gradients, dtype):
    inputs = make_inputs(queries=200, heads=(4, 2, 1), dtype=dtype)
    results = out_and_gradients(forgetting_attention, inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    assert results["out"].dtype == dtype
    assert results["log_forget"].dtype == torch.float32
    assert_close(results, out_and_gradients(forgetting_attention_reference, wide), 4 * torch.finfo(dtype).eps)
