"""The Triton kernels against the reference: compiled on a GPU, elsewhere in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.operator import triton_attention
from kernels.forgetting_attention.triton.configs import select

# The interpreter's products of bfloat16 are wrong.
HALVES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tolerance(inputs):
    """Return four roundings in half precision."""
    dtype = inputs["q"].dtype
    return 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


@pytest.fixture(scope="session")
def agree(assert_close, out_and_gradients, triton_forgetting_attention):
    def check(inputs, **options):
        actual = out_and_gradients(triton_forgetting_attention, inputs, **options)
        wide = {name: x.double() for name, x in inputs.items()}
        expected = out_and_gradients(forgetting_attention_reference, wide, **options)
        same_dtype = out_and_gradients(forgetting_attention_reference, inputs, **options)
        assert_close(actual, expected, tolerance(inputs), or_as_close_as=same_dtype)

    return check


@st.composite
def problems(draw, gates):
    """Draw consistent sizes and options; lengths on both sides of a tile, a grain and a chunk."""
    heads = draw(st.sampled_from([(1, 1, 1), (2, 2, 2), (4, 2, 1), (6, 2, 3), (4, 1, 4)]))
    long = [63, 64, 65, 127, 128, 129] if heads[0] < 4 else [33]
    queries = draw(st.one_of(st.integers(1, 32), st.sampled_from(long)))
    keys = queries + draw(st.one_of(st.just(0), st.integers(1, 70), st.sampled_from([32, 64, 128])))
    batch, options = draw(st.integers(1, 2)), {}
    layout = draw(st.sampled_from(["plain", "documents", "padded", "cache"]))
    if layout == "documents":
        batch, keys = 1, queries
        inner = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        options["cu_seqlens"] = int32(0, *inner, queries)
    if layout == "cache":
        options["kv_end"] = int32(*(draw(st.integers(queries, keys)) for _ in range(batch)))
    if layout in ("padded", "cache"):
        ends = options["kv_end"].tolist() if layout == "cache" else [keys] * batch
        options["kv_start"] = int32(*(draw(st.one_of(st.integers(0, end), st.just(end))) for end in ends))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 7, 32, 128, 2**40]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, -0.4, 0.0]))
    head_dims = draw(st.sampled_from([(16, 16), (20, 24), (32, 16), (5, 3)]))
    gates = draw(st.sampled_from(gates))
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (0.0, 1.0)]))
    if gates is not None and closed == 0.0:
        options["cumulative"] = draw(st.booleans())
    shape = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "head_dims": head_dims}
    return {**shape, "gates": gates, "closed": closed, "open_": open_, "seed": draw(st.integers(0, 99))}, options


def solve(make_inputs, agree, problem, dtype):
    shape, options = problem
    inputs = make_inputs(dtype=dtype, **shape)
    if options.get("cumulative"):
        inputs["log_forget"] = inputs["log_forget"].cumsum(1)
    agree(inputs, **options)


@pytest.mark.long
@settings(max_examples=32, deadline=None, derandomize=True)
@given(problem=problems(gates=[None, -8.0, 1.0, 6.0]))
def test_output_and_gradients_equal_the_definition(make_inputs, agree, problem):
    solve(make_inputs, agree, problem, torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
# Under gates near 0 a query sees little but itself, and gradients of q and k are what rounding leaves of differences.
@given(problem=problems(gates=[None, 1.0, 6.0]))
def test_half_precision_is_as_close_as_rounding_its_results(make_inputs, agree, dtype, problem):
    solve(make_inputs, agree, problem, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (100, 72), (256, 256)], ids=str)
def test_head_dims_of_every_table_row_equal_the_definition(make_inputs, agree, dtype, head_dims):
    agree(make_inputs(queries=150, heads=(2, 1, 2), head_dims=head_dims, dtype=dtype, gates=3.0), window=140)


def test_keys_shared_by_eight_heads_gather_all_their_gradients(make_inputs, agree):
    agree(make_inputs(queries=40, heads=(8, 1, 1), head_dims=(16, 16), dtype=torch.float32))


@pytest.mark.parametrize("keys", [33, 97, 160, 190])
def test_queries_that_begin_anywhere_among_the_keys_equal_the_definition(make_inputs, agree, keys):
    agree(make_inputs(queries=33, keys=keys, heads=(1, 1, 1), head_dims=(16, 16), dtype=torch.float32), window=50)


def test_documents_of_no_and_of_one_token_equal_the_definition(make_inputs, agree):
    bounds = int32(0, 0, 1, 2, 2, 34, 35, 64, 65, 128, 129, 130, 130)
    inputs = make_inputs(queries=130, heads=(2, 1, 1), head_dims=(16, 16), dtype=torch.float32)
    agree(inputs, cu_seqlens=bounds)
    agree({name: inputs[name] for name in "qkv"}, cu_seqlens=bounds)


@pytest.mark.parametrize("gate", [-200.0, -1e4, torch.finfo(torch.float32).min], ids=str)
def test_a_gate_that_forgets_all_costs_no_more_than_its_size_says(make_inputs, agree, gate):
    inputs = make_inputs(queries=140, heads=(1, 1, 1), head_dims=(16, 16), dtype=torch.float32, gates=5.0)
    inputs["log_forget"][:, 40::60] = gate
    agree(inputs)


@pytest.mark.parametrize("every", [3, 60])
def test_nearly_closed_gates_take_no_digits_from_the_others(
    make_inputs, assert_close, out_and_gradients, triton_forgetting_attention, every
):
    inputs = make_inputs(queries=140, heads=(1, 1, 1), head_dims=(16, 16), dtype=torch.float32, gates=5.0)
    inputs["log_forget"][:, ::every] = -300.0
    actual = out_and_gradients(triton_forgetting_attention, inputs, return_lse=True)
    wide = {name: x.double() for name, x in inputs.items()}
    assert_close(actual, out_and_gradients(forgetting_attention_reference, wide, return_lse=True), 2e-6)


def test_where_every_gate_is_closed_a_query_sees_itself_alone(
    make_inputs, out_and_gradients, triton_forgetting_attention
):
    inputs = make_inputs(queries=70, heads=(2, 1, 2), head_dims=(16, 16), dtype=torch.float32, closed=1.0)
    results = out_and_gradients(triton_forgetting_attention, inputs)
    assert torch.equal(results["out"], inputs["v"])
    assert (results["log_forget"] == 0).all()
    # Nothing but the rounding of dO . (v - o).
    assert results["q"].abs().max() < 1e-5
    assert results["k"].abs().max() < 1e-5


def test_the_first_gate_of_a_document_changes_nothing(make_inputs, out_and_gradients, triton_forgetting_attention):
    inputs, options = make_inputs(queries=40, dtype=torch.float32), {"cu_seqlens": int32(0, 7, 40)}
    before = out_and_gradients(triton_forgetting_attention, inputs, **options)
    inputs["log_forget"][:, [0, 7]] = -torch.inf
    after = out_and_gradients(triton_forgetting_attention, inputs, **options)
    assert torch.allclose(after["out"], before["out"], atol=1e-6)
    for results in (before, after):
        assert (results["log_forget"][:, [0, 7]] == 0).all()


def test_queries_of_left_padding_give_zero_and_take_no_gradient(
    make_inputs, out_and_gradients, triton_forgetting_attention
):
    inputs = make_inputs(batch=2, queries=70, dtype=torch.float32)
    results = out_and_gradients(triton_forgetting_attention, inputs, kv_start=int32(40, 70))
    for x in results.values():
        assert (x[0, :40] == 0).all()
        assert (x[1] == 0).all()
    assert (results["log_forget"][0, 40] == 0).all()
    assert (results["out"][0, 40:] != 0).all()


@pytest.mark.parametrize("cumulative", [False, True])
def test_what_lies_outside_the_keys_in_use_does_not_matter_even_if_it_is_nan(
    make_inputs, out_and_gradients, triton_forgetting_attention, cumulative
):
    inputs = make_inputs(batch=2, queries=35, keys=150, head_dims=(16, 20), dtype=torch.float32)
    options = {"kv_start": int32(3, 70), "kv_end": int32(41, 140), "cumulative": cumulative}
    before = out_and_gradients(triton_forgetting_attention, inputs, **options)
    for name in ("k", "v", "log_forget"):
        for row, (start, end) in enumerate([(3, 41), (70, 140)]):
            inputs[name][row, :start] = torch.nan
            inputs[name][row, end:] = torch.nan
    after = out_and_gradients(triton_forgetting_attention, inputs, **options)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(x.isfinite().all() for x in after.values())


def test_no_queries_and_no_rows_give_empty_results(make_inputs, out_and_gradients, triton_forgetting_attention):
    for inputs in (make_inputs(queries=0), make_inputs(queries=0, keys=5), make_inputs(batch=0)):
        inputs = {name: x.float() for name, x in inputs.items()}
        results = out_and_gradients(triton_forgetting_attention, inputs)
        assert results["out"].numel() == 0
        assert all((x == 0).all() for x in results.values())


@pytest.mark.parametrize("layout", ["heads first", "last axis not together", "not aligned", "heads expanded"])
def test_inputs_of_any_strides_are_read_right_and_left_untouched(make_inputs, agree, layout):
    inputs = make_inputs(batch=2, queries=35, heads=(2, 2, 2), head_dims=(16, 16), dtype=torch.float32)
    change = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last axis not together": lambda x: x.mT.contiguous().mT,
        "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        "heads expanded": lambda x: x[:, :, :1].expand_as(x),
    }[layout]
    strided = {name: change(x) for name, x in inputs.items()}
    kept = {name: x.clone() for name, x in strided.items()}
    agree(strided)
    assert all(torch.equal(strided[name], kept[name]) for name in kept)


@pytest.mark.parametrize("gates", [6.0, 0.0], ids=["gentle", "even"])
def test_the_last_queries_of_a_long_sequence_are_as_exact_as_the_first(
    make_inputs, assert_close, out_and_gradients, triton_forgetting_attention, device, gates
):
    """A float32 sum over 128k gates of -0.8 is spaced 0.008; a logit must not be."""
    keys = 131_072 if device.type == "cuda" else 8192
    inputs = make_inputs(queries=16, keys=keys, heads=(1, 1, 1), head_dims=(16, 16), dtype=torch.float32, gates=gates)
    actual = out_and_gradients(triton_forgetting_attention, inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = out_and_gradients(forgetting_attention_reference, wide)
    of_gates = actual.pop("log_forget"), expected.pop("log_forget")
    assert_close(actual, expected, tolerance(inputs))
    # What rounding leaves of a sum that should vanish is carried to every earlier gate: measured gate by gate.
    assert (of_gates[0] - of_gates[1]).abs().max() <= tolerance(inputs) * of_gates[1].abs().max()


def test_gradients_of_gates_do_not_gather_rounding_over_packed_documents(
    make_inputs, assert_close, out_and_gradients, triton_forgetting_attention
):
    inputs = make_inputs(queries=1500, heads=(1, 1, 1), head_dims=(16, 16), dtype=torch.float32, gates=4.0)
    bounds = torch.arange(0, 1501, 60, dtype=torch.int32)
    packed = out_and_gradients(triton_forgetting_attention, inputs, cu_seqlens=bounds)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = out_and_gradients(forgetting_attention_reference, wide, cu_seqlens=bounds)
    assert_close(packed, expected, 5e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_row_sums_cancel_what_a_rounded_output_leaves_in_the_gradient_of_gates(
    make_inputs, assert_close, out_and_gradients, triton_forgetting_attention, dtype
):
    inputs = make_inputs(queries=700, heads=(1, 1, 1), head_dims=(16, 16), dtype=dtype, gates=5.0)
    actual = out_and_gradients(triton_forgetting_attention, inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = out_and_gradients(forgetting_attention_reference, wide)
    assert_close(actual, expected, torch.finfo(dtype).eps)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_deterministic_algorithms_give_the_same_bits(
    make_inputs, out_and_gradients, triton_forgetting_attention, dtype
):
    inputs = make_inputs(queries=130, heads=(2, 1, 1), head_dims=(16, 16), dtype=dtype)
    first, second = (out_and_gradients(triton_forgetting_attention, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def arguments(inputs, device, *bounds, window=None, cumulative=False, prune=None, return_lse=False):
    """Return the operation's arguments on the device: q, k, v, gates, three kinds of bounds and the rest."""
    tensors = [inputs[name].to(device) for name in "qkv"]
    gates = inputs["log_forget"].to(device) if "log_forget" in inputs else None
    bounds = [None if x is None else x.to(device) for x in bounds]
    return (*tensors, gates, *bounds, None, 0.5, window, cumulative, prune, None, return_lse)


