"""The rubric's prompt, and parsing of answers."""

import pytest

from data_pipeline.labels import labels
from data_pipeline.labels.rubric import Label, read_rubric
from data_pipeline.rewriting.backends.endpoint import Endpoint
from tests.data_pipeline.labels.conftest import RUBRIC


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ('{"reason": "r", "category": "debug", "quality": 3}', Label("debug", 3, "r")),
        ('```json\n{"category": " Debug ", "quality": "4"}\n```', Label("debug", 4)),
        (
            'Well {it} is {"a": 1}: {"category": "design", "quality": 5.0} or {"category": "debug", "quality": 1}',
            Label("design", 5),
        ),
        ('<think>{"category"</think> {"category": "other", "quality": 0}', Label("other", 0)),
        ('{"category": "debug", "quality": 3.5}', None),
        ('{"category": "debug", "quality": 6}', None),
        ('{"category": "debug", "quality": -1}', None),
        ('{"category": "debug", "quality": true}', None),
        ('{"category": "debug", "quality": NaN}', None),
        ('{"category": "debug", "quality": null}', None),
        ('{"category": ["debug"], "quality": 3}', None),
        ('{"category": "poetry", "quality": 3}', None),
        ('{"category": "debug"}', None),
        ('{"category": "debug", "quality": 3', None),
        ("", None),
        ('{"a":' * 5000, None),
        ("[" * 20_000, None),
    ],
)
def test_answers_are_read_tolerantly_and_labels_strictly(answer: str, label: Label | None) -> None:
    assert read_rubric(RUBRIC).read(answer) == label


def test_the_prompt_has_the_document_categories_and_criteria_and_the_document_is_no_template() -> None:
    [system, user] = read_rubric(RUBRIC).messages("costs $criteria and $5")
    assert "costs $criteria and $5" in user["content"]
    assert all(f"- {name}: {what}" in system["content"] for name, what in RUBRIC["categories"].items())
    assert all(f"{n}. {what}" in system["content"] for n, what in enumerate(RUBRIC["criteria"], 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"categories": {"one": "only"}}, "rubric.categories=.*one.*only.*: give two or more"),
        ({"categories": {"../up": "x", "b": "y"}}, "rubric.categories=../up cannot name a folder"),
        ({"criteria": ["one"]}, "rubric.criteria=.*one.*: give a list of 5"),
        ({"user": "no field"}, r"rubric.user lacks the field \$text"),
        ({"user": "$text $name"}, r"rubric.user has the field \$name"),
        ({"system": "5 $ each"}, r"rubric.system has a \$ that starts no name"),
        ({"temperature": 3}, "rubric.temperature=3: give a number"),
        ({"max_tokens": 0}, "rubric.max_tokens=0: give a whole number"),
        ({"prompt": "x"}, "rubric.prompt is not a setting"),
        ({"system": ""}, "rubric.system is missing"),
    ],
)
def test_a_wrong_rubric_is_named(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=rf"cleaning\.labels\.{said}") as raised:
        read_rubric({**RUBRIC, **change})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"documents": 10}, "documents=10: give a whole number, 50 or more"),
        ({"attempts": 0}, "attempts=0: give a whole number, 1 or more"),
        ({"held_out": 0}, "held_out=0: give a number at least 0.05 and at most 0.5"),
        ({"excerpt": {"start": 5}}, "excerpt.start is not a part of an excerpt: give beginning, middle, end"),
        ({"excerpt": {"end": -1}}, "excerpt.end=-1: give a whole number"),
        ({"thresholds": {"debug": "high"}}, "thresholds.debug=high: give a number"),
        ({"thresholds": {"debgu": 2}, "set_category": True}, "thresholds.debgu is not a category of the rubric"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict, said: str) -> None:
    backend = Endpoint(base_url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ValueError, match=rf"cleaning\.labels\.{said}"):
        labels("folder", 1, rubric=RUBRIC, backend=backend, store="store", **settings)
