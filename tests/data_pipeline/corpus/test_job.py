"""`job=corpus` from the command line: recipes, mistakes, kills."""

import json
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from tests.conftest import ROOT
from tests.data_pipeline.corpus.conftest import prose, rows_of, write_texts


def settings(texts, out):
    """Return a recipe of text files only, with the stock cleaning."""
    return (
        "job=corpus",
        "corpus=local",
        f"corpus.output={out}",
        "corpus.tasks=3",
        "~source@corpus.sources.commands",
        "source@corpus.sources.local_docs=text_files",
        f"corpus.sources.local_docs.path={texts}",
        "corpus.validation_fraction=0.2",
    )


def test_the_command_builds_a_corpus_and_says_what_is_in_it(run, texts, tmp_path):
    found = run(*settings(texts, tmp_path / "out"), tiny=False)
    assert found.status == 0, found.err
    assert "general_system: 60 documents" in found.err
    assert found.out == ""
    assert len(rows_of(tmp_path / "out")) == 60
    again = run(*settings(texts, tmp_path / "out"), tiny=False)
    assert again.status == 0
    assert "is finished" in again.err


def test_a_step_is_left_out_by_null(run, texts, tmp_path):
    found = run(*settings(texts, tmp_path / "out"), "corpus.cleaning.masks=null", tiny=False)
    assert found.status == 0, found.err
    assert any("somebody@somewhere.org" in row["text"] for row in rows_of(tmp_path / "out"))


def test_decontamination_is_added_on_the_command_line_and_tells_what_it_dropped(run, texts, tmp_path):
    questions = tmp_path / "questions.jsonl"
    question = "Which register has the physical address of the top page table while long mode paging is active?"
    questions.write_text(json.dumps({"question": question}) + "\n")
    (texts / "leak.jsonl").write_text(json.dumps({"id": "leak", "text": f"{prose(500)}\n{question}"}) + "\n")
    added = (
        "+cleaning@corpus.cleaning.decontamination=decontamination",
        f"corpus.cleaning.decontamination.sets={{quiz: {{path: {questions}}}}}",
        f"data_dir={tmp_path}/data",
    )
    found = run(*settings(texts, tmp_path / "out"), *added, tiny=False)
    assert found.status == 0, found.err
    assert len(rows_of(tmp_path / "out")) == 60
    lines = [line for path in (tmp_path / "out/decontamination").iterdir() for line in path.read_text().splitlines()]
    assert [json.loads(line)["document"] for line in lines] == ["leak"]
    assert "quiz" in (tmp_path / "out" / "corpus.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("corpus.sources.local_docs.path=/nonexistent",), "corpus.sources.local_docs.path=/nonexistent"),
        (("corpus.sources.local_docs.max_document_bytes=1",), "corpus.sources.local_docs.max_document_bytes=1"),
        (("corpus.cleaning.language.threshold=7",), "corpus.cleaning.language.threshold=7"),
        (
            (
                "+cleaning@corpus.cleaning.labels=labels",
                "corpus.cleaning.labels.backend.model=m",
                "corpus.cleaning.labels.backend.base_url=http://127.0.0.1:9/v1",
                "corpus.cleaning.labels.backend.concurrency=0",
            ),
            "corpus.cleaning.labels.backend.concurrency=0",
        ),
        (("corpus.tasks=0",), "corpus.tasks=0"),
        (("corpus.validation_fraction=1",), "corpus.validation_fraction=1"),
        (("corpus.categories.web=debug",), "corpus.categories"),
        (("corpus.cleaning.exact_spans.words=1",), "corpus.cleaning.exact_spans.words=1"),
        (("executor.workers=0",), "executor.workers=0"),
        (("corpus.sources.local_docs=null",), "corpus.sources is empty"),
        (("corpus=sistem",), "corpus=sistem"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, texts, tmp_path, overrides, said):
    found = run(*settings(texts, tmp_path / "out"), *overrides, tiny=False)
    assert found.status == 2
    assert said in found.err
    assert found.err.count("\n") == 1 or "Available options" in found.err
    assert not (tmp_path / "out").exists()


def test_the_system_recipe_asks_for_the_files_it_has_no_default_for(run, tmp_path):
    found = run("job=corpus", "corpus=system", f"corpus.output={tmp_path}/out", tiny=False)
    assert found.status == 2
    assert "corpus.sources.venues.records" in found.err


def test_other_settings_or_another_run_do_not_mix_into_a_folder(run, texts, tmp_path):
    assert run(*settings(texts, tmp_path / "out"), tiny=False).status == 0
    found = run(*settings(texts, tmp_path / "out"), "corpus.cleaning.exact_spans.words=60", tiny=False)
    assert found.status == 2
    assert "corpus.cleaning.exact_spans.words differs" in found.err
    with FileLock(tmp_path / "other" / ".run.lock"):
        found = run(*settings(texts, tmp_path / "other"), tiny=False)
    assert found.status == 2
    assert "is in use by another run" in found.err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    found = run(*settings(texts, tmp_path / "mine"), tiny=False)
    assert found.status == 2
    assert "holds something else" in found.err


def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(run, tmp_path):
    texts = write_texts(tmp_path / "texts", documents=900, files=6)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(*settings(texts, whole), "executor.workers=1", tiny=False).status == 0
    command = [sys.executable, "-m", "palimpsest", *settings(texts, broken), "executor.workers=1"]
    for phase in ("01-read", "*-near_duplicates-filter", "*-exact_spans-find"):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(broken.glob(f"logs/{phase}/completions/*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (broken / "manifest.json").exists()
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0
    assert rows_of(broken) == rows_of(whole)
    steps = [json.loads((out / "record" / "merged.json").read_text()) for out in (whole, broken)]
    assert steps[0] == steps[1]
