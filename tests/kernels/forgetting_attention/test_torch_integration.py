"""torch.compile, opcheck, autocast, checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


OPTIONS = {
    "plain": {},
    "documents": {"cu_seqlens": int32(0, 4, 4, 12), "return_lse": True},
    "window": {"window": 3, "scale": 0.2},
    "cache": {"kv_start": int32(2), "kv_end": int32(12), "cumulative": True, "return_lse": True},
    "pruned": {"prune": -3.0},
    "bounded": {"prune": -3.0, "logit_bound": 2.0},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compiles_without_a_graph_break(make_inputs, assert_close, out_and_gradients, options, backend):
    torch.compiler.reset()
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend=backend)
    inputs = make_inputs(queries=12, heads=(4, 2, 1), dtype=torch.float32)
    expected = out_and_gradients(forgetting_attention, inputs, **options)
    assert_close(out_and_gradients(compiled, inputs, **options), expected, 1e-6)


def test_compiled_once_it_serves_other_lengths(make_inputs, assert_close, out_and_gradients):
    torch.compiler.reset()
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries in (5, 130, 9):
        inputs = make_inputs(batch=2, queries=queries, dtype=torch.float32)
        expected = out_and_gradients(forgetting_attention, inputs)
        assert_close(out_and_gradients(compiled, inputs), expected, 1e-6)


@pytest.mark.parametrize("gates", [1.0, None], ids=["gates", "no gates"])
def test_the_operations_pass_opcheck(make_inputs, gates):
    inputs = make_inputs(queries=6, heads=(4, 2, 1), head_dims=(4, 3), dtype=torch.float32, gates=gates)
    leaves = [x.requires_grad_() for x in inputs.values()] + [None] * (gates is None)
    rest, return_lse = (int32(0, 2, 6), None, None, None, 0.5, None, False), gates is not None
    torch.library.opcheck(torch.ops.palimpsest.forgetting_attention_chunked.default, (*leaves, *rest, return_lse))
    plain = [x if x is None else x.detach() for x in leaves]
    out, sums, lse = torch.ops.palimpsest.forgetting_attention_chunked(*plain, *rest, return_lse)
    backward = torch.ops.palimpsest.forgetting_attention_chunked_backward.default
    torch.library.opcheck(backward, (out, *plain, out, sums, *rest, lse if return_lse else None))


def test_gradients_agree_with_finite_differences(make_inputs):
    inputs = [x.requires_grad_() for x in make_inputs(queries=5, keys=6, heads=(2, 1, 2)).values()]
    inputs[3].data.sub_(0.1)
    assert torch.autograd.gradcheck(forgetting_attention, inputs)


def test_under_autocast_gates_stay_float32(make_inputs, assert_close):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(queries=20, dtype=torch.float32).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = (inputs[name] @ torch.eye(4) for name in "qkv")
        out = forgetting_attention(q, k, v, inputs["log_forget"])
    assert q.dtype == out.dtype == torch.bfloat16
    out.float().sum().backward()
    expected = forgetting_attention_reference(*(x.detach() for x in inputs.values()))
    assert_close({"out": out}, {"out": expected}, 1e-2)
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in inputs.values())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(make_inputs, out_and_gradients, use_reentrant):
    inputs = make_inputs(batch=2, queries=130, dtype=torch.float32)

    def checkpointed(q, k, v, log_forget):
        return checkpoint(forgetting_attention, q, k, v, log_forget, use_reentrant=use_reentrant)

    # Reentrant checkpointing works through backward() only.
    def backward(function):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        function(**leaves).square().sum().backward()
        return [x.grad for x in leaves.values()]

    for actual, expected in zip(backward(checkpointed), backward(forgetting_attention), strict=True):
        assert torch.equal(actual, expected)


def test_the_same_call_gives_the_same_bits(make_inputs, out_and_gradients):
    inputs = make_inputs(batch=2, queries=300, heads=(4, 2, 1), dtype=torch.float32)
    first, second = (out_and_gradients(forgetting_attention, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_asks_for_a_gradient_gets_one(make_inputs):
    inputs = make_inputs(queries=5)
    inputs["v"].requires_grad_()
    forgetting_attention(**inputs).sum().backward()
    assert inputs["v"].grad is not None
    assert inputs["q"].grad is None
    assert inputs["log_forget"].grad is None
    with torch.inference_mode():
        assert not forgetting_attention(**inputs).requires_grad
