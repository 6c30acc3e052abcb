import json
import os
import shutil

import pytest

from common import checksums
from data_pipeline.documents import texts
from data_pipeline.fingerprint import prepared_folder, read_manifest
from data_pipeline.mixtures.components import find_components, gather_files, text_files
from tests.data_pipeline.damage import damaged
from tests.data_pipeline.mixtures.conftest import documents, write_corpus, write_parquet


@pytest.fixture
def rewriting(tmp_path):
    """Write a rewriting, whose shards are all named train; rows 3 and 4 are of held-out documents."""
    splits = ["train"] * 3 + ["validation"] * 2 + ["train"] * 5
    folder = tmp_path / "rewritten"
    write_parquet(folder / "shards" / "train-00000-000000.parquet", documents("rewritten", 10), splits)
    write_parquet(folder / "shards" / "train-00000-000001.parquet", documents("rewritten", 5), ["train"] * 5)
    (folder / "manifest.json").write_text("{}")
    return folder


def gathered(folder, data_dir):
    files = text_files(folder, None, "data.components.x.path")
    return prepared_folder(data_dir, "documents", str(folder), lambda place: gather_files(files, {}, place))


def test_damaged_shards_of_a_corpus_are_named(make_mixture, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"debug": (60, 8), "design": (30, 5)})
    names = [path.relative_to(corpus).as_posix() for path in corpus.rglob("*.parquet")]
    files = [{"file": name, "written": entry} for name, entry in checksums.manifest_entries(corpus, names).items()]
    (corpus / "manifest.json").write_text(json.dumps({"files": files}))
    shard = "documents/debug/train-00001-00000.parquet"
    for how, words in (
        ("deleted", "is missing: copy it again"),
        ("cut", r"is damaged \(\d+ bytes of \d+\): copy it again"),
        ("flipped", r"is damaged \(it does not match its checksum\): write it again"),
    ):
        damaged(shutil.copytree(corpus, tmp_path / how) / shard, how)
        with pytest.raises(ValueError, match=words) as error:
            make_mixture(corpus=str(tmp_path / how), data_dir=tmp_path / "data").prepare()
        assert str(tmp_path / how / shard) in str(error.value)
    others = make_mixture(corpus=str(tmp_path / "deleted"), components={"debug": None}, data_dir=tmp_path / "data")
    others.prepare()


def test_a_category_of_a_corpus_is_a_component(corpus):
    found = find_components(str(corpus), None, 4)
    assert [component.name for component in found] == ["commands", "debug", "design"]
    assert {component.max_epochs for component in found} == {4}
    assert {path.parent.name for path in found[1].files["train"]} == {"debug"}
    assert [path.name for path in found[1].files["validation"]] == ["validation-00000-00000.parquet"]


def test_settings_are_of_the_category_of_their_name_and_null_leaves_it_out(corpus):
    found = find_components(str(corpus), {"debug": {"upsample": 2, "max_epochs": 1}, "commands": None}, 4)
    assert [(c.name, c.upsample, c.max_epochs) for c in found] == [("debug", 2, 1), ("design", None, 4)]


def test_a_component_may_be_some_categories_of_a_corpus_or_all(corpus):
    given = {"all": {"path": str(corpus)}, "two": {"path": str(corpus), "categories": ["debug", "design"]}}
    every, two = find_components(None, given, None)
    assert [len(component.files["train"]) for component in (every, two)] == [6, 4]


def test_a_component_with_a_path_takes_the_place_of_the_category_of_its_name(corpus, rewriting):
    found = find_components(str(corpus), {"debug": {"path": str(rewriting)}}, None)
    assert [component.name for component in found] == ["commands", "design", "debug"]
    assert found[-1].files["train"][0].parent.name == "shards"


def test_documents_and_bytes_are_those_of_the_text(corpus, tmp_path):
    folder = gathered(corpus / "documents" / "debug", tmp_path)
    held_out = list(texts(folder, "validation"))
    found = read_manifest(folder)
    assert held_out == documents("debug", 68)[60:]
    assert found["validation"] == {"documents": 8, "bytes": sum(len(text.encode()) for text in held_out)}
    assert found["train"]["documents"] == 60
    assert all(path.is_symlink() for path in folder.glob("*.parquet"))


def test_what_was_rewritten_of_held_out_text_is_held_out(rewriting, tmp_path):
    folder = gathered(rewriting, tmp_path)
    written = documents("rewritten", 10)
    assert list(texts(folder, "validation")) == written[3:5]
    assert list(texts(folder, "train")) == [*written[:3], *written[5:], *documents("rewritten", 5)]
    found = read_manifest(folder)
    assert (found["train"]["documents"], found["validation"]["documents"]) == (13, 2)
    assert found["validation"]["bytes"] == sum(len(text.encode()) for text in written[3:5])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": {"path": "nowhere"}}, r"data\.components\.a\.path=nowhere is not a folder"),
        ({"a": {"path": "empty"}}, r"data\.components\.a\.path: no train-\*\.parquet in empty"),
        ({"a": {"path": "unfinished"}}, r"a\.path=unfinished has no manifest\.json: run the job"),
        ({"a": {"path": "rewriting"}}, r"a\.path=rewriting has no manifest\.json: run the job"),
        ({"a": {"path": "corpus", "categories": ["x"]}}, r"a\.path=corpus has no category x: give some of debug"),
        ({"a": {"path": "plain", "categories": ["x"]}}, r"a\.path=plain has no categories"),
    ],
)
def test_folders_that_hold_no_finished_text_are_named(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus", {"debug": (4, 1)})
    write_corpus(tmp_path / "unfinished", {"debug": (4, 1)})
    (tmp_path / "unfinished" / "manifest.json").unlink()
    (tmp_path / "empty").mkdir()
    for place in ("plain", "rewriting/shards"):
        write_parquet(tmp_path / place / "train-00000.parquet", ["text"], ["train"])
    with pytest.raises(ValueError, match=words) as error:
        find_components(None, given, None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("corpus_path", ["nowhere", "."])
def test_a_corpus_that_is_none_is_named(tmp_path, monkeypatch, corpus_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data\.corpus=.*: no (such folder|documents/ in it); give a folder"):
        find_components(corpus_path, None, None)


def test_settings_for_no_category_are_refused_with_the_names_there_are(corpus):
    for settings in (None, {"upsample": 2}):
        with pytest.raises(ValueError, match=r"data\.components\.debgu is not a category of .*commands, debug, design"):
            find_components(str(corpus), {"debgu": settings}, None)


def test_files_that_cannot_be_read_are_named_and_nothing_is_left(tmp_path):
    cut = write_parquet(tmp_path / "cut" / "train-0.parquet", documents("debug", 20), ["train"] * 20)
    os.truncate(cut, cut.stat().st_size // 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train-0.parquet").write_text(json.dumps({"text": "not Parquet"}))
    write_parquet(tmp_path / "null" / "train-0.parquet", ["text", None], ["train"] * 2)
    for name in ("cut", "other", "null"):
        with pytest.raises(
            ValueError, match=rf"{name}/train-0\.parquet cannot be read \(.*\): write it again"
        ) as error:
            gathered(tmp_path / name, tmp_path / "data")
        assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]
