"""Scores by task and cache, averages of groups, and their tables."""

import pytest

from evaluation import scores

SCORES = {
    "a": {"full": [1.0, 1.0, 0.0], "worse": [1.0, 0.0, 0.0]},
    "b": {"full": [0.5, 0.5], "worse": [0.5, 0.5]},
    "c": {"full": [0.2], "worse": [0.1]},
}


def test_scores_have_standard_errors_and_paired_differences():
    found = scores.compared(SCORES)
    assert found["score"]["a"]["full"] == {"value": pytest.approx(2 / 3), "standard_error": pytest.approx(1 / 3)}
    assert found["difference"]["a"] == {
        "worse": {"value": pytest.approx(-1 / 3), "standard_error": pytest.approx(1 / 3)}
    }
    assert found["difference"]["b"]["worse"] == {"value": 0.0, "standard_error": 0.0}


def test_a_group_is_the_mean_of_its_tasks_that_were_measured():
    found = scores.averaged(scores.compared(SCORES), {"x": ["a", "b", "missing"], "y": ["missing"], "z": ["c", "b"]})
    assert list(found["score"]) == ["x", "z"]
    assert found["score"]["x"]["full"]["value"] == pytest.approx((2 / 3 + 0.5) / 2)
    assert found["difference"]["x"]["worse"] == {
        "value": pytest.approx(-1 / 6),
        "standard_error": pytest.approx(1 / 6),
    }
    assert found["score"]["z"]["full"]["standard_error"] is None  # one document has none


def test_tables_have_tasks_as_rows_or_caches_as_rows():
    found = scores.compared(SCORES)
    assert scores.rows(found, "task")[0] == "| task | full | worse |"
    assert scores.rows(found, "task")[2] == "| a | 66.7 ± 33.3 | 33.3 ± 33.3 (-33.3 ± 33) |"
    assert scores.rows(found, "task")[4] == "| c | 20.0 | 10.0 (-10) |"
    assert scores.columns(found) == [
        "| cache | a | b | c |",
        "|---|---|---|---|",
        "| full | 66.67 | 50.00 | 20.00 |",
        "| worse | 33.33 | 50.00 | 10.00 |",
    ]
    assert scores.logged(found)["c/worse"] == 0.1
