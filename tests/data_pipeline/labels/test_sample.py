"""Which documents are labelled, and which part of each."""

import json
from collections import Counter
from pathlib import Path

import pytest
from datatrove.data import Document

from data_pipeline.labels.sample import CUT, Excerpt, Sample, merged


def documents(counts: dict[str, int]) -> list[Document]:
    return [
        Document(f"{category} {n}", f"{category}:{n}", metadata={"category": category})
        for category, count in counts.items()
        for n in range(count)
    ]


def sample(folder: Path, given: list[Document], size: int, tasks: int) -> list:
    step = Sample(str(folder), size, Excerpt())
    for rank in range(tasks):
        assert list(step.run(iter(given[rank::tasks]), rank, tasks)) == []
    return merged(str(folder), tasks, size)


@pytest.mark.parametrize("size", [1, 30, 61, 500])
def test_the_sample_is_the_same_for_any_number_of_tasks_and_any_order(tmp_path: Path, size: int) -> None:
    given = documents({"debug": 300, "rare": 7, "design": 40})
    alone = sample(tmp_path / "1", given, size, 1)
    assert sample(tmp_path / "2", given[::-1], size, 5) == alone
    assert sample(tmp_path / "3", sorted(given, key=lambda d: d.id[::-1]), size, 30) == alone
    assert len(alone[0]) == min(size, 347)
    assert alone[1] == {"debug": 300, "design": 40, "rare": 7}


def test_rare_categories_are_there_and_leave_to_the_others_what_they_do_not_fill(tmp_path: Path) -> None:
    found, _ = sample(tmp_path, documents({"debug": 300, "rare": 7, "design": 40}), 60, 3)
    assert Counter(s.category for s in found) == {"debug": 27, "design": 26, "rare": 7}


def test_a_sample_of_a_larger_corpus_has_documents_of_the_smaller_one_again(tmp_path: Path) -> None:
    small, _ = sample(tmp_path / "s", documents({"debug": 300}), 100, 2)
    large, _ = sample(tmp_path / "l", documents({"debug": 400}), 100, 3)
    assert len({s.id for s in small} & {s.id for s in large}) > 60


def test_documents_without_a_category_or_with_one_id_are_sampled_too(tmp_path: Path) -> None:
    given = [Document(f"text {n}", "same", metadata={"x": "y"}) for n in range(8)]
    found, seen = sample(tmp_path, given, 5, 2)
    assert (len(found), seen) == (5, {"": 8})


def test_an_excerpt_has_the_beginning_the_middle_and_the_end() -> None:
    text = "b" * 5000 + "m" * 200 + "e" * 5000
    cut = Excerpt(beginning=100, middle=200, end=50).of(text)
    assert cut == "b" * 100 + CUT + "m" * 200 + CUT + "e" * 50
    assert Excerpt(beginning=100, middle=0, end=0).of(text) == "b" * 100
    assert Excerpt(beginning=100, middle=200, end=50).of("x" * 350) == "x" * 350


def test_what_no_request_can_hold_is_not_in_an_excerpt(tmp_path: Path) -> None:
    [found], _ = sample(tmp_path, [Document("a\0b \ud800 c" + "é" * 9, "i\ud800")], 5, 1)
    assert found.excerpt == "a\ufffdb ? c" + "é" * 9
    assert json.loads(json.dumps(found.excerpt)).encode()
