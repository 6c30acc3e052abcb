"""The Triton kernels of the recurrence against the definition: compiled on a GPU, elsewhere in Triton's interpreter."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels import gated_recurrence, gated_slot_attention, launching
from kernels.gated_recurrence import gated_recurrence_reference, gated_slot_attention_reference
from kernels.gated_recurrence import operator as triton_operator
from kernels.gated_recurrence.operator import triton_recurrence
from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.plan import make_plan

# The interpreter's products of bfloat16 are wrong.
HALVES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
DTYPES = [torch.float32, *HALVES]
# Results are rounded to half precision; on a GPU float16 is multiplied as TF32, and bfloat16 is kept between kernels.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GATES_TOLERANCE = {**TOLERANCE, torch.bfloat16: 1.5e-2}
FORMS = ["key", "value", "head"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def axis(form):
    return {"decay_axis": "value" if form == "value" else "key"}


@pytest.fixture(scope="session")
def on_device(device):
    """on_device(function) -> the same with tensors moved to the device, and what it returns moved back."""

    def move(value, to):
        if isinstance(value, torch.Tensor):
            return value.to(to)
        return tuple(move(x, to) for x in value) if isinstance(value, tuple) else value

    def wrap(function):
        return lambda **arguments: move(function(**{n: move(x, device) for n, x in arguments.items()}), "cpu")

    return wrap


def by_kernels(
    q, k, v, log_decay, initial_state=None, *, decay_axis="key", scale=1.0, cu_seqlens=None, memory_budget=None
):
    return triton_recurrence(q, k, v, log_decay, initial_state, cu_seqlens, decay_axis, scale, memory_budget)[:2]


@pytest.fixture
def public_by_kernels(monkeypatch, device):
    """Make public functions run the kernels on the CPU too."""
    if device.type == "cpu":
        # kernels.gated_recurrence is the function.
        module = sys.modules["kernels.gated_recurrence"]
        as_chunked = lambda *arguments: triton_recurrence(*arguments[:8], None, *arguments[8:])[:2]  # noqa: E731
        monkeypatch.setattr(module, "chunked_recurrence", as_chunked)


@pytest.fixture(scope="session")
def check(assert_close):
    """check(actual, expected, dtype): every result by the tolerances above."""

    def compare(actual, expected, dtype):
        for name in expected:
            tolerance = (GATES_TOLERANCE if name == "log_decay" else TOLERANCE)[dtype]
            assert_close({name: actual[name]}, {name: expected[name]}, tolerance)
        assert actual.keys() == expected.keys()

    return compare


@pytest.fixture(scope="session")
def agree(check, out_and_gradients, defined, on_device):
    """agree(inputs, **options): out, final state and all gradients equal the definition in float64."""

    def run(inputs, **options):
        actual = out_and_gradients(on_device(by_kernels), inputs, **options)
        check(actual, defined(gated_recurrence_reference, inputs, **options), inputs["q"].dtype)

    return run


def num_segments(inputs, cu_seqlens=None):
    """Return the total number of segments of all sequences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k, v, log_decay = (inputs[name].to(device) for name in ("k", "v", "log_decay"))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(device)
    plan = make_plan(*k.shape[:2], cu_seqlens, triton_operator._segment_of(k, v, log_decay, cu_seqlens), device)
    return int((plan.segments[:, 3] > 0).sum()) if plan.in_segments else plan.num_sequences


@st.composite
def problems(draw):
    """Draw consistent sizes, gates and options; lengths on both sides of a chunk."""
    length = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100])))
    batch = draw(st.integers(1, 2))
    has_states, options, states = draw(st.booleans()), {}, batch
    if draw(st.booleans()):
        inner = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
        batch, states, options["cu_seqlens"] = 1, len(inner) + 1, int32(0, *inner, length)
    options["scale"] = draw(st.sampled_from([1.0, 0.3, -0.5]))
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (1.0, 0.0), (0.0, 1.0)]))
    sizes = {
        "batch": batch,
        "length": length,
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])),
        "head_dims": draw(st.sampled_from([(16, 16), (24, 40), (5, 3), (33, 17)])),
        "strength": draw(st.sampled_from([1 / 16, 1.0, 3.0, 30.0])),
        "seed": draw(st.integers(0, 99)),
    }
    return {**sizes, "states": states * has_states, "closed": closed, "open_": open_}, options


