"""Interrupted runs: they print one line, keep finished work, and pay for no request twice on resume."""

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from types import SimpleNamespace

import pytest
from filelock import FileLock

from data_pipeline.rewriting.backends import RewritingStopped
from data_pipeline.rewriting.journal import Journal
from tests.data_pipeline.rewriting.conftest import ScriptedServer, rows_of, run_rewriting, write_corpus


class Job:
    """The job in a separate process, to be killed; forked, since imports would take longer than the test."""

    def __init__(self, source, output, server, concurrency=8, largest_file=None):
        self.says = output.with_name(f"{output.name}-said-{random.random()}.txt")
        url, patient = SimpleNamespace(url=server.url), {"concurrency": concurrency, "timeout_s": 20.0}

        def run():
            if largest_file:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            try:
                run_rewriting(source, output, url, patient, chunk_documents=16)
            except ValueError as error:
                self.says.write_text(str(error))
                os._exit(2)
            os._exit(0)

        self.process = multiprocessing.get_context("fork").Process(target=run)
        self.process.start()

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the last output."""
        self.process.join(60)
        return self.process.exitcode, self.says.read_text() if self.says.exists() else ""


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_killed_again_and_again_the_result_is_the_undisturbed_ones_and_a_kill_costs_at_most_what_was_in_flight(
    tmp_path, server, drawn_seed
):
    source = write_corpus(tmp_path / "in", 240)
    with ScriptedServer() as undisturbed:
        run_rewriting(source, tmp_path / "calm", undisturbed, chunk_documents=16)
    draw, kills, concurrency = random.Random(drawn_seed), 0, 8
    server.delay = 0.04
    for _ in range(3):
        job = Job(source, tmp_path / "out", server, concurrency)
        wanted = server.asked.total() + draw.randint(5, 25)
        while job.process.is_alive() and server.asked.total() < wanted:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        job.process.kill()
        kills += job.end()[0] == -signal.SIGKILL
    while server.in_flight:  # the server answers what the dead have asked
        time.sleep(0.01)
    server.delay = 0.0
    summary = run_rewriting(source, tmp_path / "out", server, chunk_documents=16)
    assert kills >= 1
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "calm")
    assert summary["total"]["kept"] == 240
    assert 240 <= server.paid.total() <= 240 + kills * concurrency
    assert max(server.paid.values()) <= 1 + kills


def test_a_wrong_key_stops_at_once_and_is_nowhere(tmp_path, server, monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")
    server.key = "another"
    source = write_corpus(tmp_path / "in", 50)
    with pytest.raises(RewritingStopped, match=r"key_variable=SOME_KEY.*401.*0 of 50") as error:
        run_rewriting(source, tmp_path / "out", server, {"key_variable": "SOME_KEY", "concurrency": 4})
    assert server.asked.total() <= 4  # those under way
    written = "".join(p.read_text(errors="replace") for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert "sk-secret" not in one_line(error) + written + caplog.text + repr(error.value.__cause__)
    server.key = "sk-secret-123"
    assert run_rewriting(source, tmp_path / "out", server, {"key_variable": "SOME_KEY"})["total"]["kept"] == 50
    written = "".join(p.read_text(errors="replace") for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert "sk-secret" not in written


def test_a_key_that_a_server_repeats_in_an_error_is_struck_out(tmp_path, server, monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")

    def repeats(handler, kind, name, text):
        return handler.reply(500, {"error": {"message": f"oh no, {handler.headers['Authorization']}"}})

    server.send = repeats
    source = write_corpus(tmp_path / "in", 2)
    with pytest.raises(RewritingStopped, match=r"oh no, Bearer \*\*\*") as error:
        run_rewriting(source, tmp_path / "out", server, {"key_variable": "SOME_KEY", "tries": 1})
    assert "sk-secret" not in one_line(error) + caplog.text


def test_a_key_that_the_environment_lacks_is_named(tmp_path, server):
    with pytest.raises(ValueError, match=r"key_variable=NO_SUCH_KEY is not in the environment"):
        run_rewriting(write_corpus(tmp_path / "in", 2), tmp_path / "out", server, {"key_variable": "NO_SUCH_KEY"})


def test_a_server_that_dies_half_way_is_one_line_and_a_rerun_completes(tmp_path, server):
    source = write_corpus(tmp_path / "in", 100)

    def dies(name, n):
        server.dead = server.dead or server.paid.total() >= 60
        return "500" if server.dead else "good"

    server.script = dies
    with pytest.raises(RewritingStopped, match=r"base_url=.*no answer in 3 tries.*\d+ of 100 rewritings") as error:
        run_rewriting(source, tmp_path / "out", server, {"tries": 3}, chunk_documents=16)
    assert "scripted 500" in one_line(error)
    paid = server.paid.total()
    assert 60 <= paid < 80
    server.dead, server.script = False, lambda name, n: "good"
    summary = run_rewriting(source, tmp_path / "out", server, chunk_documents=16)
    assert server.paid.total() == 100
    assert set(server.paid.values()) == {1}
    assert summary["total"]["kept"] == len(rows_of(tmp_path / "out")) == 100


def test_a_server_that_is_not_there_is_one_line(tmp_path, server):
    source = write_corpus(tmp_path / "in", 5)
    server.__exit__()
    with pytest.raises(RewritingStopped, match=r"base_url=http://127.*no answer in 2 tries") as error:
        run_rewriting(source, tmp_path / "out", server, {"tries": 2})
    one_line(error)


def test_one_request_that_always_fails_costs_one_document_not_the_run(tmp_path, server):
    server.script = lambda name, n: "500" if name == "DOC3" else "400" if name == "DOC5" else "good"
    server.delay = 0.02
    source = write_corpus(tmp_path / "in", 80)
    summary = run_rewriting(source, tmp_path / "out", server, {"tries": 4, "concurrency": 4})
    assert summary["styles"]["short"]["left_out_by_reason"] == {"server_error": 1, "refused_by_server": 1}
    assert summary["total"]["kept"] == 78


def test_settings_that_the_server_refuses_stop_the_run_with_its_words(tmp_path, server):
    server.script = lambda name, n: "422"
    with pytest.raises(RewritingStopped, match=r"refuses every request: .*scripted 422"):
        run_rewriting(write_corpus(tmp_path / "in", 50), tmp_path / "out", server)
    assert server.asked.total() < 50


def test_429_is_waited_out_however_often_it_comes_but_not_for_ever(tmp_path, server):
    server.script = lambda name, n: "429" if n <= 8 else "good"
    source = write_corpus(tmp_path / "in", 3)
    assert run_rewriting(source, tmp_path / "out", server, {"tries": 2})["total"]["kept"] == 3
    server.script = lambda name, n: "429"
    with pytest.raises(RewritingStopped, match="429"):
        run_rewriting(source, tmp_path / "other", server, {"longest_wait_s": 0.3})


@pytest.mark.parametrize(("limit", "spent"), [({"max_requests": 30}, 30), ({"max_tokens": 6000}, 40)])
def test_a_budget_is_never_overdrawn_and_a_greater_one_goes_on(tmp_path, server, limit, spent):
    source = write_corpus(tmp_path / "in", 200)
    (key,) = limit
    with pytest.raises(RewritingStopped, match=rf"backend\.{key}={limit[key]} is spent"):
        run_rewriting(source, tmp_path / "out", server, limit, chunk_documents=16)
    first = server.asked.total()
    assert 0 < first <= spent
    with pytest.raises(RewritingStopped, match="is spent"):  # what was spent is remembered
        run_rewriting(source, tmp_path / "out", server, limit, chunk_documents=16)
    assert server.asked.total() <= spent
    run_rewriting(source, tmp_path / "out", server, chunk_documents=16)
    assert set(server.paid.values()) == {1}
    assert len(rows_of(tmp_path / "out")) == 200


def test_a_second_run_into_the_folder_is_refused(tmp_path, server):
    source = write_corpus(tmp_path / "in", 2)
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".run.lock"),
        pytest.raises(ValueError, match=r"rewrite\.output=.*in use") as error,
    ):
        run_rewriting(source, tmp_path / "out", server)
    one_line(error)
    assert server.asked.total() == 0


def test_two_runs_that_start_together_pay_once(tmp_path, server):
    server.delay = 0.05
    source = write_corpus(tmp_path / "in", 40)
    both = [Job(source, tmp_path / "out", server) for _ in range(2)]
    (status, _), (other_status, other_said) = sorted(job.end() for job in both)
    assert (status, other_status) == (0, 2)
    assert "in use by another run" in other_said
    assert server.asked.total() == 40


CHANGES = [
    (
        {"styles": {"short": {"system": "Rephrase it.", "user": "$text", "max_tokens_ratio": 2.0}}},
        "styles.short.system",
    ),
    ({"seed": 1}, "seed"),
    ({"part_characters": 300}, "part_characters"),
    ({"screens": {}}, "screens.copied"),
]


@pytest.mark.parametrize(("change", "key"), CHANGES)
def test_changed_settings_in_the_same_folder_are_named(tmp_path, server, change, key):
    source = write_corpus(tmp_path / "in", 2)
    run_rewriting(source, tmp_path / "out", server)
    with pytest.raises(ValueError, match=rf"rewrite\.{key} differs from what rewrite\.output=") as error:
        run_rewriting(source, tmp_path / "out", server, **change)
    one_line(error)


def test_another_model_and_a_changed_input_are_named_but_speed_may_change(tmp_path, server):
    source = write_corpus(tmp_path / "in", 2)
    run_rewriting(source, tmp_path / "out", server)
    run_rewriting(source, tmp_path / "out", server, {"concurrency": 3, "timeout_s": 2.0})
    with pytest.raises(ValueError, match=r'rewrite\.backend\.model differs .*"m", now "other"'):
        run_rewriting(source, tmp_path / "out", server, {"model": "other"})
    source = source.rename(tmp_path / "moved")
    run_rewriting(source, tmp_path / "out", server)
    (source / "more.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"rewrite\.input\.files differs"):
        run_rewriting(source, tmp_path / "out", server)


def test_a_disk_that_fills_is_one_line_and_what_was_finished_stays(tmp_path, server):
    source = write_corpus(tmp_path / "in", 64)
    # A journal of 16 documents is longer than any file may be: the first ones fit.
    status, said = Job(source, tmp_path / "out", server, concurrency=2, largest_file=6000).end()
    assert status == 2
    assert "is on a disk that takes no more" in said
    assert len(said.splitlines()) == 1
    journaled = sum(len(p.read_text().splitlines()) for p in (tmp_path / "out" / "journals").iterdir())
    assert journaled >= 2
    for path in (tmp_path / "out" / "journals").iterdir():
        assert path.read_bytes().endswith(b"\n")  # no torn record
    before = server.paid.total()
    run_rewriting(source, tmp_path / "out", server, chunk_documents=16)
    assert server.paid.total() - before == 64 - journaled
    assert len(rows_of(tmp_path / "out")) == 64


def test_what_interrupts_between_shard_and_journal_changes_nothing(tmp_path, server):
    """A kill after the shard's rename, and before its journal is removed."""
    source = write_corpus(tmp_path / "in", 40)
    server.script = lambda name, n: "good" if int(name[3:]) < 32 else "401"
    with pytest.raises(RewritingStopped):
        run_rewriting(source, tmp_path / "out", server, chunk_documents=16)
    done = sorted((tmp_path / "out" / "shards").iterdir())
    assert done
    stale = Journal(tmp_path / "out" / "journals" / "00000-000000.jsonl")
    stale.append({"key": "x", "tries": 1000, "tokens_in": 0, "tokens_out": 0})
    stale.close()
    (tmp_path / "out" / "shards" / ".train-00000-000002.parquet.partial").write_bytes(b"PAR1")
    server.script = lambda name, n: "good"
    # What the stale journal says was spent is in the shard: it must not count twice against the budget.
    run_rewriting(source, tmp_path / "out", server, {"max_requests": 200}, chunk_documents=16)
    assert [row["rewritten_from"] for row in rows_of(tmp_path / "out")] == [f"forum:{n}" for n in range(40)]
    assert set(server.paid.values()) == {1}
    assert not list((tmp_path / "out" / "shards").glob(".*"))


