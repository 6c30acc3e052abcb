import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokens.order import TrainOrder, ValidationOrder, sequences_at

pytestmark = pytest.mark.core


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 120), st.integers(0, 60))
def test_the_order_is_a_function_of_seed_and_position(total, seed, position, count):
    whole = sequences_at(0, 200, total, seed)
    assert sequences_at(position, count, total, seed).tolist() == whole[position : position + count].tolist()


@given(st.integers(1, 50), st.integers(0, 5))
def test_every_sequence_is_used_once_an_epoch(total, seed):
    for epoch in range(3):
        assert sorted(sequences_at(epoch * total, total, total, seed)) == list(range(total))


def test_epochs_and_seeds_differ():
    orders = [sequences_at(e * 1000, 1000, 1000, s).tolist() for e in range(2) for s in range(2)]
    assert len({tuple(order) for order in orders}) == 4


def global_batches(world_size, micro_batch_size, start=0, steps=6, total=37, batch=16):
    accumulate = batch // (world_size * micro_batch_size)
    ranks = [
        list(TrainOrder(total, 3, micro_batch_size, steps * accumulate, start * accumulate, rank, world_size))
        for rank in range(world_size)
    ]
    return [
        sorted(i for rank in ranks for micro in rank[s * accumulate : (s + 1) * accumulate] for i in micro)
        for s in range(steps - start)
    ]


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 2), (2, 2), (4, 2), (4, 4), (1, 16), (8, 1)])
def test_global_batches_do_not_depend_on_devices_or_micro_batches(world_size, micro_batch_size):
    assert global_batches(world_size, micro_batch_size) == global_batches(1, 1)


def test_a_resumed_order_goes_on_where_an_unbroken_one_would():
    assert global_batches(2, 4, start=4) == global_batches(2, 4)[4:]


def test_a_resumed_order_has_the_length_of_the_whole_run():
    assert len(TrainOrder(37, 0, 2, 100, 60, 0, 1)) == 100


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_validation_is_dealt_once_and_evenly(total, batch_size, world_size):
    ranks = [list(ValidationOrder(total, batch_size, rank, world_size)) for rank in range(world_size)]
    orders = [ValidationOrder(total, batch_size, rank, world_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(len(order) == len(rank) for order, rank in zip(orders, ranks, strict=True))
    assert all(len(batch) == batch_size for rank in ranks for batch in rank)
    dealt = np.array([i for rank in ranks for batch in rank for i in batch])
    assert sorted(dealt[dealt >= 0]) == list(range(total))