# A test for each form: on a GPU most of their time goes into compiling, which other processes can share.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problem=problems())
def test_results_and_gradients_equal_the_definition(make_inputs, agree, form, dtype, problem):
    sizes, options = problem
    agree(make_inputs(form=form, dtype=dtype, **sizes), **axis(form), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 257])
def test_every_form_of_gate_at_lengths_around_chunks(make_inputs, agree, form, length):
    agree(make_inputs(2, length, (2, 1), (16, 24), form=form, dtype=torch.float32), **axis(form), scale=0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [1 / 16, 1.0, 3.0, 30.0, 300.0])
def test_gates_of_any_strength(make_inputs, agree, form, strength, dtype):
    agree(make_inputs(1, 130, (2, 1), (16, 24), form=form, strength=strength, dtype=dtype), **axis(form))


# What sets some gates of inputs whose others are weak.
GATES = {
    "none forgets": lambda g: g.zero_(),
    "all closed": lambda g: g.fill_(-torch.inf),
    "closed at the first token": lambda g: g[:, 0].fill_(-torch.inf),
    "closed within a chunk": lambda g: g[:, 40].fill_(-torch.inf),
    "closed around a chunk's edge": lambda g: g[:, 63:65].fill_(-torch.inf),
    "closed for long": lambda g: g[:, 64:110].fill_(-torch.inf),
    "-10 a step": lambda g: g.fill_(-10.0),
    "-30 a step": lambda g: g.fill_(-30.0),
    "-30 a step for a while": lambda g: g[:, 20:90].fill_(-30.0),
    "one of -41 in each half of a chunk": lambda g: g[:, 5::32].fill_(-41.0),
    "one channel closed": lambda g: g[..., 3].fill_(-torch.inf),
    "one channel of -30": lambda g: g[..., 3].fill_(-30.0),
    "one channel of -1": lambda g: g[..., 3].fill_(-1.0),
    "one channel never forgets": lambda g: g.fill_(-30.0)[..., 3].fill_(0.0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gates", GATES)
def test_gates_that_are_open_closed_or_strong_among_others(make_inputs, agree, form, gates):
    heads = (4, 4) if form == "head" else (1, 1)
    inputs = make_inputs(1, 130, heads, (16, 16), form=form, strength=1 / 16, dtype=torch.float32)
    GATES[gates](inputs["log_decay"])
    agree(inputs, **axis(form))


@pytest.mark.parametrize("form", ["key", "value"])
@pytest.mark.parametrize("excess", [-0.01, 0.01], ids=["just weak", "just strong"])
def test_chunks_between_weak_and_strong_are_as_right_as_their_exponents(
    make_inputs, assert_close, out_and_gradients, defined, on_device, form, excess
):
    inputs = make_inputs(1, 150, (1, 1), (16, 16), form=form, dtype=torch.float32)
    inputs["log_decay"].fill_((-60 - excess) / 32 * math.log(2))
    actual = out_and_gradients(on_device(by_kernels), inputs, **axis(form))
    # Each of two exponents has 32 roundings of a sum below 64.
    allowed = 2 * 32 * 2.0**-19 * math.log(2)
    assert_close(actual, defined(gated_recurrence_reference, inputs, **axis(form)), allowed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [-12.0, -20.0, -40.0])
@pytest.mark.parametrize("length", [1, 2, 5, 66])
def test_gradients_of_gates_that_forget_nearly_all_are_small_but_right(make_inputs, agree, form, gate, length):
    inputs = make_inputs(1, length, (1, 1), (16, 16), form=form, dtype=torch.float32)
    inputs["log_decay"].fill_(gate)
    agree(inputs, **axis(form))


@pytest.mark.parametrize(("strength", "seed"), [(3.0, 0), (10.0, 5), (30.0, 0)])
def test_gradients_of_gates_between_tokens_that_are_alike_do_not_gather_their_rounding(
    make_inputs, assert_close, out_and_gradients, on_device, strength, seed
):
    sizes = {"form": "head", "strength": strength, "states": 0, "dtype": torch.float32, "seed": seed}
    inputs = make_inputs(1, 64, (1, 1), (16, 16), **sizes)
    alike = lambda function: lambda **x: function(**{n: y[:, :1].expand_as(y) for n, y in x.items()})  # noqa: E731
    actual = out_and_gradients(alike(on_device(by_kernels)), inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    assert_close(actual, out_and_gradients(alike(gated_recurrence_reference), wide), 5e-6)


@pytest.mark.usefixtures("right_bfloat16")
def test_what_a_token_reads_of_itself_is_rounded_once(make_inputs, assert_close, on_device):
    sizes = {"form": "value", "strength": 1 / 16, "states": 0, "dtype": torch.bfloat16, "seed": 2}
    inputs = make_inputs(1, 1, (1, 1), (16, 16), **sizes)
    actual, _ = on_device(by_kernels)(**inputs, **axis("value"))
    expected, _ = gated_recurrence_reference(**{name: x.double() for name, x in inputs.items()}, **axis("value"))
    assert_close({"out": actual}, {"out": expected}, 2.5e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [1.0, 10.0])
@pytest.mark.parametrize(
    "head_dims",
    [(24, 16), (40, 64), (96, 24), (16, 128), (160, 40), (256, 1), (1, 256), (1, 1)],
    ids=str,
)
def test_any_head_dims_equal_the_definition(make_inputs, agree, form, strength, head_dims):
    agree(make_inputs(1, 66, (1, 1), head_dims, form=form, strength=strength, dtype=torch.float32), **axis(form))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_square_head_dims_in_half_precision_equal_the_definition(make_inputs, agree, dtype, form, size):
    agree(make_inputs(1, 65, (1, 1), (size, size), form=form, dtype=dtype), **axis(form), scale=size**-0.5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("key_dim", "heads"), [(160, (2, 1)), (256, (4, 1))])
def test_wide_keys_that_heads_share_equal_the_definition_with_a_gate_per_head(
    make_inputs, agree, dtype, key_dim, heads
):
    agree(make_inputs(1, 66, heads, (key_dim, 64), form="head", dtype=dtype), scale=key_dim**-0.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [1 / 16, 30.0])
def test_a_state_read_by_four_heads_gathers_all_their_gradients(make_inputs, agree, form, strength):
    agree(make_inputs(1, 66, (4, 1), (16, 24), form=form, strength=strength, dtype=torch.float32), **axis(form))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [1 / 1024, 30.0], ids=["weak", "strong"])
def test_states_pass_from_segment_to_segment(make_inputs, agree, form, strength, dtype):
    inputs = make_inputs(1, 600, (2, 1), (16, 24), form=form, strength=strength, dtype=dtype)
    assert num_segments(inputs) >= 3
    agree(inputs, **axis(form), scale=0.5)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_batch_have_segments_of_their_own(make_inputs, agree, form):
    inputs = make_inputs(2, 270, (1, 1), (16, 16), form=form, strength=1 / 64, dtype=torch.float32)
    assert num_segments(inputs) >= 4
    agree(inputs, **axis(form))


@pytest.mark.parametrize("states", [10, 0], ids=["a state each", "no states"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_of_no_of_one_and_of_many_tokens(make_inputs, agree, form, states):
    bounds = int32(0, 0, 1, 1, 65, 345, 346, 410, 473, 473, 473)
    inputs = make_inputs(1, 473, (2, 1), (16, 24), form=form, strength=1 / 16, states=states, dtype=torch.float32)
    assert num_segments(inputs, bounds) == 7
    agree(inputs, **axis(form), cu_seqlens=bounds)


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_one_document_reaches_no_other(make_inputs, out_and_gradients, on_device, form):
    options = {**axis(form), "cu_seqlens": int32(0, 30, 100, 100, 140)}
    inputs = make_inputs(1, 140, (2, 1), form=form, states=4, dtype=torch.float32)
    before = out_and_gradients(on_device(by_kernels), inputs, **options)
    for name, x in inputs.items():
        x[(1,) if name == "initial_state" else (0, slice(30, 100))] = torch.nan
    after = out_and_gradients(on_device(by_kernels), inputs, **options)
    tokens, documents = [*range(30), *range(100, 140)], [0, 2, 3]
    for name in before:
        others = (documents,) if name in ("state 0", "initial_state") else (0, tokens)
        assert torch.equal(before[name][others], after[name][others]), name


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_before_a_closed_gate_is_forgotten_entirely(make_inputs, on_device, form):
    inputs = make_inputs(1, 100, (2, 1), (16, 24), form=form, dtype=torch.float32)
    inputs["log_decay"][:, 70] = -torch.inf
    before, state = on_device(by_kernels)(**inputs, **axis(form))
    inputs["initial_state"] *= 1e30
    inputs["v"][:, :70] *= 1e30
    after, same_state = on_device(by_kernels)(**inputs, **axis(form))
    assert torch.equal(state, same_state)
    assert torch.equal(after[:, 70:], before[:, 70:])


@pytest.mark.parametrize(("form", "name"), [("key", "k"), ("value", "v"), ("head", "k")])
def test_more_channels_than_a_program_holds_are_refused_by_name(make_inputs, form, name):
    with pytest.raises(ValueError, match=f"{name} has 257 channels that decay"):
        by_kernels(**make_inputs(1, 2, head_dims=(257, 257), form=form, dtype=torch.float32), **axis(form))


LAYOUTS = {
    "aligned slices of a projection": lambda x: F.pad(x, (16, 16))[..., 16:-16],
    "slices that are not aligned": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels not together": lambda x: x.mT.contiguous().mT,
    "one head expanded to all": lambda x: x[:, :, :1].expand_as(x),
    "one token expanded to all": lambda x: x[:, :1].expand_as(x),
    "one channel expanded to all": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_any_strides_are_read_right(make_inputs, check, out_and_gradients, on_device, form, layout):
    # Views are made inside: a clone of one, which takes the gradients, is none.
    def viewed(function):
        return lambda decay_axis, **inputs: function(
            **{n: LAYOUTS[layout](x) for n, x in inputs.items()}, decay_axis=decay_axis
        )

    # With tokens that are all alike, a gate's gradient is the small difference of large sums: less so with gates that
    # forget. The layouts are the matter here.
    inputs = make_inputs(2, 70, (2, 2), (16, 16), form=form, strength=10.0, dtype=torch.float32)
    actual = out_and_gradients(on_device(viewed(by_kernels)), inputs, **axis(form))
    wide = {name: x.double() for name, x in inputs.items()}
    check(actual, out_and_gradients(viewed(gated_recurrence_reference), wide, **axis(form)), torch.float32)


@pytest.mark.parametrize("strength", [1.0, 30.0])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept_for_the_backward_pass_changes_no_bit(
    make_inputs, out_and_gradients, on_device, device, form, strength
):
    inputs = make_inputs(1, 320, (1, 1), (16, 24), form=form, strength=strength, dtype=torch.float32)
    results = []
    for memory_budget, keeps in ((0, False), (None, True), (10**9, True)):
        tensors = (x.to(device) for x in inputs.values())
        kept = triton_recurrence(*tensors, None, axis(form)["decay_axis"], 1.0, memory_budget)[2:]
        assert any(x.numel() for x in kept) == keeps
        results.append(out_and_gradients(on_device(by_kernels), inputs, **axis(form), memory_budget=memory_budget))
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name
        assert torch.equal(results[0][name], results[2][name]), name


@pytest.mark.parametrize("form", ["key", "value"])
def test_launches_that_wait_for_each_others_kernels_change_no_bit(
    make_inputs, out_and_gradients, on_device, form, monkeypatch
):
    monkeypatch.setattr(triton_operator, "LEAST_SEGMENT", CHUNK)
    inputs = make_inputs(1, 2 * CHUNK + 9, (2, 1), (5, 3), form=form, states=3, dtype=torch.float32)
    options = {**axis(form), "cu_seqlens": int32(0, 9, 9, 2 * CHUNK + 9), "memory_budget": 0}
    at_once, numbers = out_and_gradients(on_device(by_kernels), inputs, **options), []
    monkeypatch.setattr(launching, "_compile", lambda launches: numbers.append(len(launches)))
    monkeypatch.setattr(triton_operator, "_kernels_ready", lambda *_: launching.compiled_side_by_side(object()))
    waited = out_and_gradients(on_device(by_kernels), inputs, **options)
    assert numbers == ([6, 12] if form == "key" else [8, 12])
    for name in at_once:
        assert torch.equal(at_once[name], waited[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("result", [0, 1], ids=["out", "final state"])
def test_either_result_alone_gives_gradients(make_inputs, check, on_device, form, result):
    inputs = make_inputs(1, 270, (2, 1), (16, 24), form=form, strength=1 / 16, dtype=torch.float32)
    gradients = []
    for function, wide in ((on_device(by_kernels), False), (gated_recurrence_reference, True)):
        leaves = {name: (x.double() if wide else x).clone().requires_grad_() for name, x in inputs.items()}
        function(**leaves, **axis(form))[result].square().sum().backward()
        # The final state does not depend on q: no gradient, or one of 0.
        gradients.append({n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()})
    check(*gradients, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", ["q", "log_decay", "initial_state"])
def test_only_what_asks_for_a_gradient_gets_one(make_inputs, out_and_gradients, on_device, form, wanted):
    inputs = make_inputs(1, 70, (2, 1), (16, 24), form=form, dtype=torch.float32)
    inputs[wanted].requires_grad_()
    out, final = on_device(by_kernels)(**inputs, **axis(form))
    (out.sum() + final.sum()).backward()
    assert all((x.grad is not None) == (name == wanted) for name, x in inputs.items())
    every = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, final = on_device(by_kernels)(**every, **axis(form))
    (out.sum() + final.sum()).backward()
    assert torch.equal(inputs[wanted].grad, every[wanted].grad)
    with torch.inference_mode():
        assert not on_device(by_kernels)(**inputs, **axis(form))[0].requires_grad


@pytest.mark.parametrize("states", [None, 0], ids=["a state", "no state"])
@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_and_no_rows_pass_the_state_on(make_inputs, out_and_gradients, on_device, form, states):
    for inputs, bounds in (
        (make_inputs(2, 0, form=form, states=states, dtype=torch.float32), None),
        (make_inputs(0, 5, form=form, states=states, dtype=torch.float32), None),
        (make_inputs(1, 0, form=form, states=3 if states is None else 0, dtype=torch.float32), int32(0, 0, 0, 0)),
    ):
        results = out_and_gradients(on_device(by_kernels), inputs, **axis(form), cu_seqlens=bounds)
        assert results["out"].numel() == 0
        assert torch.equal(results["state 0"], inputs.get("initial_state", torch.zeros_like(results["state 0"])))
        assert all((results[name] == 0).all() for name in ("q", "k", "v", "log_decay"))
        if "initial_state" in inputs and len(inputs["initial_state"]):
            assert (results["initial_state"] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtypes_of_their_inputs_and_states_are_float32(
    make_inputs, check, on_device, defined, dtype
):
    inputs = make_inputs(1, 70, (2, 1), (16, 24), dtype=dtype)
    inputs["log_decay"] = inputs["log_decay"].double()
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, final = on_device(by_kernels)(**leaves)
    assert (out.dtype, final.dtype) == (dtype, torch.float32)
    (out.float().sum() + final.sum()).backward()
    assert all(x.grad.dtype == x.dtype for x in leaves.values())


@pytest.mark.parametrize("form", FORMS)
def test_errors_do_not_gather_over_a_long_sequence(make_inputs, check, out_and_gradients, on_device, device, form):
    """Against the form for CPUs in float64, which its own tests hold to the definition."""
    length = 65_536 if device.type == "cuda" else 40 * CHUNK
    inputs = make_inputs(1, length, (1, 1), (16, 16), form=form, strength=1e-5, dtype=torch.float32)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = out_and_gradients(gated_recurrence, wide, **axis(form))
    check(out_and_gradients(on_device(by_kernels), inputs, **axis(form)), expected, torch.float32)


@pytest.mark.usefixtures("public_by_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bounds", [None, (0, 0, 1, 70, 100)], ids=["a batch", "documents"])
def test_a_bonus_around_the_kernels_equals_the_definition(
    make_inputs, check, out_and_gradients, defined, on_device, form, bounds
):
    batch, states = (2, 2) if bounds is None else (1, 4)
    options = {**axis(form), "scale": 0.5, "cu_seqlens": None if bounds is None else int32(*bounds)}
    inputs = make_inputs(batch, 100, (4, 2), form=form, closed=0.05, bonus=True, states=states, dtype=torch.float32)
    actual = out_and_gradients(on_device(gated_recurrence), inputs, **options)
    check(actual, defined(gated_recurrence_reference, inputs, **options), torch.float32)


@pytest.mark.usefixtures("public_by_kernels", "right_bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["value", "head"], ids=["gate per slot", "gate per head"])
def test_slot_attention_by_the_kernels_equals_the_definition(
    make_inputs, check, out_and_gradients, on_device, form, dtype
):
    keys = make_inputs(2, 100, (4, 2), (16, 24), form=form, open_=0.1, dtype=dtype)
    values = make_inputs(2, 100, (4, 2), (24, 40), dtype=dtype, seed=7)
    first, second = keys.pop("initial_state"), values["initial_state"]
    inputs = {**keys, "slots": keys["v"], "v": values["v"], "first": first, "second": second}

    def whole(function):
        return lambda first, second, **rest: tuple_of(function(**rest, initial_state=(first, second), scale=0.25))

    actual = out_and_gradients(on_device(whole(gated_slot_attention)), inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    check(actual, out_and_gradients(whole(gated_slot_attention_reference), wide), dtype)


def tuple_of(results):
    out, states = results
    return out, tuple(states)
