"""Which tokens keep 16 bits: held to the rule of the LogQuant paper, appended to one token at a time."""

import copy
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import SettingError
from lit_modules.networks.caches import log_sparse_positions
from lit_modules.networks.caches.selection import POLICIES, Schedule, kept_positions

policies = st.sampled_from(POLICIES)


def one_by_one(keep, length, window, first):
    """Apply a policy's rule to one token after another; return the released tokens in order, and the list."""
    released, held = [], []
    for position in range(length):
        held.append(position)
        if keep == "log_sparse" and len(held) == 3 * window:
            released += held[1 : 2 * window : 2]
            held = held[0 : 2 * window : 2] + held[2 * window :]
        elif keep == "recent" and len(held) > window:
            released.append(held.pop(0))
        elif keep == "first_and_recent" and len(held) > first + window:
            released.append(held.pop(first))
    return released, held


def test_the_papers_example_with_a_window_of_four():
    assert [position + 1 for position in log_sparse_positions(12, 4)] == [1, 3, 5, 7, 9, 10, 11, 12]
    assert [position + 1 for position in log_sparse_positions(16, 4)] == [1, 5, 9, 11, 13, 14, 15, 16]
    assert [position + 1 for position in log_sparse_positions(15, 4)] == [1, 3, 5, 7, 9, 10, 11, 12, 13, 14, 15]
    assert log_sparse_positions(0, 4) == []
    assert log_sparse_positions(1, 1) == [0]


@given(st.integers(0, 400), st.integers(1, 40))
def test_positions_are_those_of_the_rule_one_by_one(length, window):
    assert log_sparse_positions(length, window) == one_by_one("log_sparse", length, window, 0)[1]


@given(policies, st.lists(st.integers(0, 60), max_size=12), st.integers(1, 12), st.integers(0, 5), st.integers(1, 20))
def test_any_division_into_chunks_releases_the_same_tokens_in_the_same_order(keep, chunks, window, first, block):
    schedule, packed = Schedule(keep, window, first, block), []
    for chunk in chunks:
        step = schedule.advance(chunk)
        assert len(step.packed) % block == 0
        packed += step.packed.tolist()
        released, held = one_by_one(keep, schedule.length, window, first)
        assert packed + step.waiting.tolist() == released
        assert step.kept.tolist() == held
        assert len(step.waiting) < block
        assert len(packed) == schedule.packed


@given(policies, st.integers(0, 300), st.integers(0, 300), st.integers(1, 9), st.integers(0, 3), st.integers(1, 30))
def test_a_rewound_schedule_is_the_one_before_and_stops_at_a_packed_block(keep, length, more, window, first, block):
    schedule = Schedule(keep, window, first, block)
    before = schedule.advance(length)
    later, again = copy.copy(schedule), copy.copy(schedule)
    after = later.advance(more)
    in_16_bits = set(after.kept) | set(after.waiting)
    if len(after.packed):
        assert later.earliest > length
        with pytest.raises(ValueError, match=f"cut to {later.earliest} or more"):
            later.rewind(length)
        later.rewind(later.earliest)
        assert Schedule(keep, window, first, block, later.earliest - 1).packed < later.packed
        return
    step = later.rewind(length)
    assert later == again
    assert len(step.packed) == 0
    assert step.kept.tolist() == before.kept.tolist()
    assert step.waiting.tolist() == before.waiting.tolist()
    assert (set(step.kept) | set(step.waiting)) <= in_16_bits


def test_long_prompts_are_quick():
    start = time.perf_counter()
    assert len(log_sparse_positions(131_072, 1)) == 2
    assert 2 * 64 <= len(log_sparse_positions(131_072, 64)) < 3 * 64
    step = Schedule("log_sparse", 64).advance(131_072)
    assert np.unique(np.concatenate((step.packed, step.waiting, step.kept))).tolist() == list(range(131_072))
    assert time.perf_counter() - start < 2


def test_each_window_back_has_half_as_many_and_the_oldest_but_the_first_token_are_gone():
    windows = np.array(log_sparse_positions(1000 * 64, 64)) // 64
    assert [int((windows == 999 - back).sum()) for back in range(8)] == [64, 32, 16, 8, 4, 2, 1, 0]
    assert int((windows == 0).sum()) == 1
    assert len(windows) == 128


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: log_sparse_positions(5, 0), "window=0: give a whole number, 1 or more"),
        (lambda: log_sparse_positions(-1, 4), "length=-1: give a whole number, 0 or more"),
        (lambda: log_sparse_positions(5, 2.5), "window=2.5: give a whole number, 1 or more"),
        (lambda: kept_positions("newest", 5, 2), "keep=newest: give one of log_sparse, recent, first_and_recent"),
        (lambda: Schedule("recent", 4, block=0), "block=0: give a whole number, 1 or more"),
        (lambda: Schedule("recent", 4).advance(-3), "tokens=-3: give a whole number, 0 or more"),
        (lambda: Schedule("recent", 4, length=3).rewind(5), "length=5: give a whole number, from 0 to 3"),
    ],
)
def test_a_mistake_is_one_line(call, line):
    with pytest.raises(SettingError) as caught:
        call()
    assert str(caught.value) == line
