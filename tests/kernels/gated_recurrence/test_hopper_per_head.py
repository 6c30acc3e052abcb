"""The Hopper scans with a gate per head against the definition: on a Hopper GPU only, in bfloat16."""

import pytest
import torch

from kernels.gated_recurrence import gated_recurrence_reference
from kernels.gated_recurrence.hopper.per_head import WIDTHS
from kernels.gated_recurrence.operator import triton_recurrence

pytestmark = pytest.mark.gpu(needs="Hopper")
TOLERANCE, GATES_TOLERANCE = 5e-3, 1.5e-2


@pytest.fixture
def agree(make_inputs, out_and_gradients, defined, assert_close):
    """agree(sizes, **options): results and all gradients equal the definition in float64."""

    def on_gpu(q, k, v, log_decay, initial_state=None, *, scale=1.0, cu_seqlens=None):
        tensors = (None if x is None else x.cuda() for x in (q, k, v, log_decay, initial_state, cu_seqlens))
        return tuple(x.cpu() for x in triton_recurrence(*tensors, "key", scale, None)[:2])

    def run(batch, length, heads, widths, *, scale=1.0, cu_seqlens=None, **sizes):
        inputs = make_inputs(batch, length, (heads, heads), widths, form="head", dtype=torch.bfloat16, **sizes)
        options = {"scale": scale, "cu_seqlens": cu_seqlens}
        actual = out_and_gradients(on_gpu, inputs, **options)
        expected = defined(gated_recurrence_reference, inputs, **options)
        for name in expected:
            tolerance = GATES_TOLERANCE if name == "log_decay" else TOLERANCE
            assert_close({name: actual[name]}, {name: expected[name]}, tolerance)

    return run


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 700])
def test_lengths_around_chunks_and_over_segments(agree, length, widths):
    agree(2, length, 2, widths, scale=0.3)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("strength", [1 / 64, 3.0, 30.0])
def test_gates_of_any_strength(agree, strength, widths):
    agree(1, 200, 2, widths, strength=strength, scale=0.3)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("states", [6, 0], ids=["a state each", "no states"])
def test_packed_documents_of_no_of_one_and_of_many_tokens(agree, states, widths):
    bounds = torch.tensor([0, 0, 1, 65, 65, 600, 700], dtype=torch.int32)
    agree(1, 700, 2, widths, states=states, cu_seqlens=bounds, scale=0.3)


def test_closed_and_open_gates(agree):
    agree(1, 200, 2, (128, 128), closed=0.1, open_=0.2, scale=0.3)
