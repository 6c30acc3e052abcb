"""Agreement statistics, and the page and pictures that show them."""

import numpy as np
import pytest
from PIL import Image

from data_pipeline.labels.agreement import agreement, weighted_kappa
from data_pipeline.labels.report import draw, page
from data_pipeline.labels.rubric import Label
from data_pipeline.labels.sample import Sampled


def labelled(*entries: tuple[str, str, int]) -> list[tuple[Sampled, Label]]:
    return [(Sampled(str(n), came, "s", "x"), Label(c, q)) for n, (came, c, q) in enumerate(entries)]


def found() -> dict:
    learned = labelled(("a", "debug", 3), ("a", "debug", 3), ("b", "design", 1), ("b", "debug", 0))
    held_out = labelled(("debug", "debug", 3), ("b", "design", 1), ("b", "debug", 5), ("a", "commands", 2))
    return agreement(learned, held_out, ["debug", "design", "design", "debug"], np.array([2.6, 0.4, 5.0, 4.9]))


def test_agreement_is_counted() -> None:
    category, quality = found()["category"], found()["quality"]
    assert category["accuracy"] == 0.5
    assert category["names"] == ["commands", "debug", "design"]
    assert category["confusion"] == [[0, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert category["macro_f1"] == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)
    assert (category["most_frequent"]["label"], category["most_frequent"]["accuracy"]) == ("debug", 0.5)
    assert category["came_with"]["accuracy"] == 0.25
    assert (quality["exact"], quality["within_one"]) == (0.5, 0.75)
    assert quality["mean_error"] == pytest.approx((0.4 + 0.6 + 0 + 2.9) / 4)
    assert quality["most_frequent"]["label"] == 3
    assert quality["came_with"]["exact"] == 0.25  # 3 for what nothing is known of, 0 for b, 3 for a
    assert sum(map(sum, quality["confusion"])) == 4
    low, high = category["interval"]
    assert 0.1 < low < 0.2 < 0.8 < high < 0.9  # Wilson's interval of 2 in 4


def test_weighted_kappa_is_what_scikit_learn_says() -> None:
    from sklearn.metrics import cohen_kappa_score

    draw = np.random.default_rng(0)
    true = draw.integers(0, 6, 200)
    predicted = np.clip(true + draw.integers(-2, 3, 200), 0, 5)
    assert weighted_kappa(true, predicted) == pytest.approx(cohen_kappa_score(true, predicted, weights="quadratic"))
    assert weighted_kappa(np.full(5, 3), np.full(5, 3)) == 0


def test_the_page_has_the_figures_and_the_pictures_are_pictures(tmp_path) -> None:
    asked = {"model": "a`b", "labelled": 8, "sampled": 10, "unlabelled": {"invalid_answer": 2}}
    text = page({"asked": asked, **found()})
    assert "(`ab`) labelled 8 of 10 sampled documents (without a label: 2 invalid answer)" in text
    assert "| classifier | 50% (15 to 85) | 0.39 |" in text
    assert "| the most frequent (debug) | 50%" in text
    category = found()["category"]
    draw(tmp_path / "c.png", category["confusion"], category["names"], "category")
    assert Image.open(tmp_path / "c.png").size[0] > 300
