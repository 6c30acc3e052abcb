"""The kernel for a few tokens against the definition: compiled on a GPU, elsewhere in Triton's interpreter."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.gated_recurrence import gated_recurrence_reference
from kernels.gated_recurrence.decode import triton_step
from kernels.gated_recurrence.decode.triton_step import MAX_STEPS, short_recurrence, step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
STATE_TOLERANCE = 3e-6  # float32 whatever the inputs are
GATES = ["key", "value", "head"]
pytestmark = pytest.mark.gpu
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may use of a multiprocessor


def make_inputs(
    batch=2, length=1, heads=(2, 2), head_dims=(8, 8), gate="key", *, dtype=torch.float32, strength=1.0, closed=0.0,
    open_=0.0, seed=0,
):  # fmt: skip
    """Return q, k, v, log_decay and state on the CPU. closed, open_: the share of gates that are -inf, exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    (query_heads, heads), (key_dim, value_dim) = heads, head_dims
    channels = {"key": (key_dim,), "value": (value_dim,), "head": ()}[gate]
    log_decay = strength * F.logsigmoid(normal(batch, length, heads, *channels))
    chance = torch.rand(log_decay.shape, generator=generator)
    return {
        "q": normal(batch, length, query_heads, key_dim).to(dtype),
        "k": normal(batch, length, heads, key_dim).to(dtype),
        "v": normal(batch, length, heads, value_dim).to(dtype),
        "log_decay": log_decay.masked_fill(chance < closed, -torch.inf).masked_fill(chance > 1 - open_, 0.0),
        "state": normal(batch, heads, key_dim, value_dim),
    }


def axis_of(gate):
    return "value" if gate == "value" else "key"


def expected(inputs, gate, scale=0.5, bonus=None):
    q, k, v, log_decay, state = (None if x is None else x.double() for x in inputs.values())
    options = {"decay_axis": axis_of(gate), "scale": scale, "bonus": None if bonus is None else bonus.double()}
    out, final = gated_recurrence_reference(q, k, v, log_decay, initial_state=state, **options)
    return {"out": out, "state": final}


def by_step(inputs, gate, scale=0.5, bonus=None):
    """Return the output of `step` and the updated state, on the CPU."""
    q, k, v, log_decay, state = (x.to(DEVICE, copy=True) for x in inputs.values())
    out = step(q, k, v, log_decay, state, axis_of(gate), scale, None if bonus is None else bonus.to(DEVICE))
    return {"out": out.cpu(), "state": state.cpu()}


def by_short_recurrence(inputs, gate, scale=0.5, bonus=None):
    """Return the result of `short_recurrence` on the CPU, and check that it leaves the state unchanged."""
    tensors = [None if x is None else x.to(DEVICE, copy=True) for x in inputs.values()]
    out, final = short_recurrence(*tensors, axis_of(gate), scale, None if bonus is None else bonus.to(DEVICE))
    if inputs["state"] is not None:
        assert torch.equal(tensors[-1].cpu(), inputs["state"])
    return {"out": out.cpu(), "state": final.cpu()}


@pytest.fixture(scope="module")
def agree(assert_close):
    def check(inputs, gate, **options):
        right = expected(inputs, gate, **options)
        tolerance = TOLERANCE[inputs["q"].dtype]
        for function in (by_step, by_short_recurrence) if inputs["state"] is not None else (by_short_recurrence,):
            actual = function(inputs, gate, **options)
            assert actual["out"].dtype == inputs["q"].dtype
            assert actual["state"].dtype == torch.float32
            assert_close({"out": actual["out"]}, {"out": right["out"]}, tolerance)
            assert_close({"state": actual["state"]}, {"state": right["state"]}, STATE_TOLERANCE)

    return check


@st.composite
def problems(draw):
    """Draw consistent sizes and gates."""
    heads = draw(st.sampled_from([(1, 1), (2, 2), (6, 2)]))
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (1.0, 0.0), (0.0, 1.0)]))
    return {
        "batch": draw(st.integers(1, 3)),
        "length": draw(st.sampled_from([1, 1, 2, 5, 16])),
        "heads": heads,
        "head_dims": draw(st.sampled_from([(16, 16), (8, 24), (33, 7), (5, 40)])),
        "gate": draw(st.sampled_from(GATES)),
        "strength": draw(st.sampled_from([0.06, 1.0, 30.0])),
        "closed": closed,
        "open_": open_,
        "seed": draw(st.integers(0, 99)),
    }, draw(st.booleans())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems())
