"""End to end: sample, labels, classifier, filter."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.labels import training
from data_pipeline.labels.classifier import load, train
from tests.data_pipeline.labels.conftest import Labeller, make_documents, make_stages, run


def report(tmp_path: Path, name: str = "corpus") -> dict:
    return json.loads((tmp_path / name / "report" / "agreement.json").read_text())


def test_the_classifier_learns_from_the_sample_and_judges_the_rest(
    tmp_path: Path, labeller: Labeller, drawn: list[str]
) -> None:
    documents = make_documents(400)
    stages = make_stages(tmp_path, labeller, documents=200, thresholds={"default": 2.5})
    kept = run(stages, documents)
    assert labeller.asked.total() == 200
    found = report(tmp_path)
    assert found["asked"]["labelled"] == found["learned"] + found["held_out"] == 200
    assert found["category"]["accuracy"] >= 0.95 > 0.6 > found["category"]["most_frequent"]["accuracy"]
    assert found["quality"]["within_one"] >= 0.9
    assert found["quality"]["weighted_kappa"] > 0.8 > 0.3 > found["quality"]["came_with"]["weighted_kappa"]
    truth = {document.id: int(document.text.split("q")[1][0]) for document in documents}
    ids = {document.id for document in kept}
    assert all(identity in ids for identity, quality in truth.items() if quality >= 4)
    assert not any(identity in ids for identity, quality in truth.items() if quality <= 1)
    assert all(isinstance(d.metadata["quality"], float) and d.metadata["quality"] >= 2.5 for d in kept)
    assert drawn == ["category.png", "quality.png"]


def test_thresholds_hold_by_category_and_reasons_are_told(tmp_path: Path, labeller: Labeller) -> None:
    documents = make_documents(150)
    stages = make_stages(tmp_path, labeller, thresholds={"debug": 6, "default": 0})
    dropped = []

    class Writer:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def write(self, document, rank=0):
            dropped.append(document)

    run(stages[:-1], documents)
    step = stages[-1].steps[0]
    step.exclusion_writer = Writer()
    kept = list(step.run(iter(documents), 0, 1))
    assert {document.metadata["category"] for document in kept} == {"commands", "design"}
    assert {document.metadata["filter_reason"] for document in dropped} == {"quality under 6"}
    assert len(kept) + len(dropped) == 150


def test_categories_are_the_classifiers_when_they_shall_be(tmp_path: Path, labeller: Labeller) -> None:
    documents = make_documents(150)
    for document in documents:
        document.metadata["category"] = "web"
    same = run(make_stages(tmp_path, labeller), documents)
    assert {document.metadata["category"] for document in same} == {"web"}
    told = run(make_stages(tmp_path, labeller, name="other", set_category=True), documents)
    assert sum(document.metadata["category"] in document.text.split()[0] for document in told) >= 145


def test_another_corpus_with_the_same_documents_asks_nothing(tmp_path: Path, labeller: Labeller) -> None:
    documents = make_documents(120)
    run(make_stages(tmp_path, labeller), documents)
    asked = labeller.asked.total()
    run(make_stages(tmp_path, labeller, tasks=5, name="later"), list(reversed(documents)))
    assert labeller.asked.total() == asked == 100
    assert report(tmp_path, "later")["asked"]["from_store"] == 100
    assert report(tmp_path, "later")["quality"] == report(tmp_path)["quality"]


@pytest.mark.parametrize("change", ["rubric", "model"])
def test_another_rubric_or_model_asks_anew(tmp_path: Path, labeller: Labeller, change: str) -> None:
    documents = make_documents(60)
    run(make_stages(tmp_path, labeller)[:2], documents)
    stages = make_stages(tmp_path, labeller, name="later")
    step = stages[1].steps[0]
    if change == "model":
        step.backend.model = "n"
    else:
        object.__setattr__(step.rubric, "criteria", ["Something else.", *step.rubric.criteria[1:]])
    run(stages[:2], documents)
    assert labeller.asked.total() == 120


def test_a_document_is_asked_about_again_with_another_seed_and_left_unlabelled_at_last(
    tmp_path: Path, labeller: Labeller
) -> None:
    answers = {
        "1": "I like it.",
        "2": '{"category": "poems", "quality": 3}',
        "3": '{"category": "debug", "quality": 9}',
    }
    labeller.script = lambda name, n: answers.get(name) if name != "2" or n < 2 else None
    run(make_stages(tmp_path, labeller, attempts=3), make_documents(100))
    assert (labeller.asked["1"], labeller.asked["2"], labeller.asked["3"], labeller.asked["4"]) == (3, 2, 3, 1)
    assert len(labeller.seeds["1"]) == 3
    asked = report(tmp_path)["asked"]
    assert (asked["labelled"], asked["unlabelled"], asked["invalid_answers"]) == (98, {"invalid_answer": 2}, 7)
    run(make_stages(tmp_path, labeller, name="later"), make_documents(100))
    assert labeller.asked.total() == 105  # what was invalid is paid for as well
    assert report(tmp_path, "later")["asked"]["invalid_answers"] == 7


def test_a_run_that_stops_goes_on_and_pays_for_nothing_twice(tmp_path: Path, labeller: Labeller) -> None:
    documents = make_documents(100)
    poor = make_stages(tmp_path, labeller, backend=labeller.backend(max_requests=40))
    said = r"cleaning\.labels\.backend\.max_requests=40 is spent .*; 40 of 100 excerpts labelled.* goes on from there"
    with pytest.raises(ValueError, match=said) as raised:
        run(poor, documents)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="max_requests=40"):  # over all runs into the folder
        run(poor, documents)
    assert labeller.asked.total() == 40
    [answers] = (tmp_path / "store").glob("*/answers.jsonl")
    answers.write_bytes(answers.read_bytes()[:-5])  # as a kill in mid-write leaves it
    run(make_stages(tmp_path, labeller, backend=labeller.backend(max_requests=1000)), documents)
    assert labeller.asked.total() == 101
    assert set(labeller.asked.values()) == {1, 2}


def test_a_server_that_fails_ends_in_one_line(tmp_path: Path, labeller: Labeller) -> None:
    labeller.status = 500
    with pytest.raises(ValueError, match=r"cleaning\.labels\.backend\.base_url=.* gave no answer in 2 tries") as raised:
        run(make_stages(tmp_path, labeller), make_documents(60))
    assert "\n" not in str(raised.value)


def test_too_few_labels_are_an_error(tmp_path: Path, labeller: Labeller) -> None:
    labeller.script = lambda name, n: "no" if int(name) > 30 else None
    with pytest.raises(ValueError, match=r"cleaning\.labels: 31 labels for 100 documents .*a classifier needs 50"):
        run(make_stages(tmp_path, labeller, attempts=1), make_documents(100))


def test_labels_that_are_all_the_same_are_an_error(tmp_path: Path, labeller: Labeller) -> None:
    labeller.script = lambda name, n: '{"category": "debug", "quality": 3}'
    with pytest.raises(ValueError, match="all that are learned from have quality 3"):
        run(make_stages(tmp_path, labeller), make_documents(100))


def test_one_category_is_enough_unless_it_shall_be_set(tmp_path: Path, labeller: Labeller) -> None:
    labeller.script = lambda name, n: json.dumps({"category": "debug", "quality": int(name) % 4})
    assert len(run(make_stages(tmp_path, labeller), make_documents(100))) == 100
    assert "category" not in report(tmp_path)
    with pytest.raises(ValueError, match="all that are learned from have category debug"):
        run(make_stages(tmp_path, labeller, name="other", set_category=True), make_documents(100))


def test_held_out_documents_are_not_learned_from(tmp_path: Path, labeller: Labeller, monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(training, "train", lambda texts, labels: seen.extend(texts) or train(texts, labels))
    documents = make_documents(100)
    documents += [type(d)(d.text, f"copy:{d.id}", metadata=d.metadata) for d in documents]
    stages = make_stages(tmp_path, labeller, documents=200)
    for stage in stages[:3]:
        for rank in range(stage.tasks):
            list(stage.steps[0].run(iter(documents[rank :: stage.tasks]), rank, stage.tasks))
    found = report(tmp_path)
    assert len(seen) == found["learned"] == 200 - found["held_out"]
    assert len(set(seen)) == len(seen) / 2  # both copies are on one side
    assert labeller.asked.total() == 100


def test_a_file_that_is_no_classifier_is_not_opened_as_one(tmp_path: Path) -> None:
    path = tmp_path / "classifier.npz"
    np.savez(path, about=np.array([{"a": 1}], dtype=object), weights=1, biases=1, scales=1)  # a pickle inside
    with pytest.raises(ValueError, match="is not a classifier of labels"):
        load(path)
    path.write_bytes(b"PK\3\4 and then nothing")
    with pytest.raises(ValueError, match="is not a classifier of labels"):
        load(path)


def test_the_store_keeps_no_text(tmp_path: Path, labeller: Labeller) -> None:
    run(make_stages(tmp_path, labeller), make_documents(100))
    kept = "".join(path.read_text() for path in (tmp_path / "store").glob("*/*") if path.is_file())
    assert "as it says" in kept
    assert "DOC1q" not in kept


def test_a_store_that_cannot_be_written_to_is_named(tmp_path: Path, labeller: Labeller) -> None:
    (tmp_path / "file").write_text("")
    stages = make_stages(tmp_path, labeller, store=str(tmp_path / "file" / "store"))
    with pytest.raises(ValueError, match=r"cleaning\.labels\.store=.*file/store: Not a directory"):
        run(stages, make_documents(60))


def test_two_categories_are_told_apart_too(tmp_path: Path, labeller: Labeller) -> None:
    documents = [document for document in make_documents(150) if document.metadata["category"] != "design"]
    told = run(make_stages(tmp_path, labeller, set_category=True), documents)
    assert len(told) == 100
    assert sum(document.metadata["category"] in document.text.split()[0] for document in told) >= 97
