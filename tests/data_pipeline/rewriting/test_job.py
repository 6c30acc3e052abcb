"""`job=rewrite` from the command line."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.data_pipeline.rewriting.conftest import CONF, rows_of, write_corpus

STYLES = ",".join(sorted(path.stem for path in (CONF / "style").glob("[!_]*.yaml")))
EASY = ("rewrite/backend=endpoint", "rewrite.backend.model=m", "rewrite.backend.backoff_s=0.01")


def rewrite(run, *overrides):
    return run("job=rewrite", *overrides, tiny=False)


def test_the_command_rewrites_in_every_style_and_says_what_came_out(run, tmp_path, server):
    write_corpus(tmp_path / "in", 2)
    places = (
        f"rewrite.input={tmp_path}/in",
        f"rewrite.output={tmp_path}/out",
        f"rewrite.backend.base_url={server.url}",
    )
    server.script = lambda name, n: "I'm sorry, I can't."
    found = rewrite(run, *EASY, *places, f"rewrite/style=[{STYLES}]", "rewrite.attempts=1")
    assert found.status == 0, found.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert sorted(summary["styles"]) == STYLES.split(",")
    assert sum(style["left_out"] for style in summary["styles"].values()) + summary["total"]["unsuited"] == 18
    assert "textbook: 0 kept, 2 left out" in found.err
    assert found.out == ""


def test_screens_are_switched_off_on_the_command_line(run, tmp_path, server):
    write_corpus(tmp_path / "in", 2)
    server.script = lambda name, n: "Other words."
    places = (
        f"rewrite.input={tmp_path}/in",
        f"rewrite.output={tmp_path}/out",
        f"rewrite.backend.base_url={server.url}",
    )
    found = rewrite(run, *EASY, *places, "rewrite/style=[rephrase_easy]", "rewrite/screens=none")
    assert found.status == 0, found.err
    assert [row["text"] for row in rows_of(tmp_path / "out")] == ["Other words.\n"] * 2


def test_tasks_run_apart_by_an_executor_and_the_last_one_ends_the_run(run, tmp_path, server):
    write_corpus(tmp_path / "in", 40)  # three row groups
    places = (
        f"rewrite.input={tmp_path}/in",
        f"rewrite.output={tmp_path}/out",
        f"rewrite.backend.base_url={server.url}",
    )
    apart = ("rewrite/style=[rephrase_easy]", "rewrite/screens=none", "rewrite.tasks=3", "executor=local")
    found = rewrite(run, *EASY, *places, *apart, "executor.workers=2")
    assert found.status == 0, found.err
    assert sorted(server.paid.values()) == [1] * 40
    assert len(rows_of(tmp_path / "out")) == 40
    assert "rephrase_easy: 40 kept" in found.err
    again = rewrite(run, *EASY, *places, *apart)
    assert "is finished" in again.err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rewrite.input=/nonexistent", "rewrite.output=x"), "rewrite.input=/nonexistent: no such file"),
        (("rewrite.input=/nonexistent",), "rewrite.output"),
        (("rewrite.input=x", "rewrite.output=y", "rewrite/style=[sonnet]"), "rewrite/style=sonnet"),
        (("rewrite.input=x", "rewrite.output=y", "rewrite.backend.concurrency=0"), "rewrite.backend.concurrency=0"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, command, overrides, said):
    found = rewrite(run, *EASY, "rewrite.backend.base_url=http://127.0.0.1:9/v1", *overrides)
    assert found.status == 2
    assert said in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not (command.folder / "y").exists()


def test_help_imports_none_of_it():
    code = (
        "import sys; sys.argv = ['palimpsest', '--help']; import palimpsest\n"
        "try:\n    palimpsest.main()\nexcept SystemExit:\n    pass\n"
        "found = {'openai', 'torch', 'transformers', 'pyarrow', 'datatrove', 'py3langid'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
