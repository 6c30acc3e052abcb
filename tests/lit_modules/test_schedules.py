import math

import pytest

from lit_modules.schedules import Plateau, WarmupCosine, WarmupLinear, WarmupStableDecay

pytestmark = pytest.mark.core


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


def test_plateau_cuts_after_so_many_validations_without_improvement_and_not_below_the_least():
    schedule = Plateau(factor=0.1, patience=1, least=0.01)
    found = []
    for loss in (3.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5):
        schedule.observe(loss)
        found.append(schedule(12345))
    assert found == [1, 1, 1, *[pytest.approx(0.1)] * 3, *[pytest.approx(0.01)] * 3]


def test_plateau_goes_on_from_its_state_as_if_it_had_not_stopped():
    losses = [3.0, 2.0, 2.5, 2.6, 1.9, 1.95, 1.96, 1.97]
    for stop in range(len(losses)):
        unbroken, first, second = (Plateau(factor=0.5, patience=1) for _ in range(3))
        for loss in losses[:stop]:
            first.observe(loss)
        second.load_state_dict(first.state_dict())
        for loss in losses[stop:]:
            second.observe(loss)
        for loss in losses:
            unbroken.observe(loss)
        assert second(0) == unbroken(0)


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
        (lambda: Plateau(factor=1), "schedule.factor=1"),
        (lambda: Plateau(factor="half"), "schedule.factor=half"),
        (lambda: Plateau(patience=1.5), "schedule.patience=1.5"),
        (lambda: Plateau(least=2), "schedule.least=2"),
    ],
)
def test_lengths_that_cannot_be_are_refused_by_name(make, key):
    with pytest.raises(ValueError, match=key):
        make()
