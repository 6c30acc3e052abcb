"""lse, the log of the softmax's sum: its value and gradient, by every implementation."""

import os

import pytest
import torch

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.decode.kernel import forgetting_attention_decode
from kernels.forgetting_attention.triton.decay import give_rows_their_own, gradient_of_gates


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


SMALL = {"heads": (2, 1, 2), "head_dims": (16, 24)}
CASES = {
    "plain": ({"queries": 40, "gates": None}, {}),
    "gates": ({"queries": 70, "keys": 250, "gates": 1.0}, {}),
    "steep and closed gates": ({"queries": 131, "gates": -4.0, "closed": 0.1}, {}),
    "window of padded rows": ({"batch": 2, "queries": 40, "gates": None}, {"window": 7, "kv_start": int32(5, 40)}),
    "documents": (
        {"queries": 50, "gates": 3.0},
        {"cu_seqlens": int32(0, 1, 1, 20, 50), "window": 9, "scale": 0.4},
    ),
    "cache": (
        {"batch": 2, "queries": 20, "keys": 180, "gates": 0.5},
        {"kv_start": int32(3, 140), "kv_end": int32(141, 150), "cumulative": True},
    ),
}


@pytest.fixture(params=CASES)
def problem(request, make_inputs):
    """problem(dtype) -> inputs and options of one of the cases."""

    def make(dtype):
        shape, options = CASES[request.param]
        inputs = make_inputs(**{**SMALL, **shape}, dtype=dtype)
        if options.get("cumulative"):
            inputs["log_forget"] = inputs["log_forget"].cumsum(1)
        return inputs, {**options, "return_lse": True}

    return make


@pytest.fixture
def agree(assert_close, out_and_gradients):
    def check(function, inputs, options, tolerance):
        actual = out_and_gradients(function, inputs, **options)
        wide = {name: x.double() for name, x in inputs.items()}
        expected = out_and_gradients(forgetting_attention_reference, wide, **options)
        same_dtype = out_and_gradients(forgetting_attention_reference, inputs, **options)
        dtype = torch.promote_types(inputs["q"].dtype, torch.float32)
        assert (actual["out"].dtype, actual["lse"].dtype) == (inputs["q"].dtype, dtype)
        assert torch.equal(actual.pop("blind"), expected.pop("blind"))
        assert_close(actual, expected, tolerance, or_as_close_as=same_dtype)

    return check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_in_pytorch_it_and_all_gradients_equal_the_definition(problem, agree, dtype):
    agree(forgetting_attention, *problem(dtype), 1e-10 if dtype == torch.float64 else 2e-5)


def test_in_the_kernels_it_and_all_gradients_equal_the_definition(problem, agree, triton_forgetting_attention):
    agree(triton_forgetting_attention, *problem(torch.float32), 1e-4)


@pytest.mark.parametrize("problem", ["gates", "documents"], indirect=True)
def test_in_half_precision_lse_stays_float32(problem, agree, triton_forgetting_attention):
    agree(triton_forgetting_attention, *problem(torch.float16), 4e-3)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("case", ["gates", "window of padded rows", "cache"])
def test_decoding_gives_the_same(make_inputs, assert_close, device, case, num_splits):
    shape, options = CASES[case]
    inputs = make_inputs(**{**SMALL, **shape, "queries": 5, "dtype": torch.float32})
    expected = forgetting_attention_reference(**inputs, **options, return_lse=True)
    tensors = [None if x is None else x.to(device) for x in (*inputs.values(), *[None] * (len(inputs) == 3))]
    bounds = [options[name].to(device) if name in options else None for name in ("kv_start", "kv_end")]
    rest = (16**-0.5, options.get("window"), options.get("cumulative", False), num_splits)
    out, lse = (x.cpu() for x in forgetting_attention_decode(*tensors, *bounds, *rest, True))
    assert torch.equal(lse == -torch.inf, expected[1] == -torch.inf)
    names = ("out", "sum")
    expected, actual = (dict(zip(names, (x[0], x[1].exp()), strict=True)) for x in (expected, (out, lse)))
    assert_close(actual, expected, 5e-6)


