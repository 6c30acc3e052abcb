import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.mixtures.order import Interleaving, walk

counts = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 90)), min_size=1, max_size=12).filter(any)
# A Fibonacci sequence makes the deepest tree, in which errors add up the most.
DEEP = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610]


@settings(deadline=None)
@given(counts, st.integers(0, 3))
def test_every_sequence_of_every_component_is_placed_once_and_in_turn(counts, seed):
    order = Interleaving(counts, str(seed))
    placed = [order.locate(position) for position in range(order.total)]
    for component, count in enumerate(counts):
        assert [index for found, index in placed if found == component] == list(range(count))


def counts_along(order: Interleaving):
    """Yield by component how many of its sequences come before each position, the end included."""
    seen = Counter()
    yield seen
    for position in range(order.total):
        seen[order.locate(position)[0]] += 1
        yield seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weights", [DEEP, [1] * 20, [1000, 1, 1], [500, 499, 3], [8, 1, 1], [1] + [97] * 9])
def test_every_component_has_its_share_within_the_stated_bound_at_every_position(weights, seed):
    order = Interleaving(weights, str(seed))
    for position, seen in enumerate(counts_along(order)):
        for component, count in enumerate(weights):
            assert abs(seen[component] - position * count / order.total) < 3.4


@pytest.mark.parametrize("weights", [[1, 1], [999, 1], [617, 383]])
def test_two_components_have_their_shares_within_one(weights):
    order = Interleaving([1000 * weight for weight in weights], "")
    for position, seen in enumerate(itertools.islice(counts_along(order), 5000)):
        assert abs(seen[0] - position * weights[0] / sum(weights)) < 1


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [3, 1]])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_sees_one_component_only(weights, ranks):
    order = Interleaving([1000 * weight for weight in weights], "")
    for rank in range(ranks):
        seen = Counter(order.locate(position)[0] for position in range(rank, order.total, ranks))
        for component, weight in enumerate(weights):
            share = seen[component] / seen.total()
            assert share == pytest.approx(weight / sum(weights), rel=0.25)


def test_another_key_gives_another_order():
    orders = [[Interleaving([50, 50], key).locate(n)[0] for n in range(100)] for key in ("0 0", "1 0", "0 1")]
    assert len({tuple(order) for order in orders}) == 3


def test_a_position_outside_is_an_error():
    order = Interleaving([2, 1], "")
    for position in (-1, 3):
        with pytest.raises(IndexError):
            order.locate(position)


def test_a_run_of_trillions_of_tokens_is_located_without_a_table():
    counts = [2_540_000_000, 317_000_000, 317_000_001]
    order, total = Interleaving(counts, "0"), sum(counts)
    for position in (0, total // 3, total - 1):
        component, index = order.locate(position)
        assert abs(index - position * counts[component] / total) < 3.4
        assert 0 <= walk(index, 10**9, "0") < 10**9


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 3))
def test_every_sequence_is_used_once_an_epoch(total, seed):
    for epoch in range(3):
        assert sorted(walk(epoch * total + n, total, str(seed)) for n in range(total)) == list(range(total))


def test_epochs_seeds_and_components_have_orders_of_their_own():
    orders = {tuple(walk(e * 200 + n, 200, key) for n in range(200)) for e in range(2) for key in ("0 a", "0 b", "1 a")}
    assert len(orders) == 6


def test_where_a_sequence_comes_in_an_epoch_is_even():
    """The first place of 4,000 epochs of 10 sequences: 400 each, with a standard deviation of 19."""
    firsts = Counter(walk(10 * epoch, 10, "0") for epoch in range(4000))
    assert all(300 < firsts[n] < 500 for n in range(10))
