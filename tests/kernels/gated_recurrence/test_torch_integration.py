"""torch.compile, opcheck, autocast, checkpointing."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kernels import gated_recurrence, gated_recurrence_step, gated_slot_attention
from kernels.gated_recurrence import gated_recurrence_reference

FORMS = ["key", "value", "head"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# What make_inputs is given, and the options of the call.
CASES = {
    "plain": ({"batch": 2}, {}),
    "no state": ({"states": 0}, {"scale": 0.2}),
    "documents": ({"states": 3}, {"cu_seqlens": int32(0, 4, 4, 12)}),
    "values decay": ({"form": "value"}, {"decay_axis": "value"}),
    "gates of heads": ({"form": "head"}, {"memory_budget": 0}),
    "bonus": ({"bonus": True}, {}),
    "bonus of documents": ({"bonus": True, "states": 3}, {"cu_seqlens": int32(0, 4, 12, 12)}),
}


def slot_attention(q, k, v, slots, log_decay):
    return gated_slot_attention(q, k, v, slots, log_decay, scale=0.5)


@pytest.fixture
def slot_inputs(make_inputs):
    inputs = make_inputs(2, 12, (4, 2), form="value", states=0, dtype=torch.float32)
    return {**inputs, "slots": inputs["v"], "v": inputs["v"].flip(-1)}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_a_graph_break(make_inputs, assert_close, out_and_gradients, case, backend):
    torch.compiler.reset()
    sizes, options = CASES[case]
    compiled = torch.compile(gated_recurrence, fullgraph=True, backend=backend)
    inputs = make_inputs(**{"length": 12, "heads": (4, 2), "dtype": torch.float32, **sizes})
    expected = out_and_gradients(gated_recurrence, inputs, **options)
    assert_close(out_and_gradients(compiled, inputs, **options), expected, 1e-6)


def test_slot_attention_compiles_without_a_graph_break(slot_inputs, assert_close, out_and_gradients):
    torch.compiler.reset()
    compiled = torch.compile(slot_attention, fullgraph=True, backend="aot_eager")
    expected = out_and_gradients(slot_attention, slot_inputs)
    assert_close(out_and_gradients(compiled, slot_inputs), expected, 1e-6)


@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
def test_a_compiled_step_updates_the_state_in_place(make_inputs, bonus):
    torch.compiler.reset()
    inputs = make_inputs(2, 1, (4, 2), dtype=torch.float32, bonus=bonus)
    state = inputs.pop("initial_state")
    compiled_state = state.clone()
    out = gated_recurrence_step(**inputs, state=state)
    compiled = torch.compile(gated_recurrence_step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**inputs, state=compiled_state), out)
    assert torch.equal(compiled_state, state)


def test_compiled_once_it_serves_other_lengths(make_inputs, assert_close, out_and_gradients):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated_recurrence, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for length in (5, 130, 9):
        inputs = make_inputs(2, length, dtype=torch.float32, bonus=True)
        expected = out_and_gradients(gated_recurrence, inputs)
        assert_close(out_and_gradients(compiled, inputs), expected, 1e-6)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("states", [3, 0], ids=["a state", "no state"])
@pytest.mark.parametrize("form", FORMS)
def test_the_operations_pass_opcheck(make_inputs, form, states):
    inputs = make_inputs(1, 6, (4, 2), (4, 3), form=form, states=states, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs.values()] + [None] * (states == 0)
    rest = (int32(0, 2, 2, 6), "value" if form == "value" else "key", 0.5)
    torch.library.opcheck(torch.ops.palimpsest.gated_recurrence_chunked.default, (*leaves, *rest))
    plain = [x if x is None else x.detach() for x in leaves]
    out, final = torch.ops.palimpsest.gated_recurrence_chunked(*plain, *rest)
    backward = torch.ops.palimpsest.gated_recurrence_chunked_backward.default
    torch.library.opcheck(backward, (out, final, *plain, *rest))


def test_the_step_passes_opcheck(make_inputs):
    inputs = make_inputs(1, 3, (4, 2), dtype=torch.float32, bonus=True)
    bonus = inputs.pop("bonus")
    step = torch.ops.palimpsest.gated_recurrence_step.default
    torch.library.opcheck(step, (*inputs.values(), "key", 0.5, bonus))
    torch.library.opcheck(step, (*inputs.values(), "key", 0.5, None))


def test_under_autocast_results_have_the_dtype_of_q_and_gates_stay_float32(make_inputs, out_and_gradients):
    inputs = make_inputs(1, 20, (2, 2), (4, 4), dtype=torch.float32)
    rounded = {name: x.bfloat16() if name in ("q", "k", "v") else x for name, x in inputs.items()}
    expected, state = gated_recurrence(**rounded)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = (leaves[name] @ torch.eye(4) for name in "qkv")
        out, final = gated_recurrence(q, k, v, leaves["log_decay"], initial_state=leaves["initial_state"])
    assert q.dtype == out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(final, state)
    (out.float().sum() + final.sum()).backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in leaves.values())


def test_slot_attention_under_autocast_has_the_dtype_of_q(slot_inputs):
    low = {name: x if name == "log_decay" else x.bfloat16() for name, x in slot_inputs.items()}
    expected, _ = slot_attention(**low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = slot_attention(**low)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("function", [gated_recurrence, slot_attention], ids=["recurrence", "slots"])
def test_checkpointing_changes_no_bit(make_inputs, slot_inputs, function, use_reentrant):
    inputs = slot_inputs if function is slot_attention else make_inputs(2, 130, states=0, dtype=torch.float32)

    def checkpointed(*values):
        return checkpoint(lambda *leaves: function(**dict(zip(inputs, leaves, strict=True)))[0], *values, **options)

    # Reentrant checkpointing works through backward() only.
    def backward(run):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        run(*leaves).square().sum().backward()
        return [x.grad for x in leaves]

    options = {"use_reentrant": use_reentrant}
    plain = backward(lambda *leaves: function(**dict(zip(inputs, leaves, strict=True)))[0])
    assert all(torch.equal(x, y) for x, y in zip(backward(checkpointed), plain, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_call_gives_the_same_bits(make_inputs, out_and_gradients, form):
    inputs = make_inputs(2, 200, (4, 2), form=form, dtype=torch.float32)
    options = {"decay_axis": "value" if form == "value" else "key"}
    first, second = (out_and_gradients(gated_recurrence, inputs, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_asks_for_a_gradient_gets_one(make_inputs):
    inputs = make_inputs(1, 5)
    inputs["v"].requires_grad_()
    gated_recurrence(**inputs)[0].sum().backward()
    assert inputs["v"].grad is not None
    assert all(x.grad is None for name, x in inputs.items() if name != "v")
    with torch.inference_mode():
        assert not gated_recurrence(**inputs)[0].requires_grad


@pytest.mark.parametrize("result", [0, 1], ids=["out", "final state"])
def test_either_result_alone_gives_gradients(make_inputs, assert_close, result):
    gradients = []
    for function in (gated_recurrence, gated_recurrence_reference):
        leaves = {name: x.requires_grad_() for name, x in make_inputs(2, 70).items()}
        function(**leaves)[result].square().sum().backward()
        # The final state does not depend on q: no gradient, or one of 0.
        gradients.append({n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()})
    assert_close(*gradients, 1e-12)


def test_a_step_makes_no_graph(make_inputs):
    inputs = make_inputs(1, 1)
    state = inputs.pop("initial_state")
    inputs["q"].requires_grad_()
    assert not gated_recurrence_step(**inputs, state=state).requires_grad
