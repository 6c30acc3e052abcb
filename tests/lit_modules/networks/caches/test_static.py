"""The cache of fixed room: what it holds, what it refuses, and that nothing of it moves."""

import pytest
import torch

from kernels import forgetting_attention
from lit_modules.networks.caches import AttentionCacheLayer, StaticAttentionCacheLayer


def tokens(count: int, seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, count, heads, 8, generator=generator) for heads in (4, 2, 2))


def test_attention_over_it_equals_attention_over_a_cache_that_grows():
    static, growing = StaticAttentionCacheLayer(12), AttentionCacheLayer()
    kv_start = torch.tensor([0, 2], dtype=torch.int32)
    for seed, count in enumerate((5, 1, 3, 1, 2)):
        q, k, v = tokens(count, seed)
        keys, values, held = static.update(k, v)
        assert keys.shape == (2, 12, 2, 8)
        assert held.dtype == torch.int32
        assert held.tolist() == [static.get_seq_length()] * 2
        out = forgetting_attention(q, keys, values, kv_start=kv_start, kv_end=held)
        keys, values, _ = growing.update(k, v)
        right = forgetting_attention(q, keys, values, kv_start=kv_start)
        torch.testing.assert_close(out, right)
    assert static.get_seq_length() == growing.get_seq_length() == 12


def test_more_than_it_has_room_for_is_refused_before_anything_is_written():
    cache = StaticAttentionCacheLayer(4)
    _, k, v = tokens(3, 0)
    cache.update(k, v)
    held = cache.keys.clone()
    with pytest.raises(ValueError, match=r"5 tokens are more than the cache's capacity=4"):
        cache.update(k[:, :2], v[:, :2])
    assert torch.equal(cache.keys, held)
    assert cache.get_seq_length() == 3
    assert cache.get_max_length() == 4


def test_a_repeated_call_reads_its_place_from_the_device():
    cache = StaticAttentionCacheLayer(6)
    _, k, v = tokens(6, 0)
    cache.update(k[:, :2], v[:, :2])
    storage = cache.keys.data_ptr(), cache.values.data_ptr(), cache.held.data_ptr(), cache.place.data_ptr()
    for t in range(2, 6):
        cache.length = 2  # as the host of a replayed graph leaves it
        cache.update(k[:, t : t + 1], v[:, t : t + 1])
    assert torch.equal(cache.keys, k)
    assert torch.equal(cache.values, v)
    assert cache.held.tolist() == [6, 6]
    assert storage == (
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.held.data_ptr(),
        cache.place.data_ptr(),
    )


def test_tokens_are_taken_back_and_rows_are_chosen():
    cache = StaticAttentionCacheLayer(6)
    _, k, v = tokens(4, 0)
    cache.update(k, v)
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    _, new_k, new_v = tokens(1, 1)
    keys, _, held = cache.update(new_k, new_v)
    assert held.tolist() == [4, 4]
    assert torch.equal(keys[:, :4], torch.cat((k[[1, 1], :3], new_k), 1))
    cache.crop(2)
    assert cache.get_seq_length() == 2
    assert cache.held.tolist() == [2, 2]
    cache.reset()
    keys, _, held = cache.update(new_k, new_v)
    assert held.tolist() == [1, 1]
    assert torch.equal(keys[:, :1], new_k)


def test_what_is_held_is_told_for_each_of_the_rows_that_are_left():
    cache = StaticAttentionCacheLayer(6)
    _, k, v = tokens(3, 0, batch=4)
    cache.update(k, v)
    for change, argument, rows in (
        (cache.batch_select_indices, torch.tensor([2]), [2]),
        (cache.batch_repeat_interleave, 3, [2, 2, 2]),
    ):
        change(argument)
        _, new_k, new_v = tokens(1, 1, batch=len(rows))
        keys, _, held = cache.update(new_k, new_v)
        assert held.tolist() == [cache.get_seq_length()] * len(rows)
        assert torch.equal(keys[:, :3], k[rows])


def test_a_cache_that_is_reset_takes_its_whole_capacity_again_at_the_same_address():
    cache = StaticAttentionCacheLayer(4)
    states = torch.ones(2, 4, 1, 8)
    keys, _, held = cache.update(states, states)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert held.tolist() == [0, 0]
    again, _, held = cache.update(states, states)
    assert cache.get_seq_length() == 4
    assert again.data_ptr() == keys.data_ptr()
    assert held.tolist() == [4, 4]
