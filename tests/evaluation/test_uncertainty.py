"""Means, paired differences and their standard errors against values computed by hand."""

import pytest

from evaluation.uncertainty import Estimate, is_decided, mean, mean_of_means, paired_difference, pooled


def test_a_mean_and_its_standard_error():
    assert mean([1.0, 2.0, 3.0, 4.0]) == (2.5, pytest.approx((5 / 3 / 4) ** 0.5))
    assert mean([7.0]) == (7.0, None)


def test_what_both_have_in_common_leaves_a_paired_difference():
    hard = [0.0, 10.0, 100.0]
    found = paired_difference([value + extra for value, extra in zip(hard, (1.0, 2.0, 3.0), strict=True)], hard)
    assert found == (2.0, pytest.approx(3**-0.5))
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([1.0, 2.0], [1.0])


def test_a_mean_of_means_adds_their_variances():
    assert mean_of_means([Estimate(1.0, 3.0), Estimate(2.0, 4.0)]) == (1.5, pytest.approx(2.5))
    assert mean_of_means([Estimate(1.0, 3.0), Estimate(2.0, None)]) == (1.5, None)
    assert pooled([0.3, 0.4]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("difference", "decided"),
    [((1.0, 0.5), True), ((-1.0, 0.5), True), ((0.9, 0.5), False), ((1.0, None), False), ((0.0, 0.0), False)],
)
def test_a_difference_within_two_standard_errors_is_undecided(difference, decided):
    assert is_decided(Estimate(*difference)) is decided