LAYOUTS = {
    "plain without gates": (None, (None, None, None), {}),
    "documents": (1.0, (int32(0, 2, 9), None, None), {}),
    "cache": (1.0, (None, int32(1), int32(9)), {"cumulative": True, "return_lse": True}),
    "pruned window": (1.0, (None, None, None), {"window": 4, "prune": -3.0, "return_lse": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operations_pass_opcheck(make_inputs, device, layout):
    gates, bounds, options = LAYOUTS[layout]
    inputs = make_inputs(queries=9, heads=(2, 1, 1), head_dims=(16, 5), dtype=torch.float32, gates=gates)
    plain = arguments(inputs, device, *bounds, **options)
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in plain]
    torch.library.opcheck(torch.ops.palimpsest.forgetting_attention_triton.default, tuple(leaves))
    *results, lse = torch.ops.palimpsest.forgetting_attention_triton(*plain)
    q, k, v, log_forget, cu_seqlens, kv_start, kv_end, _, scale, _, cumulative, *_ = plain
    backward = torch.ops.palimpsest.forgetting_attention_triton_backward.default
    saved = (q, k, v, log_forget, *results, cu_seqlens, kv_start, kv_end)
    torch.library.opcheck(backward, (results[0], *saved, scale, cumulative, lse if lse.numel() else None))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_without_a_graph_break(make_inputs, assert_close, device, layout):
    torch.compiler.reset()
    gates, bounds, options = LAYOUTS[layout]
    inputs = make_inputs(queries=9, heads=(2, 1, 1), head_dims=(16, 5), dtype=torch.float32, gates=gates)
    plain = arguments(inputs, device, *bounds, **options)

    def loss(*args):
        out, *_, lse = triton_attention(*args)
        return out.square().sum() + (lse.square().sum() if lse.numel() else 0.0)

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in plain[: len(inputs)]]
        result = function(*leaves, *plain[len(inputs) :])
        return dict(zip(inputs, torch.autograd.grad(result, leaves), strict=True))

    assert_close(
        gradients(torch.compile(loss, fullgraph=True, backend="aot_eager")),
        gradients(loss),
        1e-6,
    )


def test_under_autocast_gates_stay_float32(make_inputs, assert_close, device, triton_forgetting_attention):
    inputs = make_inputs(queries=20, head_dims=(16, 16), dtype=torch.float32)
    leaves = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, dtype=HALVES[-1]):
        q, k, v = (leaves[name] @ torch.eye(16, device=device) for name in "qkv")
        out = triton_forgetting_attention(q, k, v, leaves["log_forget"])
    assert q.dtype == out.dtype == HALVES[-1]
    out.float().sum().backward()
    expected = forgetting_attention_reference(**inputs)
    assert_close({"out": out.detach().cpu()}, {"out": expected}, 1e-2)
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in leaves.values())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(make_inputs, triton_forgetting_attention, use_reentrant):
    inputs = make_inputs(batch=2, queries=40, dtype=torch.float32)

    def checkpointed(q, k, v, log_forget):
        return checkpoint(triton_forgetting_attention, q, k, v, log_forget, use_reentrant=use_reentrant)

    # Reentrant checkpointing works through backward() only.
    def backward(function):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        function(**leaves).square().sum().backward()
        return [x.grad for x in leaves.values()]

    for actual, expected in zip(backward(checkpointed), backward(triton_forgetting_attention), strict=True):
        assert torch.equal(actual, expected)


def test_only_what_asks_for_a_gradient_gets_one(make_inputs, triton_forgetting_attention):
    inputs = make_inputs(queries=5, dtype=torch.float32)
    inputs["v"].requires_grad_()
    triton_forgetting_attention(**inputs).sum().backward()
    assert inputs["v"].grad is not None
    assert inputs["q"].grad is None
    assert inputs["log_forget"].grad is None
    with torch.inference_mode():
        assert not triton_forgetting_attention(**inputs).requires_grad


def test_head_dims_beyond_the_table_are_refused_in_one_line():
    x = torch.zeros(1, 1, 1, 257, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"head_dim 257.*up to 256") as refusal:
        select("forward", x, x)
    assert "\n" not in str(refusal.value)