@pytest.mark.parametrize("way", ["pytorch", "kernels"])
def test_a_loss_of_lse_alone_needs_no_gradient_of_the_output(
    make_inputs, assert_close, triton_forgetting_attention, way
):
    function = forgetting_attention if way == "pytorch" else triton_forgetting_attention
    inputs = make_inputs(queries=20, **SMALL, dtype=torch.float32)

    def gradients(function):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        function(**leaves, return_lse=True)[1].square().sum().backward()
        return {name: leaves[name].grad for name in ("q", "k", "log_forget")}

    assert_close(gradients(function), gradients(forgetting_attention_reference), 2e-5)


def test_softmax_over_two_parts_of_the_keys_is_softmax_over_all(make_inputs, assert_close):
    inputs = make_inputs(queries=30, heads=(2, 2, 2), gates=None)
    leaves = [x.requires_grad_() for x in inputs.values()]
    (near, near_lse), whole = forgetting_attention(**inputs, window=6, return_lse=True), forgetting_attention(**inputs)
    # The keys before the window: those of queries that end 6 tokens earlier.
    q, k, v = leaves
    far, far_lse = forgetting_attention(q[:, 6:], k[:, :-6], v[:, :-6], return_lse=True)
    share = torch.sigmoid(far_lse - near_lse[:, 6:])[..., None]
    joined = torch.cat((near[:, :6], share * far + (1 - share) * near[:, 6:]), dim=1)
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = [dict(zip("qkv", torch.autograd.grad(x, leaves, weight), strict=True)) for x in (joined, whole)]
    assert_close({"out": joined, **found[0]}, {"out": whole, **found[1]}, 1e-10)


def test_sums_of_groups_of_queries_and_of_each_give_the_same_gradient_of_gates(make_inputs, assert_close, device):
    """A kernel that sums the rows of dS by groups shares what it finds evenly, which dlse is not."""
    queries, keys, heads, together = 100, 150, 2, 64
    generator = torch.Generator().manual_seed(0)
    gates = make_inputs(queries=keys, heads=(heads, 1, 1), dtype=torch.float32)["log_forget"].to(device)
    grad_lse = torch.randn(1, queries, heads, generator=generator).to(device)
    lse = torch.zeros(1, heads, 128, device=device)
    lse[:, :, 7] = torch.inf
    grad_keys = torch.randn(1, heads, 256, generator=generator).to(device)
    own = grad_lse.mT.masked_fill(lse[..., :queries] == torch.inf, 0.0)
    each = own.unsqueeze(-1)
    of_groups = torch.zeros(1, heads, -(-queries // together), 16, device=device)
    for query in range(queries):
        of_groups[:, :, query // together, query % 16] += own[:, :, query]
    rest = (None, None, None, queries, False)
    expected = gradient_of_gates(gates, grad_keys.clone(), each, 1, *rest)
    grad_lse[:, 7] = torch.nan
    give_rows_their_own(grad_keys, of_groups, grad_lse, lse, keys, together)
    assert_close({"gates": gradient_of_gates(gates, grad_keys, of_groups, together, *rest)}, {"gates": expected}, 1e-5)


def test_not_asked_for_it_costs_no_kernel_and_no_memory(make_inputs, device, monkeypatch):
    from kernels.forgetting_attention import operator as triton_operator
    from kernels.forgetting_attention.triton import backward as triton_backward
    from kernels.forgetting_attention.triton import forward as triton_forward

    inputs = [x.to(device).requires_grad_() for x in make_inputs(queries=9, **SMALL, dtype=torch.float32).values()]
    given = []
    backward = triton_backward.backward
    monkeypatch.setattr(triton_forward, "natural_lse", None)
    monkeypatch.setattr(
        triton_backward, "backward", lambda *args, **options: given.append(args[-1]) or backward(*args, **options)
    )
    out, *_, lse = triton_operator.triton_attention(*inputs, None, None, None, None, 0.25, None, False, None, None)
    out.sum().backward()
    assert lse.numel() == 0
    assert given == [None]
