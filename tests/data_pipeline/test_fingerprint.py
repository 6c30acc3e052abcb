import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from common import checksums
from data_pipeline import documents
from data_pipeline.documents import shards, texts
from data_pipeline.fingerprint import prepared_folder, read_manifest
from data_pipeline.identity import BLOCK_BYTES, SAMPLE, WHOLE, WHOLE_BYTES, file_identity
from data_pipeline.job_folder import JobFolder
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.workers import ordered_map
from tests.data_pipeline.damage import damaged


@pytest.fixture
def own(corpus, tmp_path):
    """Copy the corpus, so that a test may change it."""
    return shutil.copytree(corpus, tmp_path / "corpus")


@pytest.fixture
def make(make_data, own, tmp_path):
    return functools.partial(make_data, source=TextFiles(str(own)), data_dir=tmp_path / "data")


def folders(path):
    return sorted(p.name for p in path.iterdir() if p.is_dir())


def test_nothing_is_done_again_that_has_not_changed(make, tmp_path):
    make().prepare()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")}
    start = time.perf_counter()
    make(sequence_length=16, batch_tokens=32, seed=9, micro_batch_size=1).prepare()
    assert time.perf_counter() - start < 1
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*")} == times


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"block_length": 32, "validation_length": 32}, ["blocks"]),
        ({"validation_fraction": 0.3}, ["blocks", "documents", "tokenizer"]),
    ],
)
def test_a_changed_setting_makes_again_what_depends_on_it(make, tmp_path, change, again):
    make().prepare()
    before = set(folders(tmp_path / "data"))
    make(**change).prepare()
    assert sorted(n.partition("-")[0] for n in set(folders(tmp_path / "data")) - before) == again


def test_a_changed_file_makes_other_data(make, own):
    first = make()
    first.prepare()
    with (own / "part.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more document " * 9}) + "\n")
    second = make()
    second.prepare()
    assert second.fingerprint != first.fingerprint
    total = [sum(d.manifest[s]["documents"] for s in ("train", "validation")) for d in (first, second)]
    assert total == [300, 301]


def test_files_are_told_apart_by_content_not_by_place_or_time(make, own, tmp_path, caplog):
    first = make()
    first.prepare()
    os.utime(own / "part.jsonl", (1, 1))
    moved = own.rename(tmp_path / "elsewhere")
    copied = shutil.copytree(moved, tmp_path / "deep" / "copy")
    before = folders(tmp_path / "data")
    for place in (moved, copied, copied / "part.jsonl"):
        again = make(source=TextFiles(str(place)))
        again.prepare()
        assert again.fingerprint == first.fingerprint
    assert folders(tmp_path / "data") == before


def test_a_sample_sees_what_a_full_hash_sees_but_in_the_middle_of_large_files(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(WHOLE_BYTES + 1))
    of_zeros = {by: file_identity([path], by) for by in (SAMPLE, WHOLE)}
    for offset, seen in ((0, (SAMPLE, WHOLE)), (WHOLE_BYTES, (SAMPLE, WHOLE)), (BLOCK_BYTES + 9, (WHOLE,))):
        content = bytearray(WHOLE_BYTES + 1)
        content[offset] = 1
        path.write_bytes(content)
        assert tuple(by for by in of_zeros if file_identity([path], by) != of_zeros[by]) == seen
    small = tmp_path / "small"
    small.write_bytes(bytes(WHOLE_BYTES))
    before = file_identity([small])
    small.write_bytes(bytes(BLOCK_BYTES + 9) + b"1" + bytes(WHOLE_BYTES - BLOCK_BYTES - 10))
    assert file_identity([small]) != before


def test_full_hash_is_true_or_false(make):
    assert make(full_hash=True).identified_by == WHOLE
    with pytest.raises(ValueError, match=r"data\.full_hash=some: give true or false"):
        make(full_hash="some")


