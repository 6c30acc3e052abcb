"""Attention over slots against its definition: outputs, both states and all gradients."""

from itertools import pairwise

import pytest
import torch

from kernels import gated_slot_attention
from kernels.gated_recurrence import gated_slot_attention_reference


@pytest.fixture(scope="session")
def make_slots(make_inputs):
    """make_slots(...) -> q, k, v, slots and log_decay of the given sizes, as a dict; and the initial states.

    The slots are 1 - gate, as in the paper, where each slot has a gate of its own.
    """

    def make(batch=1, length=8, heads=(2, 2), head_dims=(4, 3), slots=5, *, per_head=False, states=None, **options):
        keys = make_inputs(
            batch, length, heads, (head_dims[0], slots), form="head" if per_head else "value", states=states, **options
        )
        values = make_inputs(batch, length, heads, (slots, head_dims[1]), states=states, seed=7, **options)
        slots = keys["v"] if per_head else -torch.expm1(keys["log_decay"]).to(keys["q"].dtype)
        initial = (keys.pop("initial_state"), values["initial_state"])
        return {**keys, "v": values["v"], "slots": slots}, initial

    return make


@pytest.fixture(scope="session")
def run_slots(out_and_gradients):
    """run_slots(function, inputs, initial, **options): gradients of the initial states, too."""

    def run(function, inputs, initial, **options):
        def whole(first, second, **rest):
            return function(**rest, initial_state=(first, second), **options)

        return out_and_gradients(whole, {**inputs, "first": initial[0], "second": initial[1]})

    return run


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("per_head", [False, True], ids=["gate per slot", "gate per head"])
@pytest.mark.parametrize("length", [1, 64, 100])
def test_results_and_gradients_equal_the_definition(make_slots, run_slots, assert_close, length, per_head):
    inputs, initial = make_slots(2, length, (4, 2), per_head=per_head, closed=0.02, open_=0.1)
    actual = run_slots(gated_slot_attention, inputs, initial, scale=0.5)
    assert_close(actual, run_slots(gated_slot_attention_reference, inputs, initial, scale=0.5), 1e-9)


@pytest.mark.parametrize("per_head", [False, True], ids=["gate per slot", "gate per head"])
def test_packed_documents_have_states_of_their_own(make_slots, run_slots, assert_close, per_head):
    inputs, initial = make_slots(1, 100, per_head=per_head, states=5)
    options = {"cu_seqlens": int32(0, 0, 20, 20, 99, 100)}
    actual = run_slots(gated_slot_attention, inputs, initial, **options)
    assert_close(actual, run_slots(gated_slot_attention_reference, inputs, initial, **options), 1e-9)


def test_without_states_it_begins_with_empty_slots(make_slots, assert_close):
    inputs, initial = make_slots(2, 70)
    zeros = tuple(torch.zeros_like(x) for x in initial)
    names = ("out", "keys", "values")
    out, states = gated_slot_attention(**inputs)
    expected, expected_states = gated_slot_attention(**inputs, initial_state=zeros)
    actual = dict(zip(names, (out, *states), strict=True))
    assert_close(actual, dict(zip(names, (expected, *expected_states), strict=True)), 0.0)


def test_the_states_go_on_where_they_were_left(make_slots, assert_close):
    inputs, states = make_slots(2, 100)
    out, finals = gated_slot_attention(**inputs, initial_state=states)
    outs = []
    for begin, end in pairwise([0, 1, 70, 100]):
        part, states = gated_slot_attention(**{n: x[:, begin:end] for n, x in inputs.items()}, initial_state=states)
        outs.append(part)
    actual = {"out": torch.cat(outs, 1), "keys": states[0], "values": states[1]}
    assert_close(actual, {"out": out, "keys": finals[0], "values": finals[1]}, 1e-12)


def test_the_softmax_is_of_float32_where_inputs_are_bfloat16(make_slots, assert_close):
    inputs, initial = make_slots(2, 100, dtype=torch.bfloat16)
    out, _ = gated_slot_attention(**inputs, initial_state=initial)
    wide = {name: x.double() for name, x in inputs.items()}
    expected, _ = gated_slot_attention_reference(**wide, initial_state=tuple(x.double() for x in initial))
    assert out.dtype == torch.bfloat16
    assert_close({"out": out}, {"out": expected}, 1e-2)
