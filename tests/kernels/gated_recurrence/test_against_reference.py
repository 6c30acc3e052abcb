"""The public function against the definition: outputs, states and all gradients, over shapes and options."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gated_recurrence, gated_recurrence_step
from kernels.gated_recurrence import gated_recurrence_reference

TOLERANCE = {torch.float64: 1e-9, torch.float32: 4e-6}
FORMS = ["key", "value", "head"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="session")
def agree(assert_close, out_and_gradients, defined):
    def check(inputs, **options):
        actual = out_and_gradients(gated_recurrence, inputs, **options)
        expected = defined(gated_recurrence_reference, inputs, **options)
        # A gradient that nearly cancels has few right digits in float32, whatever computes it: the definition itself,
        # evaluated in the inputs' dtype, says how few.
        same_dtype = out_and_gradients(gated_recurrence_reference, inputs, **options)
        assert_close(actual, expected, TOLERANCE[inputs["q"].dtype], or_as_close_as=same_dtype)

    return check


def axis(form):
    return {"decay_axis": "value" if form == "value" else "key"}


@st.composite
def problems(draw):
    """Sizes and options that belong together; lengths on both sides of a chunk."""
    length = draw(st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 100])))
    batch, form = draw(st.integers(1, 3)), draw(st.sampled_from(FORMS))
    has_states, options = draw(st.booleans()), axis(form)
    documents = None
    if draw(st.booleans()):
        inner = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
        batch, documents, options["cu_seqlens"] = 1, len(inner) + 1, int32(0, *inner, length)
    if draw(st.booleans()):
        options["scale"] = 0.3
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (1.0, 0.0), (0.0, 1.0)]))
    shape = {
        "batch": batch,
        "length": length,
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])),
        "head_dims": draw(st.sampled_from([(8, 8), (5, 3), (1, 7), (6, 1)])),
        "strength": draw(st.sampled_from([1 / 16, 1.0, 30.0])),
        "bonus": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
    return {**shape, "form": form, "states": documents if has_states else 0, "closed": closed, "open_": open_}, options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems())
def test_results_and_gradients_equal_the_definition(make_inputs, agree, dtype, problem):
    shape, options = problem
    agree(make_inputs(dtype=dtype, **shape), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257])
def test_every_form_of_gate_at_lengths_around_chunks(make_inputs, agree, form, length):
    agree(make_inputs(2, length, (4, 2), (5, 3), form=form), **axis(form), scale=0.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [1 / 16, 3.0, 30.0, 1000.0])
def test_gates_of_any_strength(make_inputs, agree, form, strength):
    agree(make_inputs(2, 130, form=form, strength=strength, dtype=torch.float32), **axis(form))


@pytest.mark.parametrize("form", FORMS)
def test_gates_that_are_closed_or_open_among_others(make_inputs, agree, form):
    agree(make_inputs(2, 130, form=form, closed=0.1, open_=0.3), **axis(form))


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_with_a_state_each(make_inputs, agree, form):
    bounds = int32(0, 0, 3, 3, 140, 141, 205, 290, 290)
    agree(make_inputs(1, 290, (4, 2), form=form, states=8, closed=0.05), **axis(form), cu_seqlens=bounds)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_finite_differences(make_inputs, form):
    inputs = make_inputs(1, 5, (2, 1), (2, 3), form=form, bonus=True)
    inputs["log_decay"] -= 0.1
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}

    def function(*values):
        return gated_recurrence(**dict(zip(leaves, values, strict=True)), **axis(form), scale=0.7)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_packed_documents_equal_the_same_documents_alone(make_inputs, assert_close):
    inputs, bounds = make_inputs(1, 290, (4, 2), states=6), [0, 3, 3, 140, 141, 290, 290]
    out, states = gated_recurrence(**inputs, cu_seqlens=int32(*bounds))
    initial = inputs.pop("initial_state")
    for number, (begin, end) in enumerate(pairwise(bounds)):
        document = {name: x[:, begin:end] for name, x in inputs.items()}
        alone = gated_recurrence(**document, initial_state=initial[number : number + 1])
        packed = out[:, begin:end], states[number : number + 1]
        assert_close(dict(zip("os", packed, strict=True)), dict(zip("os", alone, strict=True)), 1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_crosses_a_closed_gate_not_even_what_overflowed(make_inputs, form):
    inputs = make_inputs(1, 100, form=form, dtype=torch.float32)
    inputs["log_decay"][:, 70] = -torch.inf
    after, state = gated_recurrence(**inputs, **axis(form))
    inputs["initial_state"] *= 1e30
    inputs["v"][:, :70] *= 1e30
    again, same_state = gated_recurrence(**inputs, **axis(form))
    assert torch.equal(after[:, 70:], again[:, 70:])
    assert torch.equal(state, same_state)


def test_open_gates_are_plain_linear_attention(make_inputs, assert_close):
    inputs = make_inputs(2, 150, open_=1.0, states=0)
    scores = torch.einsum("bihd,bjhd->bhij", inputs["q"], inputs["k"]).tril()
    out, state = gated_recurrence(**inputs)
    expected = {
        "out": torch.einsum("bhij,bjhd->bihd", scores, inputs["v"]),
        "state": torch.einsum("bthk,bthv->bhkv", inputs["k"], inputs["v"]),
    }
    assert_close({"out": out, "state": state}, expected, 1e-12)


@pytest.mark.parametrize("states", [None, 0], ids=["a state", "no state"])
def test_no_tokens_and_no_rows_pass_the_state_on(make_inputs, out_and_gradients, states):
    for inputs in (make_inputs(2, 0, states=states), make_inputs(0, 5, states=states)):
        results = out_and_gradients(gated_recurrence, inputs)
        assert results["out"].numel() == 0
        expected = inputs.get("initial_state", torch.zeros_like(results["state 0"]))
        assert torch.equal(results["state 0"], expected)
        assert all((results[name] == 0).all() for name in ("q", "k", "v", "log_decay"))


def test_the_state_goes_on_where_it_was_left(make_inputs, assert_close):
    inputs = make_inputs(2, 150, (4, 2), bonus=True)
    out, state = gated_recurrence(**inputs)
    initial, bonus = inputs.pop("initial_state"), inputs.pop("bonus")
    outs, current = [], initial
    for begin, end in pairwise([0, 1, 70, 134, 150]):
        part, current = gated_recurrence(
            **{name: x[:, begin:end] for name, x in inputs.items()}, bonus=bonus, initial_state=current
        )
        outs.append(part)
    assert_close({"out": torch.cat(outs, 1), "state": current}, {"out": out, "state": state}, 1e-13)


def test_inputs_of_any_strides_are_read_right_and_left_untouched(make_inputs, agree):
    inputs = make_inputs(2, 70, (2, 1), (6, 6))
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    agree(strided)
    assert all(torch.equal(strided[name], inputs[name]) for name in inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_rounding_its_results(make_inputs, assert_close, out_and_gradients, dtype):
    inputs = make_inputs(1, 200, (4, 2), dtype=dtype)
    results = out_and_gradients(gated_recurrence, inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    assert results["out"].dtype == results["q"].dtype == dtype
    assert results["state 0"].dtype == results["log_decay"].dtype == torch.float32
    assert_close(results, out_and_gradients(gated_recurrence_reference, wide), torch.finfo(dtype).eps)


@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_step_equals_the_definition_and_updates_its_state_in_place(make_inputs, assert_close, form, length, bonus):
    inputs = make_inputs(2, length, (4, 2), (5, 3), form=form, closed=0.1, bonus=bonus)
    expected = gated_recurrence_reference(**inputs, **axis(form), scale=0.5)
    state = inputs.pop("initial_state")
    out = gated_recurrence_step(**inputs, state=state, **axis(form), scale=0.5)
    actual = {"out": out, "state": state}
    assert_close(actual, dict(zip(actual, expected, strict=True)), 1e-12)
