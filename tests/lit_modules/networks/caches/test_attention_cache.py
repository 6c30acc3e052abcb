"""The full attention cache: holds what it was given, in place, and can be rewound, reordered and repeated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_modules.networks.caches import AttentionCacheLayer
from lit_modules.networks.caches.attention import REWINDABLE


def states(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, length, 2, 3, generator=generator, dtype=torch.float64)
    return k, v, -torch.rand(batch, length, 2, generator=generator, dtype=torch.float64)


def fill(cache: AttentionCacheLayer, given: tuple[torch.Tensor, ...], sizes: list[int], shift: bool = True):
    held = None
    for k, v, log_forget in zip(*(x.split(sizes, dim=1) for x in given), strict=True):
        if shift:
            cache.update_unshifted(k, v)
        held = cache.update(k, v, log_forget)
    return held


def assert_holds(held: tuple[torch.Tensor, ...], k: torch.Tensor, v: torch.Tensor, log_forget: torch.Tensor) -> None:
    assert_close(held[:2], (k, v), rtol=0, atol=0)
    c = log_forget.cumsum(1)
    assert_close(held[2] - held[2][:, -1:], c - c[:, -1:], rtol=0, atol=1e-9)  # sums, up to where they start


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_whatever_the_steps_the_cache_holds_every_token(sizes):
    given_states = states(2, sum(sizes))
    cache = AttentionCacheLayer()
    assert_holds(fill(cache, given_states, sizes), *given_states)
    assert cache.get_seq_length() == sum(sizes)
    assert cache.get_mask_sizes(3) == (sum(sizes) + 3, 0)


def test_storage_grows_by_doubling_and_is_written_in_place():
    cache, places = AttentionCacheLayer(), set()
    for step in range(2000):
        cache.update(*states(1, 1, seed=step))
        places.add(cache.keys.shape[1])
    assert len(places) <= 7
    assert cache.keys.shape[1] < 2 * 2000 + REWINDABLE


def test_float32_sums_of_strong_gates_stay_exact_near_the_newest_token():
    log_forget = -20 * torch.rand(1, 20_000, 2, generator=torch.Generator().manual_seed(0))
    exact = log_forget.double().cumsum(1)
    cache = AttentionCacheLayer()
    for piece in log_forget.split([15_000] + [1] * 5_000, dim=1):
        held = cache.update(piece.new_zeros(1, piece.shape[1], 2, 1), piece.new_zeros(1, piece.shape[1], 2, 1), piece)
    near = held[2][:, -50:] - held[2][:, -1:]
    assert_close(near.double(), exact[:, -50:] - exact[:, -1:], rtol=1e-5, atol=2e-3)
    plain = log_forget.cumsum(1)
    assert (plain[:, -50:] - plain[:, -1:] - (exact[:, -50:] - exact[:, -1:])).abs().max() > 1e-2


@pytest.mark.parametrize("removed", [0, 1, 5, 40])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_come(removed):
    given_states = states(2, 60)
    cache = AttentionCacheLayer()
    fill(cache, given_states, [20] + [1] * 40)
    cache.crop(-removed)
    kept = 60 - removed
    k, v, log_forget = (x[:, :kept] for x in given_states)
    new_k, new_v, new_gate = states(2, 2, seed=9)
    last = cache.update_unshifted(new_k, new_v)
    assert_close(last, (k[:, -1], v[:, -1]), rtol=0, atol=0)
    held = cache.update(new_k, new_v, new_gate)
    assert_holds(held, torch.cat((k, new_k), 1), torch.cat((v, new_v), 1), torch.cat((log_forget, new_gate), 1))


def test_a_positive_crop_is_the_length_to_keep():
    cache = AttentionCacheLayer()
    fill(cache, states(1, 10), [10])
    cache.crop(7)
    assert cache.get_seq_length() == 7
    cache.crop(9)
    assert cache.get_seq_length() == 7


def test_cropping_further_than_the_shift_can_go_back_is_refused_and_recording_allows_it():
    cache = AttentionCacheLayer()
    fill(cache, states(1, 200), [200])
    with pytest.raises(ValueError, match=r"crop\(-100\) takes back 100 tokens, but KV-shift can take back 63"):
        cache.crop(-100)
    assert cache.get_seq_length() == 200
    cache.reset()
    cache.activate_past_recording()
    k, v, _ = given_states = states(1, 200)
    fill(cache, given_states, [200])
    cache.crop(-100)
    assert_close(cache.update_unshifted(*states(1, 1)[:2]), (k[:, 99], v[:, 99]), rtol=0, atol=0)


def test_without_the_shift_any_crop_is_possible():
    cache = AttentionCacheLayer()
    fill(cache, states(1, 200), [200], shift=False)
    cache.crop(-199)
    assert cache.get_seq_length() == 1


def test_cropping_everything_leaves_an_empty_cache():
    cache = AttentionCacheLayer()
    fill(cache, states(2, 5), [5])
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    given_states = states(3, 4)  # another batch size fits, nothing is left
    assert_holds(fill(cache, given_states, [4]), *given_states)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_rows_move_with_their_shift_and_gates(change, rows):
    given_states = states(3, 8)
    cache = AttentionCacheLayer()
    fill(cache, given_states, [5, 3])
    change(cache)
    k, v, log_forget = (x[rows] for x in given_states)
    new_k, new_v, new_gate = states(len(rows), 1, seed=4)
    assert_close(cache.update_unshifted(new_k, new_v), (k[:, -1], v[:, -1]), rtol=0, atol=0)
    held = cache.update(new_k, new_v, new_gate)
    assert_holds(held, torch.cat((k, new_k), 1), torch.cat((v, new_v), 1), torch.cat((log_forget, new_gate), 1))


def test_positions_move_with_their_rows_and_go_with_their_tokens():
    cache, positions = AttentionCacheLayer(), torch.stack([torch.arange(300) + 1000 * row for row in range(3)])
    for new, (k, v) in zip(positions.split([200, 1, 99], 1), (states(3, n)[:2] for n in (200, 1, 99)), strict=True):
        held = cache.update_positions(new)
        cache.update(k, v)
    assert held.tolist() == positions.tolist()
    cache.crop(-50)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    held = cache.update_positions(torch.tensor([[7], [8], [9]]))
    assert held.tolist() == [[*positions[row, :250].tolist(), new] for row, new in ((2, 7), (0, 8), (2, 9))]
    cache.reset()
    assert cache.update_positions(positions[:, :2]).tolist() == positions[:, :2].tolist()


def test_keys_and_values_may_differ_in_heads_and_width():
    k, v = torch.randn(2, 5, 1, 3), torch.randn(2, 5, 4, 7)
    cache = AttentionCacheLayer()
    for pieces in zip(k.split([4, 1], 1), v.split([4, 1], 1), strict=True):
        held = cache.update(*pieces)
    assert_close(held[:2], (k, v), rtol=0, atol=0)


def test_an_empty_cache_can_be_reordered_reset_and_cropped():
    cache = AttentionCacheLayer()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.get_max_length() == -1


def test_without_gates_no_sums_are_kept():
    k, v, _ = states(1, 4)
    cache = AttentionCacheLayer()
    assert cache.update(k, v)[2] is None
    assert cache.cumulative is None


def test_what_is_cached_carries_no_graph():
    k, v, log_forget = (x.requires_grad_() for x in states(1, 4))
    cache = AttentionCacheLayer()
    cache.update_unshifted(k, v)
    assert not any(x.requires_grad for x in cache.update(k, v, log_forget))
    assert not any(x.requires_grad for x in cache.unshifted)


def test_a_prompt_does_not_stay_in_memory_for_the_shift():
    cache = AttentionCacheLayer()
    fill(cache, states(1, 5000), [5000])
    assert cache.unshifted[0].untyped_storage().nbytes() == REWINDABLE * 2 * 3 * 8