@pytest.mark.parametrize("how", ["deleted", "cut", "flipped"])
@pytest.mark.parametrize(
    "file", ["blocks-*/train-00000.arrow", "documents-*/train-00000.parquet", "tokenizer-*/tokenizer.json"]
)
def test_what_is_damaged_is_named_and_prepared_again(make, tmp_path, caplog, file, how):
    make().prepare()
    [path] = (tmp_path / "data").glob(file)
    whole = path.read_bytes()
    damaged(path, how)
    again = make()
    again.setup()
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = {"deleted": "is missing", "cut": "is truncated or damaged", "flipped": "it does not match its checksum"}
    assert str(path) in line
    assert found[how] in line
    assert line.endswith(": prepared again")
    assert path.read_bytes() == whole


def test_a_damaged_manifest_is_prepared_again(make, tmp_path, caplog):
    make().prepare()
    [path] = (tmp_path / "data").glob("blocks-*/manifest.json")
    damaged(path, "cut")
    make().prepare()
    assert f"{path} is truncated or damaged: prepared again" in caplog.messages


def test_checksums_are_compared_once_after_a_change(make, tmp_path, monkeypatch):
    """The files are read again after a copy, and then not until the next one."""
    make().prepare()
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copy2)
    read = []
    monkeypatch.setattr(checksums, "checksum", lambda path: read.append(path.name) or checksums.content_digest(path))
    for data_dir, expected in (("data", 0), ("copy", 1), ("copy", 1)):
        make(data_dir=tmp_path / data_dir).prepare()
        assert read.count("train-00000.arrow") == expected


def forget_checksums(data_dir):
    """Change prepared folders to the format of earlier versions."""
    for path in data_dir.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["files"]
        path.write_text(json.dumps(manifest))
        (path.parent / "checked.json").unlink()


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("blocks-*/train-00000.arrow", "deleted", r"train-\*\.arrow are damaged \(0 rows of \d+\): remove the folder"),
        ("blocks-*/train-00000.arrow", "cut", r"train-\*\.arrow are damaged .*: remove the folder"),
        ("tokenizer-*/tokenizer.json", "cut", r"tokenizer-\w+ is damaged: remove it"),
    ],
)
def test_damage_to_what_has_no_checksums_is_one_line(make, tmp_path, file, how, words):
    make().prepare()
    forget_checksums(tmp_path / "data")
    make().setup()
    [path] = (tmp_path / "data").glob(file)
    damaged(path, how)
    with pytest.raises(ValueError, match=words) as error:
        make().setup()
    assert str(path.parent) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_an_earlier_version_prepared_is_taken_where_it_is(tmp_path):
    old = prepared_folder(tmp_path, "stage", {"files": "by time"}, lambda folder: {"made": "then"})
    for _ in range(2):
        found = prepared_folder(tmp_path, "stage", {"files": "by content"}, pytest.fail, {"files": "by time"})
        assert found == old
    new = prepared_folder(tmp_path, "stage", {"files": "by content"}, lambda folder: {}, {"files": "other"})
    assert new != old
    assert prepared_folder(tmp_path, "stage", {"files": "by content"}, pytest.fail, {"files": "by time"}) == new


def test_a_folder_that_an_earlier_version_began_goes_on(tmp_path):
    began, now = {"tasks": 2, "files": "by time"}, {"tasks": 2, "files": "by content"}
    folder = JobFolder(tmp_path / "corpus", "corpus")
    folder.begin(began)
    folder.begin(now, earlier=began)
    with pytest.raises(ValueError, match=r"corpus\.tasks differs"):
        folder.begin({**now, "tasks": 3}, earlier={**began, "tasks": 3})


def test_duplicates_are_dropped_and_counted(make, own):
    shutil.copy(own / "part.jsonl", own / "copy.jsonl")
    data = make()
    data.prepare()
    assert data.manifest["duplicates"] == 300
    assert data.manifest["train"]["documents"] + data.manifest["validation"]["documents"] == 300


def test_a_text_falls_on_the_same_side_in_every_corpus(make, own, tmp_path):
    data = make()
    data.prepare()
    held_out = set(texts(data._documents_folder, "validation"))
    lines = (own / "part.jsonl").read_text().splitlines()
    (own / "part.jsonl").write_text("\n".join(reversed(lines[:150])))
    (own / "more.txt").write_text("another document altogether")
    smaller = make()
    smaller.prepare()
    kept = {json.loads(line)["text"] for line in lines[:150]}
    assert set(texts(smaller._documents_folder, "validation")) - {"another document altogether"} == held_out & kept
    assert 0.1 < len(held_out) / 300 < 0.3


