import json
import pickle
from pathlib import Path

import pytest
from datatrove.data import Document

from data_pipeline.cleaning.decontamination import Decontamination

QUESTION = (
    "Which command lists the clocks of every graphics card, in megahertz, and writes them to a table each second?"
)
SHORT = "nvidia-smi --query-gpu=clocks.sm --format=csv -l 1"
PASSAGE = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software and its files"


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    folder = tmp_path / "evaluation"
    (folder / "deep").mkdir(parents=True)
    records = [
        {"prompt": "Nothing of this one is anywhere."},
        {"prompt": QUESTION, "answer": {"command": [SHORT, "ls"]}},
    ]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    (folder / "deep" / "list.json").write_text(json.dumps([{"note": PASSAGE}]))
    (folder / "plain.txt").write_text(
        "A first paragraph.\n\nOne two three four five six seven\neight nine ten eleven twelve 13 14\n"
    )
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    return folder


def step(evaluation: Path, tmp_path: Path, fields: list[str] | None = None, **settings: object) -> Decontamination:
    sets = {"aimicius": {"path": str(evaluation), "fields": fields}}
    return Decontamination(sets, tmp_path / "index", tmp_path / "report", **settings)


def left(found: Decontamination, *texts: str) -> list[str]:
    documents = [Document(text, f"d{number}", metadata={"source": "s"}) for number, text in enumerate(texts)]
    return [document.text for document in found.run(documents)]


def report(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "report" / "00000.jsonl").read_text().splitlines()]


def test_a_passage_of_an_item_is_found_whatever_its_case_and_punctuation(evaluation: Path, tmp_path: Path) -> None:
    words = QUESTION.upper().replace(",", "").replace(" ", "\n").split("\n")
    found = "It was asked: " + " -- ".join(words[2:15]) + " ..."
    clean = "It was asked: " + " ".join(words[2:14]) + " of others"
    assert left(step(evaluation, tmp_path), clean, found) == [clean]
    [line] = report(tmp_path)
    assert line == {
        "document": "d1",
        "source": "s",
        "set": "aimicius",
        "item": "test.jsonl:2",
        "ngram": "lists the clocks of every graphics card in megahertz and writes them to",
        "word": 3,
        "byte": 14,
        "ngrams": 1,
    }


def test_items_of_every_kind_of_file_are_found(evaluation: Path, tmp_path: Path) -> None:
    texts = [f"x {PASSAGE} y", "so: one two three four five six seven eight nine ten eleven twelve 13", "clean"]
    assert left(step(evaluation, tmp_path), *texts) == ["clean"]
    assert [line["item"] for line in report(tmp_path)] == ["list.json[0]", "plain.txt:3"]


def test_short_items_count_where_they_occur_whole(evaluation: Path, tmp_path: Path) -> None:
    texts = [
        f"Type this:\n\n$ {SHORT} > clocks.csv",
        "Type nvidia-smi --query-gpu=clocks.sm --format=csv -l 10",
        "Type nvidia-smi --query-gpu=clocks.sm",
        "Just ls",
    ]
    assert left(step(evaluation, tmp_path), *texts) == texts[1:]
    [line] = report(tmp_path)
    assert (line["ngram"], line["word"]) == ("nvidia smi query gpu clocks sm format csv l 1", 2)
    assert left(step(evaluation, tmp_path, short_characters=100), *texts) == texts


def test_only_the_fields_named_count(evaluation: Path, tmp_path: Path) -> None:
    assert left(step(evaluation, tmp_path, ["answer.command"]), QUESTION, SHORT) == [QUESTION]
    with pytest.raises(ValueError, match=r"sets\.aimicius: no field solution with text"):
        left(step(evaluation / "deep", tmp_path, ["solution"]), QUESTION)


def test_passages_to_ignore_do_not_count(evaluation: Path, tmp_path: Path) -> None:
    assert left(step(evaluation, tmp_path, ignore=[PASSAGE]), PASSAGE, QUESTION) == [PASSAGE]


def test_the_index_is_built_once_and_anew_when_a_file_changes(evaluation: Path, tmp_path: Path) -> None:
    first = step(evaluation, tmp_path).build_index()
    assert pickle.loads(pickle.dumps(step(evaluation, tmp_path))).build_index() == first
    (evaluation / "plain.txt").write_text("Other words.")
    assert step(evaluation, tmp_path).build_index() != first


def test_a_step_that_has_run_travels(evaluation: Path, tmp_path: Path) -> None:
    found = step(evaluation, tmp_path)
    assert left(found, QUESTION, "clean") == ["clean"]
    assert left(pickle.loads(pickle.dumps(found)), QUESTION, "clean") == ["clean"]


def test_long_and_empty_documents(evaluation: Path, tmp_path: Path) -> None:
    long = "filler words of no meaning " * 90_000 + QUESTION
    assert left(step(evaluation, tmp_path), "", " ", long, "clean") == ["", " ", "clean"]
    assert report(tmp_path)[0]["word"] == 450_000


def test_a_set_of_short_items_alone_works(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(json.dumps({"command": SHORT}))
    assert left(step(tmp_path / "set.jsonl", tmp_path), SHORT, "clean " * 50) == ["clean " * 50]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({}, "sets: empty"),
        ({"a": {"path": "/nowhere"}}, r"sets\.a\.path=/nowhere: no such file"),
        ({"a": {"file": "x"}}, r"sets\.a: give path"),
    ],
)
def test_wrong_settings_are_named(sets: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cleaning.decontamination.{message}"):
        Decontamination(sets, tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000], ids=["cut", "not UTF-8", "deep"])
def test_a_broken_set_stops_with_its_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"cleaning\.decontamination\.sets\.aimicius: .*set\.json: "):
        left(step(tmp_path / "set.json", tmp_path), "text")