def test_output_and_final_state_equal_the_definition(agree, dtype, problem):
    sizes, with_bonus = problem
    inputs = make_inputs(dtype=dtype, **sizes)
    bonus = make_inputs(heads=(1, sizes["heads"][0]), head_dims=sizes["head_dims"])["k"][0, 0] if with_bonus else None
    agree(inputs, sizes["gate"], bonus=bonus)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_a_state_of_zeros_need_not_be_given(agree, gate, length):
    agree({**make_inputs(length=length, heads=(4, 2), gate=gate), "state": None}, gate)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "head_dims", [(128, 128), (256, 256), (64, 100), (100, 72), (17, 130), (1, 1), (1, 256), (256, 1)], ids=str
)
def test_any_head_dim_equals_the_definition(agree, gate, head_dims):
    agree(make_inputs(1, 2, (2, 1), head_dims, gate, dtype=torch.float16), gate)


def test_more_tokens_than_it_is_meant_for_are_right_too(agree):
    agree(make_inputs(1, MAX_STEPS * 4 + 1, (2, 1), (16, 20)), "key")


def test_token_by_token_equals_all_at_once():
    inputs = make_inputs(length=7, heads=(4, 2), head_dims=(24, 40))
    together = by_step(inputs, "key")
    state, outs = inputs["state"].to(DEVICE, copy=True), []
    for t in range(7):
        tokens = (inputs[name][:, t : t + 1].to(DEVICE) for name in ("q", "k", "v", "log_decay"))
        outs.append(step(*tokens, state, "key", 0.5).cpu())
    assert torch.equal(torch.cat(outs, 1), together["out"])
    assert torch.equal(state.cpu(), together["state"])


def test_the_state_is_updated_in_its_own_memory_and_nothing_around_it(assert_close):
    inputs = make_inputs(batch=3, length=2, heads=(2, 2), head_dims=(16, 24))
    cache = torch.full((3, 5, 2, 16, 24), 7.0, device=DEVICE)
    cache[:, 3] = inputs["state"].to(DEVICE)
    q, k, v, log_decay = (inputs[name].to(DEVICE) for name in ("q", "k", "v", "log_decay"))
    out = step(q, k, v, log_decay, cache[:, 3], "key", 0.5)
    assert_close({"out": out.cpu(), "state": cache[:, 3].cpu()}, expected(inputs, "key"), 3e-6)
    assert (cache[:, [0, 1, 2, 4]] == 7).all()


def test_contiguous_matrices_are_updated_without_a_second_state(assert_close, monkeypatch):
    inputs = make_inputs(batch=3, heads=(2, 2), head_dims=(16, 24))
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())

    def refuse(*args, **kwargs):
        raise AssertionError("a second state was made")

    monkeypatch.setattr(triton_step, "_empty_state", refuse)
    step(q, k, v, log_decay, state, "key", 0.5)
    heads_first = torch.empty(2, 3, 16, 24, device=DEVICE).transpose(0, 1).copy_(state)
    step(q, k, v, log_decay, heads_first, "key", 0.5)
    padded = torch.empty(3, 2, 385, device=DEVICE)[..., 1:].unflatten(-1, (16, 24)).copy_(state)
    step(q, k, v, log_decay, padded, "key", 0.5)
    # Of another alignment, so added in another order.
    assert_close({"state": padded}, {"state": heads_first}, 1e-6)


def test_a_state_of_any_other_layout_is_updated_too(assert_close):
    inputs = make_inputs(batch=2, length=3, head_dims=(16, 24))
    right = expected(inputs, "key")
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    for other in (state.mT.contiguous().mT, F.pad(state, (1, 2))[..., 1:-2]):
        assert not triton_step._holds_matrices(other)
        out = step(q, k, v, log_decay, other, "key", 0.5)
        assert_close({"out": out.cpu(), "state": other.cpu()}, right, 3e-6)


