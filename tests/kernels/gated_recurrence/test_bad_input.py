"""Invalid input raises one line that says what was given and what is needed."""

import pytest
import torch

from kernels import gated_recurrence, gated_recurrence_step, gated_slot_attention


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def changed(name, change):
    return lambda inputs: inputs | {name: change(inputs[name])}


def with_options(**options):
    return lambda inputs: inputs | options


# q [2, 6, 4, 8], k [2, 6, 2, 8], v [2, 6, 2, 5], log_decay [2, 6, 2, 8], float32.
REFUSED = {
    "q of three axes": (changed("q", lambda q: q[0]), r"q has shape \[6, 4, 8\].*\[batch, time, heads, head_dim\]"),
    "a v without channels": (changed("v", lambda v: v[..., :0]), "v has shape.*at least one head and one channel"),
    "integers": (changed("q", lambda q: q.int()), "q is torch.int32.*float16, bfloat16, float32 or float64"),
    "mixed dtypes": (changed("v", lambda v: v.bfloat16()), "v is torch.bfloat16.*q is torch.float32"),
    "another device": (changed("k", lambda k: k.to("meta")), "k is .* on meta but q is torch.float32 on cpu"),
    "unequal batches": (changed("k", lambda k: k[:1]), r"k \[1, 6, 2, 8\]; batch and time must agree"),
    "k and v of two lengths": (changed("v", lambda v: v[:, :5]), r"v \[2, 5, 2, 5\]; batch and time must agree"),
    "head_dim of k": (changed("k", lambda k: k[..., :5]), "q has head_dim 8 but k has 5"),
    "heads that do not divide": (changed("k", lambda k: k[:, :, :1].repeat(1, 1, 3, 1)), "k has 3 heads.*4 heads of q"),
    "v of other heads": (changed("v", lambda v: v[:, :, :1]), "v has 1 heads but k has 2; they share states"),
    "gates of query heads": (
        changed("log_decay", lambda g: torch.cat([g, g], 2)),
        r"log_decay has shape \[2, 6, 4, 8\].*heads of k\] \[2, 6, 2\], or \[2, 6, 2, 8\] for each key channel",
    ),
    "gates on the other axis": (with_options(decay_axis="value"), r"\[2, 6, 2, 5\] for each value channel"),
    "an axis of no name": (with_options(decay_axis="keys"), 'decay_axis=\'keys\'.*"key" or "value"'),
    "gates in bfloat16": (changed("log_decay", lambda g: g.bfloat16()), "bfloat16.*compute log_decay in float32"),
    "gates elsewhere": (changed("log_decay", lambda g: g.to("meta")), "log_decay is on meta but q is on cpu"),
    "gates over 1": (changed("log_decay", lambda g: -g), "log_decay holds .*0 or less"),
    "gates that are NaN": (changed("log_decay", lambda g: g * torch.nan), "log_decay holds nan.*0 or less"),
    "a bonus of key heads": (with_options(bonus=torch.ones(2, 8)), r"bonus is .* \[2, 8\].*\[4, 8\]"),
    "a bonus of integers": (with_options(bonus=torch.ones(4, 8, dtype=torch.int32)), "bonus is torch.int32"),
    "a bonus elsewhere": (with_options(bonus=torch.ones(4, 8, device="meta")), "bonus is on meta but q is on cpu"),
}
REFUSED_STATES = {
    "a state of another batch": (lambda state: state[:1], r"{} has shape \[1, 2, 8, 5\].*\[2, 2, 8, 5\]"),
    "a state turned": (lambda state: state.mT, r"{} has shape \[2, 2, 5, 8\].*\[2, 2, 8, 5\]"),
    "a state in bfloat16": (lambda state: state.bfloat16(), "{} is torch.bfloat16.*must be torch.float32"),
    "a state elsewhere": (lambda state: state.to("meta"), "{} is torch.float32 on meta"),
}
REFUSED_OPTIONS = {
    "int64 bounds": ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens is torch.int64.*must be int32"),
    "bounds as a matrix": ({"cu_seqlens": int32(0, 6)[None]}, r"cu_seqlens is torch.int32 of shape \[1, 2\]"),
    "one bound": ({"cu_seqlens": int32(0)}, "cu_seqlens has 1 entries.*N \\+ 1"),
    "bounds that begin late": ({"cu_seqlens": int32(1, 6)}, "runs from 1 to 6; it must run from 0 to 6"),
    "bounds that end early": ({"cu_seqlens": int32(0, 5)}, "runs from 0 to 5; it must run from 0 to 6"),
    "bounds that decrease": ({"cu_seqlens": int32(0, 4, 2, 6)}, "decreases at entry 2"),
    "bounds elsewhere": ({"cu_seqlens": int32(0, 6).to("meta")}, "cu_seqlens is on meta but q is on cpu"),
    "a negative budget": ({"memory_budget": -1}, "memory_budget=-1"),
}