def test_shards_and_units_divide_the_text_and_lose_none(make, monkeypatch):
    monkeypatch.setattr(documents, "UNIT_BYTES", 1000)
    monkeypatch.setattr(documents, "SHARD_BYTES", 20_000)
    data = make()
    data.prepare()
    assert len(shards(data._documents_folder, "train")) > 2
    assert len(list(texts(data._documents_folder, "train"))) == data.manifest["train"]["documents"]


def test_skipped_lines_are_in_the_manifest_and_strict_refuses_them_later(make, own, caplog):
    with (own / "part.jsonl").open("a") as file:
        file.write("{broken\n")
    data = make()
    data.prepare()
    assert data.manifest["skipped"] == {"broken JSON": 1}
    assert "part.jsonl: line 301: broken JSON" in data.manifest["problems"][0]
    assert "skipped: 1 x broken JSON" in caplog.messages
    with pytest.raises(ValueError, match="line 301: broken JSON"):
        make(strict=True).prepare()


@pytest.mark.parametrize(
    ("lines", "fraction", "words"),
    [
        (["a", "b"], 1e-9, r"data\.validation_fraction=1e-09 leaves no validation document among 2: raise it"),
        (["a", "b"], 1 - 1e-9, r"data\.validation_fraction=0\.999999999 leaves no train document among 2: lower it"),
        ([" "], 0.5, r"data\.source gives no document"),
        (["a", "b", "c", "d"], 0.5, r"data\.block_length=64 is more than the \d+ tokens of the train text"),
    ],
)
def test_text_that_cannot_be_split_names_the_key(make_data, tmp_path, lines, fraction, words):
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.txt").write_text(line)
    data = make_data(source=TextFiles(str(tmp_path)), data_dir=tmp_path / "data", validation_fraction=fraction)
    with pytest.raises(ValueError, match=words):
        data.prepare()
    assert not [name for name in folders(tmp_path / "data") if name.startswith((".", "blocks"))]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("written")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match=r"data_dir=.*is on a full disk"):
        prepared_folder(tmp_path, "stage", {}, build)
    assert folders(tmp_path) == []


def test_a_data_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data_dir=.*file/data"):
        prepared_folder(tmp_path / "file" / "data", "stage", {}, dict)


KILLED = """
import sys, time
from pathlib import Path
from data_pipeline.fingerprint import prepared_folder

def build(folder):
    (folder / "half").write_text("written")
    print("building", flush=True)
    time.sleep(60)

prepared_folder(Path(sys.argv[1]), sys.argv[2], {}, build)
"""


@pytest.mark.parametrize("stage", ["same", "other"])
def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path, stage):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"building\n"
        process.send_signal(signal.SIGKILL)
    assert len(folders(tmp_path)) == 1
    folder = prepared_folder(tmp_path, "same", {}, lambda folder: {"whole": True})
    assert folders(tmp_path) == [folder.name]
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "checked.json"}
    assert read_manifest(folder)["whole"]


def test_runs_that_start_together_prepare_once(tmp_path):
    built = []

    def build(folder):
        built.append(folder)
        time.sleep(0.1)
        return {}

    threads = [threading.Thread(target=prepared_folder, args=(tmp_path, "stage", {}, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_ordered_map_keeps_order_and_passes_errors_on():
    divide = functools.partial(functools.partial, divmod, 840)
    assert list(ordered_map(divide, range(1, 30), 3)) == [divmod(840, n) for n in range(1, 30)]
    with pytest.raises(ZeroDivisionError):
        list(ordered_map(divide, [1, 2, 0, 4], 2))


def test_a_worker_that_dies_is_an_error_and_not_a_hang():
    with pytest.raises(RuntimeError, match="worker process ended with status 3"):
        list(ordered_map(functools.partial(functools.partial, os._exit), [3], 2))
