"""The Triton kernels of the recurrence under opcheck, torch.compile, autocast and checkpointing; on a GPU, elsewhere in
Triton's interpreter."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kernels.gated_recurrence.operator import triton_recurrence

FORMS = ["key", "value", "head"]
# The interpreter's products of bfloat16 are wrong.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# What make_inputs is given, the documents, and the budget.
CASES = {
    "gates of keys": ({"form": "key"}, None, None),
    "gates of values": ({"form": "value"}, None, 10**9),
    "gates of heads": ({"form": "head"}, None, 0),
    # Nothing kept: of what is kept for documents, opcheck would compare lines that no chunk has and nobody reads.
    "documents": ({"form": "key", "states": 3}, (0, 4, 4, 12), 0),
    "no state": ({"form": "value", "states": 0}, (0, 5, 12), 0),
}


@pytest.fixture
def arguments(make_inputs, device):
    """arguments(case, length) -> q, k, v, log_decay and initial_state, or None for it; and the other arguments."""

    def make(case, length=12, dtype=torch.float32):
        sizes, bounds, memory_budget = CASES[case]
        inputs = make_inputs(1, length, (4, 2), (16, 5), dtype=dtype, **sizes)
        leaves = [inputs.get(name) for name in ("q", "k", "v", "log_decay", "initial_state")]
        leaves = [None if x is None else x.to(device) for x in leaves]
        bounds = None if bounds is None else int32(*bounds).to(device)
        return leaves, (bounds, "value" if sizes["form"] == "value" else "key", 0.5, memory_budget)

    return make


def results_of(function, leaves, rest):
    """Return out, the final state and the gradients of one fixed loss."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
    out, final, *_ = function(*leaves, *rest)
    (out.square().sum() + final.square().sum()).backward()
    return [out.detach(), final.detach(), *(x.grad for x in leaves if x is not None)]


@pytest.mark.parametrize("case", CASES)
def test_the_operations_pass_opcheck(arguments, case):
    leaves, rest = arguments(case)
    wanting = [None if x is None else x.clone().requires_grad_() for x in leaves]
    torch.library.opcheck(torch.ops.palimpsest.gated_recurrence_triton.default, (*wanting, *rest))
    out, final, *kept = torch.ops.palimpsest.gated_recurrence_triton(*leaves, *rest)
    backward = torch.ops.palimpsest.gated_recurrence_triton_backward.default
    for grads in ((out, final), (out, None), (None, final)):
        torch.library.opcheck(backward, (*grads, *leaves, rest[0], *kept, *rest[1:3]))


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_a_graph_break(arguments, case):
    torch.compiler.reset()
    leaves, rest = arguments(case)
    compiled = torch.compile(triton_recurrence, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        results_of(compiled, leaves, rest), results_of(triton_recurrence, leaves, rest), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", ["gates of keys", "gates of values", "gates of heads"])
def test_compiled_once_it_serves_other_lengths(arguments, case):
    torch.compiler.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(triton_recurrence, fullgraph=True, backend=counter, dynamic=True)
    for length in (70, 200, 130):
        leaves, rest = arguments(case, length)
        rest = (*rest[:3], 10**9)
        for actual, expected in zip(
            results_of(compiled, leaves, rest), results_of(triton_recurrence, leaves, rest), strict=True
        ):
            assert torch.equal(actual, expected)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_results_have_the_dtype_of_q_and_gates_stay_float32(arguments, device, form):
    (q, k, v, log_decay, state), rest = arguments(f"gates of {form}s", 70)
    expected, expected_state, *_ = triton_recurrence(*(x.to(HALF) for x in (q, k, v)), log_decay, state, *rest)
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay, state)]
    with torch.autocast(device.type, dtype=HALF):
        projected = (x @ torch.eye(x.shape[-1], device=device) for x in (q, k, v))
        out, final, *_ = triton_recurrence(*projected, log_decay, state, *rest)
        assert out.dtype == HALF
        loss = out.float().sum() + final.sum()
    loss.backward()
    assert torch.equal(out, expected)
    assert torch.equal(final, expected_state)
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_changes_no_bit(arguments, form, use_reentrant):
    leaves, rest = arguments(f"gates of {form}s", 130)

    def checkpointed(*inputs):
        # What is kept for the backward pass is not for others.
        return checkpoint(lambda *x: triton_recurrence(*x)[:2], *inputs, use_reentrant=use_reentrant)

    for actual, expected in zip(
        results_of(checkpointed, leaves, rest), results_of(triton_recurrence, leaves, rest), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_call_gives_the_same_bits(arguments, form):
    leaves, rest = arguments(f"gates of {form}s", 130)
    assert all(map(torch.equal, *(results_of(triton_recurrence, leaves, rest) for _ in range(2))))
