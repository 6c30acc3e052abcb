import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from datatrove.data import Document

from data_pipeline.cleaning import windows as windows_module
from data_pipeline.cleaning.duplicates import PipelineStage, exact_documents, near_duplicates
from data_pipeline.cleaning.spans import exact_spans

CHOICE = random.Random(11)
WORDS = [f"{first}{second}{third}" for first in "bdgkl" for second in "aeiou" for third in ("n", "r", "st", "mp")]


def text(words: int) -> str:
    return "\n".join(" ".join(CHOICE.choice(WORDS) for _ in range(10)) for _ in range(words // 10))


def run(stages: list[PipelineStage], texts: list[str]) -> list[Document]:
    """Run stages like the executors: every task separately, from a pickled step."""
    given: list[Document] = []
    for stage in stages:
        for rank in range(stage.tasks):
            [step] = pickle.loads(pickle.dumps(stage.steps))
            mine = (
                Document(t, str(i), metadata={"source": "s"}) for i, t in enumerate(texts) if i % stage.tasks == rank
            )
            out = step.run(mine if stage.reads else None, rank, stage.tasks)
            given += out or ()
    return given


def ids(documents: list[Document]) -> set[int]:
    return {int(document.id) for document in documents}


BUILDERS: list[Callable[..., list[PipelineStage]]] = [exact_documents, near_duplicates, exact_spans]


def test_of_equal_documents_the_first_stays(tmp_path: Path) -> None:
    texts = [text(30) for _ in range(9)] + [""]
    texts[4] = texts[1] + "\n"  # in the same task of three
    texts[6] = texts[0]
    texts[8] = texts[0] + "."
    left = run(exact_documents(str(tmp_path), 3), texts)
    assert ids(left) == {0, 1, 2, 3, 5, 7, 8, 9}
    assert all(document.metadata == {"source": "s"} for document in left)


def test_of_nearly_equal_documents_one_stays(tmp_path: Path) -> None:
    texts = [text(300) for _ in range(6)] + ["one two"]
    words = texts[0].split()
    words[100] = "CHANGED"
    texts[4] = " ".join(words).upper() + " 2024-01-02."
    texts[5] = texts[0][: len(texts[0]) // 2] + text(150)  # half the same: another document
    left = ids(run(near_duplicates(str(tmp_path), 2), texts))
    assert len(left & {0, 4}) == 1
    assert left | {0, 4} == set(range(7))


def test_numbers_alone_make_no_other_document(tmp_path: Path) -> None:
    log = "\n".join(f"at {{0}}:{n} the {WORDS[n]} {WORDS[-n]} service was started by {WORDS[n + 7]}" for n in range(40))
    assert len(run(near_duplicates(str(tmp_path), 1), [log.format(7), log.format(12345)])) == 1


@pytest.mark.parametrize("build", BUILDERS)
def test_tasks_without_documents_do_no_harm(tmp_path: Path, build: Callable[..., list[PipelineStage]]) -> None:
    assert len(run(build(str(tmp_path), 4), [text(100)])) == 1
    assert run(build(str(tmp_path / "none"), 2), []) == []


def test_spans_are_cut_where_they_occur_later(tmp_path: Path) -> None:
    shared, begin, end = text(80), text(60), text(60)
    texts = [f"{begin}.\n{shared}\n{text(20)}", text(100), f"{end}\n    {shared}\n    Then {text(60)}"]
    first, second, third = sorted(run(exact_spans(str(tmp_path), 2), texts), key=lambda document: document.id)
    # Task 0 of two has documents 0 and 2, so document 0 is the earlier one.
    assert (first.text, second.text) == (texts[0], texts[1])
    assert third.text == texts[2].replace(f"    {shared}\n", "")


def test_a_span_in_mid_line_leaves_the_line(tmp_path: Path) -> None:
    shared = text(80)
    texts = [shared, f"{text(60)} before {shared} after\n{text(60)}"]
    assert "before  after\n" in run(exact_spans(str(tmp_path), 1), texts)[1].text


@pytest.mark.parametrize(("words", "cut"), [(49, False), (50, True), (51, True)])
def test_spans_have_at_least_the_words_asked_for(tmp_path: Path, words: int, cut: bool) -> None:
    shared = " ".join(text(100).split()[:words])
    texts = [f"{text(60)} one {shared} two {text(60)}", f"{text(60)} three {shared} four {text(60)}"]
    _, second = run(exact_spans(str(tmp_path), 1, minimum_bytes=10), texts)
    assert ("three  four" in second.text) == cut
    assert cut or second.text == texts[1]


def test_short_windows_of_digits_are_no_span(tmp_path: Path) -> None:
    table = "0 1 " * 40
    texts = [text(60) + "\n" + table, text(60) + "\n" + table]
    assert [document.text for document in run(exact_spans(str(tmp_path), 1), texts)] == texts


def test_repeats_within_a_document_are_cut_too_and_little_left_is_dropped(tmp_path: Path) -> None:
    once = text(100)
    left = run(exact_spans(str(tmp_path), 1), [f"{once}\n{once}\n", once])
    assert [document.text.strip() for document in left] == [once]


def test_passes_and_blocks_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [text(60) for _ in range(4)]
    texts = ["\n".join([text(200), CHOICE.choice(shared), text(200), CHOICE.choice(shared)]) for _ in range(24)]
    whole = run(exact_spans(str(tmp_path / "whole"), 3), texts)
    monkeypatch.setattr(windows_module, "BLOCK_BYTES", 300)
    stages = exact_spans(str(tmp_path / "parts"), 3, buckets=5)
    stages[1].steps[0].memory = 10_000
    parts = run(stages, texts)
    assert [(document.id, document.text) for document in parts] == [(document.id, document.text) for document in whole]
    assert sum(len(document.text) for document in whole) < 0.9 * sum(map(len, texts))


def test_letters_of_several_bytes_are_not_torn(tmp_path: Path) -> None:
    shared = " ".join(f"größe{n}é漢" for n in range(60))
    texts = [shared, f"ünlü {shared} öde {text(60)} \ud800"]
    left = run(exact_spans(str(tmp_path), 1), texts)[1].text
    assert left == texts[1].replace(shared, "")


@pytest.mark.parametrize(
    ("build", "settings", "key"),
    [
        (exact_spans, {"words": 1}, "exact_spans.words=1"),
        (exact_spans, {"memory": 5}, "exact_spans.memory=5"),
        (near_duplicates, {"buckets": 0}, "near_duplicates.buckets=0"),
    ],
)
def test_wrong_settings_are_named(
    build: Callable[..., list[PipelineStage]], settings: dict, key: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"cleaning.{key}"):
        build(str(tmp_path), 1, **settings)