def test_one_state_expanded_over_the_batch_is_read_but_not_written():
    inputs = make_inputs(batch=3)
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    shared = state[:1].expand(3, -1, -1, -1)
    _, final = short_recurrence(q, k, v, log_decay, shared, "key", 0.5)
    assert torch.equal(final, short_recurrence(q, k, v, log_decay, shared.contiguous(), "key", 0.5)[1])
    with pytest.raises(RuntimeError, match="single memory location"):
        step(q, k, v, log_decay, shared, "key", 0.5)


@pytest.mark.parametrize("gate", GATES)
def test_views_of_any_strides_are_read_in_place(gate, monkeypatch):
    inputs = make_inputs(batch=2, length=5, heads=(4, 2), head_dims=(12, 20), gate=gate)
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    right = by_step(inputs, gate)
    spoilt = lambda shape: torch.full(shape, torch.nan, device=DEVICE)  # noqa: E731
    layouts = [
        lambda x: spoilt([size + 3 for size in x.shape])[tuple(slice(1, 1 + size) for size in x.shape)],
        lambda x: spoilt([2 * size for size in x.shape])[tuple(slice(0, None, 2) for _ in x.shape)],
        lambda x: spoilt(x.shape[::-1]).permute(*reversed(range(x.ndim))),
    ]
    views = [[layout(x).copy_(x) for x in (q, k, v, log_decay)] for layout in layouts]

    def refuse(x, *args, **kwargs):
        raise AssertionError("a copy was made")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    for tensors in views:
        own = state.clone()
        assert torch.equal(step(*tensors, own, axis_of(gate), 0.5).cpu(), right["out"])
        assert torch.equal(own.cpu(), right["state"])


def test_keys_and_gates_expanded_over_heads_and_channels_are_read_in_place(assert_close):
    inputs = make_inputs(batch=2, length=3, heads=(4, 4), head_dims=(12, 20))
    inputs["k"] = inputs["k"][:, :, :1].expand(-1, -1, 4, -1)
    inputs["log_decay"] = inputs["log_decay"][..., :1].expand(-1, -1, -1, 12)
    right = expected(inputs, "key")
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    k, log_decay = k[:, :, :1].expand(-1, -1, 4, -1), log_decay[..., :1].expand(-1, -1, -1, 12)
    assert k.stride(2) == log_decay.stride(3) == 0
    out = step(q, k, v, log_decay, state, "key", 0.5)
    assert_close({"out": out.cpu(), "state": state.cpu()}, right, 3e-6)


def test_one_tensor_may_be_query_key_and_value(assert_close):
    inputs = make_inputs(length=2)
    inputs = {**inputs, "k": inputs["q"], "v": inputs["q"]}
    q, log_decay, state = (inputs[name].to(DEVICE) for name in ("q", "log_decay", "state"))
    right = expected(inputs, "key")
    out = step(q, q, q, log_decay, state, "key", 0.5)
    assert_close({"out": out.cpu(), "state": state.cpu()}, right, 3e-6)


@pytest.mark.parametrize("gate", GATES)
def test_a_closed_gate_forgets_even_a_huge_state(gate):
    inputs = make_inputs(length=2, gate=gate)
    inputs["log_decay"][:, 0] = -torch.inf
    before = by_step(inputs, gate)
    inputs["state"] *= 1e30
    after = by_step(inputs, gate)
    assert torch.equal(before["out"], after["out"])
    assert torch.equal(before["state"], after["state"])


def test_no_tokens_leave_the_state_and_no_rows_give_nothing():
    inputs = make_inputs(batch=2, length=0, heads=(4, 2), head_dims=(8, 12))
    for result in (by_step(inputs, "key"), by_short_recurrence(inputs, "key")):
        assert result["out"].shape == (2, 0, 4, 12)
        assert torch.equal(result["state"], inputs["state"])
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    assert short_recurrence(q, k, v, log_decay, state, "key", 0.5)[1].data_ptr() != state.data_ptr()
    for result in (by_step(make_inputs(batch=0), "key"), by_short_recurrence(make_inputs(batch=0), "key")):
        assert result["out"].shape == (0, 1, 2, 8)
        assert result["state"].shape == (0, 2, 8, 8)


