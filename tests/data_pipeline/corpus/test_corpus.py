"""The phases of a corpus: input, output and manifest."""

import json

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter

from common import checksums
from data_pipeline.cleaning.duplicates import exact_documents
from data_pipeline.cleaning.masks import Masks
from data_pipeline.corpus.plan import phases
from data_pipeline.documents import texts as texts_of
from tests.data_pipeline.corpus.conftest import DUPLICATE, SECRET, build, make_recipe, prose, rows_of, write_texts


class Nothing(BaseFilter):
    name = "nothing"

    def filter(self, doc: Document) -> tuple[bool, str]:
        return False, "everything goes"


def test_documents_come_out_once_masked_and_in_both_splits(texts, tmp_path):
    manifest = build(make_recipe(tmp_path / "out", texts))
    rows = {row["id"]: row for row in rows_of(tmp_path / "out")}
    assert len(rows) == 60
    assert len({DUPLICATE, "again"} & set(rows)) == 1
    assert "somebody@somewhere.org" not in rows[SECRET]["text"]
    assert rows["doc7"]["text"] == prose(7)
    assert {row["split"] for row in rows.values()} == {"train", "validation"}
    found = manifest["categories"]["text_files"]
    assert sum(found[split]["documents"] for split in ("train", "validation")) == 60
    assert found["sources"]["text_files"]["bytes"] == sum(len(row["text"].encode()) for row in rows.values())
    written = {file["file"]: file["written"] for file in manifest["files"]}
    assert checksums.find_damage(tmp_path / "out", written) is None
    assert len(written) == len(list((tmp_path / "out").rglob("*.parquet")))
    assert sum(file["bytes"] for file in manifest["files"]) == sum(row["length"] for row in rows.values())


def test_a_category_is_a_folder_of_documents_that_the_data_module_reads(texts, tmp_path):
    build(make_recipe(tmp_path / "out", texts, categories={"texts": "debug"}))
    train, held_out = (list(texts_of(tmp_path / "out" / "documents" / "debug", s)) for s in ("train", "validation"))
    assert len(train) + len(held_out) == 60
    assert len(held_out) > 3
    assert {row["category"] for row in rows_of(tmp_path / "out")} == {"debug"}


def test_the_same_text_is_held_out_however_it_is_cleaned(texts, tmp_path):
    build(make_recipe(tmp_path / "cleaned", texts))
    build(make_recipe(tmp_path / "raw", texts, cleaning={}))
    cleaned, raw = ({row["id"]: row["split"] for row in rows_of(tmp_path / name)} for name in ("cleaned", "raw"))
    assert len(raw) == 61
    assert all(raw[name] == split for name, split in cleaned.items())


def test_what_cannot_be_read_is_named_and_counted(texts, tmp_path):
    build(make_recipe(tmp_path / "out", texts))
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "problems").glob("read-*.json"))]
    counts = {kind: count for part in found for kind, count in part["counts"].items()}
    assert counts == {"broken JSON": 1, "not UTF-8": 1}
    assert any("jsonl: line 21: broken JSON" in line for part in found for line in part["lines"])


def test_a_source_most_of_whose_records_are_skipped_stops_the_job(tmp_path):
    lines = [{"body": "x"}] * 9 + [{"text": "The server keeps what it was told, and says so. " * 9}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("The cache forgets what nobody has asked for in an hour. " * 9)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    words = r"corpus\.sources\.a\.jsonl\.text_key=text \(a record has body\): 90\.0% .* set corpus\.most_skipped=0\.9 "
    with pytest.raises(ValueError, match=words):
        build(make_recipe(tmp_path / "out", *paths, cleaning={}))
    assert build(make_recipe(tmp_path / "out", *paths, cleaning={}, most_skipped=0.9))["categories"]


def test_strict_stops_at_the_first_of_them(texts, tmp_path):
    with pytest.raises(ValueError, match=r"line 21: broken JSON.*corpus\.strict=false"):
        build(make_recipe(tmp_path / "out", texts, strict=True))


def test_the_record_says_what_each_step_removed(texts, tmp_path):
    build(make_recipe(tmp_path / "out", texts))
    steps = {step["name"]: step for step in json.loads((tmp_path / "out/record/merged.json").read_text())["steps"]}
    assert list(steps) == ["masks", "exact_documents", "near_duplicates", "exact_spans"]
    assert steps["masks"]["in"]["documents"] == 61
    assert steps["exact_documents"]["out"]["documents"] == 60
    assert len(steps["exact_documents"]["dropped_samples"]) == 1
    assert (tmp_path / "out" / "corpus.md").read_text().startswith("# ")
    assert not (tmp_path / "out" / "work").exists()


def test_steps_between_groups_of_stages_are_in_their_place(texts, tmp_path):
    recipe = make_recipe(tmp_path / "out", texts, cleaning={"exact_documents": exact_documents, "masks": Masks()})
    assert [phase.name for phase in phases(recipe)] == [
        "prepare",
        "read",
        "exact_documents-find",
        "exact_documents-filter",
        "finish",
    ]
    build(recipe)
    assert "somebody@somewhere.org" not in "".join(row["text"] for row in rows_of(tmp_path / "out"))


def test_more_tasks_than_documents_and_two_sources(tmp_path):
    paths = [write_texts(tmp_path / name, documents=7, files=1) for name in ("first", "second")]
    build(make_recipe(tmp_path / "out", *paths, tasks=9, categories={"second": "design"}))
    # Both files have the same documents: whichever is kept, none is there twice.
    rows = rows_of(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == [f"doc{n}" for n in range(7)]
    assert {row["category"] for row in rows} <= {"text_files", "design"}


def test_one_document_makes_a_corpus(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "one.txt").write_text(prose(0))
    manifest = build(make_recipe(tmp_path / "out", folder))
    assert len(manifest["files"]) == 1
    assert rows_of(tmp_path / "out")[0]["text"] == prose(0)


def test_as_many_workers_as_one_likes_give_the_same_corpus(texts, tmp_path):
    build(make_recipe(tmp_path / "one", texts, tasks=3))
    build(make_recipe(tmp_path / "two", texts, tasks=3), workers=2)
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two")


def test_a_step_that_removes_everything_is_named(texts, tmp_path):
    with pytest.raises(ValueError, match=r"corpus\.cleaning\.nothing removed every document"):
        build(make_recipe(tmp_path / "out", texts, cleaning={"nothing": Nothing(), "masks": Masks()}))


def test_sources_without_a_document_are_told(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"corpus\.sources give no document"):
        build(make_recipe(tmp_path / "out", folder))


def test_a_source_without_files_is_named_as_the_recipe_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"corpus\.sources\.nowhere\.path="):
        build(make_recipe(tmp_path / "out", tmp_path / "nowhere"))


def test_a_category_that_cannot_name_a_folder_becomes_another(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd.jsonl").write_text(json.dumps({"text": prose(1), "source": "../up"}) + "\n")
    build(make_recipe(tmp_path / "out", folder))
    assert [path.name for path in (tmp_path / "out" / "documents").iterdir()] == ["other"]