def refused(function, message, inputs):
    with pytest.raises(ValueError, match=message) as refusal:
        function(**inputs)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def inputs(make_inputs):
    return make_inputs(2, 6, (4, 2), (8, 5), states=0, dtype=torch.float32)


@pytest.fixture
def state():
    return torch.zeros(2, 2, 8, 5)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line(inputs, state, case):
    change, message = REFUSED[case]
    refused(gated_recurrence, message, change(inputs))
    refused(gated_recurrence_step, message, change(inputs) | {"state": state})


@pytest.mark.parametrize("case", REFUSED_STATES)
def test_bad_states_are_refused_in_one_line(inputs, state, case):
    change, message = REFUSED_STATES[case]
    refused(gated_recurrence, message.format("initial_state"), inputs | {"initial_state": change(state)})
    refused(gated_recurrence_step, message.format("state"), inputs | {"state": change(state)})


def test_a_step_refuses_a_state_it_cannot_write_in_place(inputs, state):
    state = state.mT.contiguous().mT
    refused(gated_recurrence_step, "state has strides .* must be contiguous", inputs | {"state": state})


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_bad_options_are_refused_in_one_line(make_inputs, case):
    options, message = REFUSED_OPTIONS[case]
    inputs = make_inputs(1, 6, states=0, dtype=torch.float32)
    refused(gated_recurrence, message, inputs | options)
    refused(gated_slot_attention, message, inputs | {"slots": inputs["k"]} | options)


def test_documents_of_a_batch_are_refused(inputs):
    refused(gated_recurrence, "cu_seqlens was given with batch 2", inputs | {"cu_seqlens": int32(0, 6)})


def test_float64_inputs_need_a_float64_state(make_inputs):
    inputs = make_inputs(2, 6)
    inputs["initial_state"] = inputs["initial_state"].float()
    refused(gated_recurrence, "initial_state is torch.float32.*must be torch.float64", inputs)


REFUSED_SLOTS = {
    "slots of other heads": (changed("slots", lambda s: s[:, :, :1]), "slots has 1 heads but k has 2"),
    "slots of another length": (changed("slots", lambda s: s[:, :5]), "slots .*batch and time must agree"),
    "slots of another dtype": (changed("slots", lambda s: s.double()), "slots is torch.float64"),
    "gates of keys": (changed("log_decay", lambda g: g[..., :4]), r"\[2, 6, 2, 5\] for each slot"),
    "one state": (with_options(initial_state=torch.zeros(2, 2, 8, 5)), "initial_state must be two tensors"),
    "a wrong first state": (
        with_options(initial_state=(torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 5, 3))),
        r"initial_state\[0\] has shape \[2, 2, 8, 4\].*\[2, 2, 8, 5\]",
    ),
    "a wrong second state": (
        with_options(initial_state=(torch.zeros(2, 2, 8, 5), torch.zeros(2, 2, 8, 3))),
        r"initial_state\[1\] has shape \[2, 2, 8, 3\].*\[2, 2, 5, 3\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED_SLOTS)
def test_bad_slots_are_refused_in_one_line(make_inputs, case):
    change, message = REFUSED_SLOTS[case]
    inputs = make_inputs(2, 6, (4, 2), (8, 5), form="value", states=0, dtype=torch.float32)
    inputs["slots"], inputs["v"] = inputs["v"], inputs["v"][..., :3]
    refused(gated_slot_attention, message, change(inputs))


def test_values_are_checked_in_a_compiled_call_too(inputs):
    torch.compiler.reset()
    inputs["log_decay"] *= -1
    refused(torch.compile(gated_recurrence, fullgraph=True, backend="eager"), "0 or less", inputs)
