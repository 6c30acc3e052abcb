"""RWKV6's bonus: tokens read the previous state, and themselves only by the bonus."""

import pytest
import torch

from kernels import gated_recurrence
from kernels.gated_recurrence import gated_recurrence_reference

FORMS = ["key", "value", "head"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def axis(form):
    return {"decay_axis": "value" if form == "value" else "key"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 65])
def test_results_and_gradients_equal_the_definition(
    make_inputs, assert_close, out_and_gradients, defined, form, length
):
    inputs = make_inputs(2, length, (4, 2), (5, 3), form=form, closed=0.1, open_=0.1, bonus=True)
    actual = out_and_gradients(gated_recurrence, inputs, **axis(form), scale=0.5)
    assert_close(actual, defined(gated_recurrence_reference, inputs, **axis(form), scale=0.5), 1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "bounds", [(0, 0, 3, 3, 70, 71, 80, 80), (0, 80), (0, 1, 80)], ids=["with empty ones", "one", "of one token"]
)
def test_documents_do_not_read_their_neighbours(make_inputs, assert_close, out_and_gradients, defined, form, bounds):
    inputs = make_inputs(1, 80, (4, 2), form=form, states=len(bounds) - 1, bonus=True)
    options = {**axis(form), "cu_seqlens": int32(*bounds)}
    actual = out_and_gradients(gated_recurrence, inputs, **options)
    assert_close(actual, defined(gated_recurrence_reference, inputs, **options), 1e-9)


def test_documents_without_any_token_keep_their_states(make_inputs):
    inputs = make_inputs(1, 0, states=2, bonus=True)
    _, state = gated_recurrence(**inputs, cu_seqlens=int32(0, 0, 0))
    assert torch.equal(state, inputs["initial_state"])


def test_a_bonus_of_one_reads_the_gated_state_and_the_token_whole(make_inputs, assert_close):
    """With open gates S_{t-1} + k_t^T v_t is S_t: the delay and the bonus undo each other."""
    inputs = make_inputs(2, 70, open_=1.0, bonus=True)
    inputs["bonus"].fill_(1.0)
    delayed = gated_recurrence(**inputs)
    del inputs["bonus"]
    actual, expected = (dict(zip(("out", "state"), x, strict=True)) for x in (delayed, gated_recurrence(**inputs)))
    assert_close(actual, expected, 1e-12)


def test_the_first_token_reads_the_initial_state_undecayed(make_inputs, assert_close):
    inputs = make_inputs(1, 1, bonus=True)
    inputs["bonus"].zero_()
    out, _ = gated_recurrence(**inputs)
    assert_close(
        {"out": out[:, 0]}, {"out": torch.einsum("bhk,bhkv->bhv", inputs["q"][:, 0], inputs["initial_state"])}, 1e-12
    )
