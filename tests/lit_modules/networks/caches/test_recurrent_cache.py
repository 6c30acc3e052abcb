"""The recurrent cache: holds the newest state and the last inputs, moves rows, and says what it cannot take back."""

import pytest
import torch
from torch.testing import assert_close

from lit_modules.networks.caches import RecurrentCacheLayer


def filled(batch: int = 3, tokens: int = 8) -> tuple[RecurrentCacheLayer, torch.Tensor, torch.Tensor]:
    cache = RecurrentCacheLayer()
    state, inputs = torch.randn(batch, 2, 4, 5), torch.randn(batch, tokens, 6)
    cache.update_tail("x", inputs, 3)
    cache.update((state,), tokens)
    return cache, state, inputs


def test_it_holds_the_newest_states_and_counts_tokens():
    cache, _, _ = filled(tokens=8)
    newest = torch.randn(3, 2, 4, 5, requires_grad=True), torch.randn(3, 2, 5, 4)
    cache.update(newest, 2)
    assert_close(cache.states, tuple(state.detach() for state in newest))
    assert not any(state.requires_grad for state in cache.states)
    assert cache.get_seq_length() == 10
    assert cache.get_mask_sizes(3) == (13, 0)
    assert cache.get_max_length() == -1


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 4], [5, 3], [8]])
def test_a_tail_is_the_last_inputs_with_zeros_before_the_first(sizes):
    cache, inputs = RecurrentCacheLayer(), torch.randn(2, 8, 6)
    whole = torch.cat((torch.zeros(2, 3, 6), inputs), dim=1)
    seen = 0
    for piece in inputs.split(sizes, dim=1):
        assert_close(cache.update_tail("x", piece, 3), whole[:, seen : seen + 3])
        seen += piece.shape[1]
    assert_close(cache.tails["x"], inputs[:, -3:])


def test_convolutions_have_a_tail_each_and_keep_no_prompt():
    cache = RecurrentCacheLayer()
    cache.update_tail("q", torch.ones(1, 5000, 4), 3)
    cache.update_tail("k", torch.ones(1, 5000, 2, requires_grad=True), 3)
    assert {name: tail.shape[2] for name, tail in cache.tails.items()} == {"q": 4, "k": 2}
    assert cache.tails["q"].untyped_storage().nbytes() == 3 * 4 * 4
    assert not cache.tails["k"].requires_grad


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_rows_move_with_their_tails(change, rows):
    cache, state, inputs = filled()
    change(cache)
    assert_close(cache.states[0], state[rows])
    assert cache.states[0].is_contiguous()  # it is written in place
    assert_close(cache.tails["x"], inputs[rows, -3:])


def test_rows_that_were_one_are_written_apart():
    cache, state, _ = filled()
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    cache.states[0][0] = 0
    assert_close(cache.states[0][1], state[1])


@pytest.mark.parametrize("tokens", [-3, 5])
def test_taking_back_some_tokens_is_refused_in_one_line(tokens):
    cache, _, _ = filled()
    with pytest.raises(
        ValueError, match=rf"crop\({tokens}\) takes back 3 of 8 tokens, which a recurrent state"
    ) as error:
        cache.crop(tokens)
    assert "\n" not in str(error.value)
    assert cache.get_seq_length() == 8
    assert not cache.is_croppable


@pytest.mark.parametrize("tokens", [0, 8, 9])
def test_taking_back_none_leaves_it_as_it_is(tokens):
    cache, state, _ = filled()
    cache.crop(tokens)
    assert cache.get_seq_length() == 8
    assert_close(cache.states[0], state)


def test_taking_back_all_and_a_reset_leave_it_empty():
    for empty in (lambda cache: cache.crop(-8), lambda cache: cache.reset()):
        cache, _, _ = filled()
        empty(cache)
        assert cache.get_seq_length() == 0
        assert cache.states is None
        assert not cache.update_tail("x", torch.ones(5, 1, 6), 3).any()  # another batch size fits, nothing is left


def test_an_empty_cache_can_be_reordered_and_cropped():
    cache = RecurrentCacheLayer()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-3)
    assert cache.get_seq_length() == 0


def test_it_goes_to_the_cpu_and_back():
    cache, state, _ = filled()
    cache.offload()
    cache.prefetch()
    assert_close(cache.states[0], state)
    assert cache.states[0].device == state.device