BAD = [
    ({"part_characters": 10}, "rewrite.part_characters=10"),
    ({"attempts": True}, "rewrite.attempts=true"),
    ({"styles": {}}, "rewrite.styles is empty"),
    ({"styles": {"a": {"system": "x", "user": "no field"}}}, "rewrite.styles.a.user lacks the field $text"),
    ({"styles": {"a": {"system": "x", "user": "$text $body"}}}, "rewrite.styles.a.user has the field $body"),
    ({"styles": {"a": {"system": "$ 5", "user": "$text"}}}, "rewrite.styles.a.system has a $"),
    ({"styles": {"a": {"user": "$text"}}}, "rewrite.styles.a.system is missing"),
    ({"styles": {"a": {"system": "", "user": "$text", "temprature": 1}}}, "rewrite.styles.a.temprature"),
    ({"styles": {"a": {"system": "", "user": "$text", "temperature": 9}}}, "rewrite.styles.a.temperature=9"),
    ({"styles": {"a": {"system": "", "user": "$text", "form": "xml"}}}, "rewrite.styles.a.form=xml"),
    ({"screens": {"length": {"min_ratio": 1}}}, "rewrite.screens.length.max_ratio is missing"),
    ({"screens": {"lenght": {}}}, "rewrite.screens.lenght is not a screen"),
    ({"screens": {"length": {"min_ratio": 1, "max_ratio": "x"}}}, "rewrite.screens.length.max_ratio=x"),
    ({"screens": {"refusal": {"characters": 9, "patterns": ["("]}}}, "rewrite.screens.refusal.patterns"),
    ({"input": "/nonexistent"}, "rewrite.input=/nonexistent: no such file"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_a_wrong_setting_is_one_line_that_names_its_key(tmp_path, server, change, said):
    source = write_corpus(tmp_path / "in", 2)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the words are looked at below)
        run_rewriting(source, tmp_path / "out", server, **change)
    assert one_line(error).startswith(said)
    assert not (tmp_path / "out").exists()


def test_an_output_with_something_else_in_it_or_inside_the_input_is_refused(tmp_path, server):
    source = write_corpus(tmp_path / "in", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds something else"):
        run_rewriting(source, tmp_path / "out", server)
    with pytest.raises(ValueError, match=r"is in rewrite\.input"):
        run_rewriting(source, source / "rewritten", server)
    assert sorted(p.name for p in source.iterdir()) == ["part-00000.parquet"]
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ValueError, match=r"rewrite\.output=.*Permission denied"):
            run_rewriting(source, tmp_path / "closed" / "out", server)


def test_strict_stops_at_a_broken_record(tmp_path, server):
    source = write_corpus(tmp_path / "in", 2)
    (source / "z.jsonl").write_text(json.dumps({"id": "no text"}) + "\n")
    with pytest.raises(ValueError, match=r"z\.jsonl: line 1: no column 'text'"):
        run_rewriting(source, tmp_path / "out", server, strict=True)
