import math

import pytest

from lit_modules.schedules import WarmupCosine, WarmupLinear, WarmupStableDecay


@pytest.mark.parametrize("schedule", [WarmupCosine(100, 1000, 0.1), WarmupLinear(100, 1000, 0.1)])
def test_warm_up_rises_in_a_line_to_the_peak_and_ends_at_the_final_factor(schedule):
    assert schedule(0) == 0
    assert schedule(50) == 0.5
    assert schedule(100) == 1
    assert schedule(1000) == pytest.approx(0.1)
    assert schedule(5000) == pytest.approx(0.1)  # the last step of a run may reach past its tokens


def test_cosine_and_linear_are_half_way_in_the_middle_of_the_decay():
    assert WarmupCosine(100, 1100)(600) == pytest.approx(0.5)
    assert WarmupCosine(100, 1100)(350) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert WarmupLinear(100, 1100)(350) == pytest.approx(0.75)


def test_stable_decay_stays_at_the_peak_and_then_falls_as_one_minus_a_root():
    schedule = WarmupStableDecay(100, 400, 1000)
    assert [schedule(t) for t in (50, 100, 400, 600)] == [0.5, 1, 1, 1]
    assert schedule(700) == pytest.approx(1 - math.sqrt(0.25))
    assert schedule(1000) == 0
    assert schedule(5000) == 0


def test_without_a_decay_the_peak_rate_stays_past_the_end():
    schedule = WarmupStableDecay(100, 0, 1000, final=0.1)
    assert [schedule(t) for t in (50, 100, 999, 1000, 1001, 5000)] == [0.5, 1, 1, 1, 1, 1]


def test_without_a_warm_up_the_first_token_has_the_peak_rate():
    assert WarmupCosine(0, 100)(0) == 1
    assert WarmupStableDecay(0, 0, 100)(99) == 1


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: WarmupCosine(2000, 1000), "schedule.warmup_tokens=2000"),
        (lambda: WarmupCosine(-1, 1000), "schedule.warmup_tokens=-1"),
        (lambda: WarmupCosine("many", 1000), "schedule.warmup_tokens=many"),
        (lambda: WarmupCosine(0, 0), "max_tokens=0"),
        (lambda: WarmupStableDecay(600, 600, 1000), "schedule.decay_tokens=600"),
    ],
)
def test_lengths_that_cannot_be_are_refused_by_name(make, key):
    with pytest.raises(ValueError, match=key):
        make()
