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

from data_pipeline import documents
from data_pipeline.documents import shards, texts
from data_pipeline.fingerprint import prepared_folder, read_manifest
from data_pipeline.parallel import ordered_map
from data_pipeline.sources.text_files import TextFiles


@pytest.fixture
def own(corpus, tmp_path):
    """A copy of the corpus that a test may change."""
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
        (["a", "b", "c", "d"], 0.5, r"data\.block_length=64: the train text has only \d+ tokens"),
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

    with pytest.raises(ValueError, match=r"data_dir=.*the disk is full"):
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
    assert [p.name for p in folder.iterdir()] == ["manifest.json"]
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
