from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.mixtures.plan import Available, phase_ends, plan, read_phases

pytestmark = pytest.mark.core

LENGTH = 10  # tokens in a sequence


def planned(ends, weights, limits=None):
    phases = read_phases([{"tokens": 1} for _ in ends])
    limits = limits or [None] * len(weights[0])
    components = [Available(f"c{number}", limit) for number, limit in enumerate(limits)]
    weights = [[Fraction(weight) for weight in row] for row in weights]
    return plan(phases, ends, weights, components, LENGTH)


def counts(*arguments, **settings):
    return [phase.counts for phase in planned(*arguments, **settings)]


def test_a_phase_is_shared_out_by_largest_remainder():
    assert counts([10], [[8, 1, 1]]) == [(8, 1, 1)]
    assert counts([7], [[8, 1, 1]]) == [(5, 1, 1)]  # of 5.6, 0.7, 0.7
    assert counts([11], [[1, 1, 1]]) == [(4, 4, 3)]
    assert counts([3], [[1e-9, 1]]) == [(0, 3)]


def test_a_component_goes_on_in_the_next_phase_where_it_was():
    first, second = planned([10, 30], [[8, 2], [1, 1]])
    assert (first.first, first.end, second.first, second.end) == (0, 10, 10, 30)
    assert (first.before, second.before) == ((0, 0), (8, 2))


def test_what_a_capped_component_leaves_is_taken_in_proportion():
    # 50, 30, 20 are asked for; 20 of the 50 are left to the others as 3 to 2.
    assert counts([100], [[5, 3, 2]], [30, None, None]) == [(30, 42, 28)]


def test_a_component_that_takes_up_too_much_is_capped_in_its_turn():
    assert counts([100], [[5, 3, 2]], [30, 35, None]) == [(30, 35, 35)]


def test_a_cap_makes_a_component_smaller_in_all_phases_alike():
    # 40 + 60 are asked for and 50 there: each phase keeps half.
    assert counts([80, 160], [[1, 1], [3, 1]], [50, None]) == [(20, 60), (30, 50)]


def test_rounding_in_several_phases_does_not_pass_a_cap():
    # 11 of 30 are 3 2/3 a phase, which by its remainder alone would be 4 in each.
    assert counts([10, 20, 30], [[1, 1]] * 3, [11, None]) == [(4, 6), (4, 6), (3, 7)]


def test_a_cap_that_is_just_enough_changes_nothing():
    assert counts([100], [[1, 1]], [50, 50]) == [(50, 50)]


def test_a_cap_that_leaves_no_one_to_take_the_rest_is_one_line_with_the_keys():
    # 10 + 40 are asked for and 40 there; phase 1 keeps 8, and phase 2 has no other component for 8 of its 40.
    with pytest.raises(
        ValueError, match=r"phase_2 lacks 80 tokens.* c0 400: raise data\.max_epochs.*max_tokens"
    ) as error:
        planned([20, 60], [[1, 1], [1, 0]], [40, None])
    assert "\n" not in str(error.value)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.data(),
)
def test_phases_are_filled_exactly_and_no_cap_is_passed(lengths, data):
    number = data.draw(st.integers(1, 5))
    weights = [data.draw(st.lists(st.integers(0, 9), min_size=number, max_size=number).filter(any)) for _ in lengths]
    limits = data.draw(st.lists(st.none() | st.integers(0, 120), min_size=number, max_size=number))
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    try:
        found = counts(ends, weights, limits)
    except ValueError:
        assert any(limit is not None for limit in limits)
        return
    assert [sum(row) for row in found] == lengths
    for limit, column in zip(limits, zip(*found, strict=True), strict=True):
        assert limit is None or sum(column) <= limit
    for row, weight in zip(found, weights, strict=True):
        assert all(not count for count, w in zip(row, weight, strict=True) if not w)
    if all(limit is None for limit in limits):
        for length, row, weight in zip(lengths, found, weights, strict=True):
            assert all(abs(c - length * w / sum(weight)) < 1 for c, w in zip(row, weight, strict=True))


def ends(phases, max_tokens=1000, positions=100):
    return phase_ends(read_phases(phases), max_tokens, positions, LENGTH)


def test_phases_have_their_tokens_and_the_last_the_rest():
    assert ends(None) == [100]
    assert ends([{"tokens": 300}, {"tokens": 700}]) == [30, 100]
    assert ends([{"tokens": 250}, {"tokens": 250}, {}]) == [25, 50, 100]


def test_shares_are_of_the_whole_run_whatever_its_length():
    sigma = [{"share": share} for share in (3.5, 1, 1, 1)]
    assert ends(sigma, 6500, 650) == [350, 450, 550, 650]
    assert ends(sigma, 65, 13) == [7, 9, 11, 13]


def test_a_run_that_is_shorter_than_its_phases_leaves_out_the_last_ones():
    assert ends([{"tokens": 600}, {"tokens": 600}, {"tokens": 600}]) == [60, 100]
    assert ends([{"tokens": 1000}, {}]) == [100]


def test_the_last_step_is_read_to_its_end():
    """995 tokens of a run are 100 sequences where a step has 4."""
    assert ends([{"tokens": 500}, {"tokens": 495}], 995) == [50, 100]


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([{"tokens": 300}, {"tokens": 600}], r"data\.phases have 900 tokens together, fewer than max_tokens=1000"),
        ([{"tokens": 2}, {}], r"data\.phases\[0\] \(phase_1\) is shorter than a sequence of 10 tokens"),
        ([], r"data\.phases=\[\]: give a list"),
        ("general", r"data\.phases=general: give a list"),
        (["general"], r"data\.phases\[0\]=general: give"),
        ([{"tokens": 10}, {"length": 3}], r"data\.phases\[1\]\.length is unknown: a phase has name, tokens"),
        ([{"tokens": 10, "share": 1}], r"data\.phases\[0\] has tokens=10 and share=1"),
        ([{"tokens": 0}], r"data\.phases\[0\]\.tokens=0"),
        ([{"tokens": 1.5}], r"data\.phases\[0\]\.tokens=1\.5"),
        ([{"tokens": "many"}], r"data\.phases\[0\]\.tokens=many"),
        ([{"tokens": float("inf")}], r"data\.phases\[0\]\.tokens=inf"),
        ([{"share": -1}], r"data\.phases\[0\]\.share=-1"),
        ([{"share": 1}, {"tokens": 10}], r"data\.phases\[1\] has no share"),
        ([{}, {"tokens": 10}], r"data\.phases\[0\] has no length"),
        ([{"name": "a", "tokens": 10}, {"name": "a"}], r"two phases named a"),
        ([{"weights": {}}], r"data\.phases\[0\]\.weights=\{\}"),
        ([{"weights": [1]}], r"data\.phases\[0\]\.weights=\[1\]"),
        ([{"weights": {"a": -1, "b": 2}}], r"data\.phases\[0\]\.weights\.a=-1"),
        ([{"weights": {"a": "x"}}], r"data\.phases\[0\]\.weights\.a=x"),
        ([{"weights": {"a": float("nan")}}], r"data\.phases\[0\]\.weights\.a=nan"),
        ([{"weights": {"a": 0, "b": 0}}], r"data\.phases\[0\]\.weights are all 0"),
    ],
)
def test_phases_that_cannot_work_are_one_line_that_names_the_key(phases, words):
    with pytest.raises(ValueError, match=words) as error:
        ends(phases)
    assert "\n" not in str(error.value)