def test_a_graph_that_saved_the_state_refuses_it_after_a_step():
    inputs = make_inputs()
    q, k, v, log_decay, state = (x.to(DEVICE) for x in inputs.values())
    weight = torch.ones_like(state, requires_grad=True)
    product = weight * state
    with torch.no_grad():
        step(q, k, v, log_decay, state, "key", 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_steps_run_in_inference_mode():
    inputs = make_inputs()
    right = by_step(inputs, "key")
    with torch.inference_mode():
        result = by_step(inputs, "key")
    assert torch.equal(result["state"], right["state"])


@pytest.mark.parametrize("gate", GATES)
def test_the_operations_pass_opcheck(gate):
    inputs = make_inputs(length=2, heads=(4, 2), head_dims=(8, 12), gate=gate)
    tensors = [x.to(DEVICE) for x in inputs.values()]
    bonus = torch.ones(4, 8, device=DEVICE)
    operations = torch.ops.palimpsest
    torch.library.opcheck(operations.gated_recurrence_step_in_place.default, (*tensors, axis_of(gate), 0.5, bonus))
    torch.library.opcheck(operations.gated_recurrence_short.default, (*tensors, axis_of(gate), 0.5))
    torch.library.opcheck(operations.gated_recurrence_short.default, (*tensors[:4], None, axis_of(gate), 0.5))


def test_compiles_without_a_graph_break_and_still_updates_the_state():
    torch.compiler.reset()
    inputs = make_inputs(length=2, heads=(4, 2))
    right = by_step(inputs, "key")

    def steps(q, k, v, log_decay, state):
        outs = [step(q, k, v, log_decay, state, "key", 0.5) for _ in range(2)]
        return *outs, *short_recurrence(q, k, v, log_decay, state, "key", 0.5)

    plain, compiled = ([x.to(DEVICE, copy=True) for x in inputs.values()] for _ in range(2))
    expected_results = steps(*plain)
    results = torch.compile(steps, fullgraph=True, backend="aot_eager")(*compiled)
    assert all(map(torch.equal, results, expected_results))
    assert torch.equal(results[0].cpu(), right["out"])
    assert torch.equal(compiled[4], plain[4])
    assert not torch.equal(compiled[4].cpu(), right["state"])  # two steps on


@pytest.mark.gpu(needs="CUDA")
@pytest.mark.parametrize("gate", GATES)
def test_a_hundred_batches_lengths_and_layouts_after_the_first_compile_nothing(gate):
    import triton

    names = []
    before, draw = triton.knobs.runtime.jit_post_compile_hook, random.Random(0)

    def once(batch, length):
        inputs = make_inputs(batch, length + 3, (6, 3), (48, 40), gate, dtype=torch.bfloat16)
        tokens = (inputs[name].to(DEVICE)[:, 3:] for name in ("q", "k", "v", "log_decay"))
        step(*tokens, inputs["state"].to(DEVICE), axis_of(gate), 0.5)

    once(2, 1)
    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: names.append(kwargs["fn"].name)
    try:
        for _ in range(100):
            once(draw.randint(1, 70), draw.randint(1, MAX_STEPS))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not names


@pytest.mark.long
def test_compiles_for_ampere_and_hopper_with_wide_loads_and_the_state_in_registers(tmp_path):
    program = Path(__file__).with_name("compile_step_offline.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    result = subprocess.run([sys.executable, str(program)], **options)
    assert result.returncode == 0, result.stderr[-2000:]
    records = json.loads(result.stdout)
    assert {(record["architecture"], record["gate"]) for record in records} == {(a, g) for a in SHARED for g in GATES}
    for record in records:
        assert record["shared"] <= SHARED[record["architecture"]], record
        # Bytes a thread, stored and loaded. Its part of the state would be 1024.
        assert record["spilled"] <= 256, record
        assert record["load_width"] == record["store_width"] == (1 if record["head_dims"] == [1, 1] else 4), record
