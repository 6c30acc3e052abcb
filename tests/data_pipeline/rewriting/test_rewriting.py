import hashlib
import json
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_pipeline.documents import Problems
from data_pipeline.rewriting.backends import Answer, Backend
from data_pipeline.rewriting.backends.endpoint import Endpoint
from data_pipeline.rewriting.inputs import Corpus
from data_pipeline.rewriting.job import rewrite
from data_pipeline.rewriting.plan import read_plan
from tests.data_pipeline.rewriting.conftest import (
    STYLE,
    TEXT,
    left_out_of,
    rows_of,
    run_rewriting,
    settings_for,
    swapped,
    write_corpus,
)

FAULTS = ("429", "500", "hang", "cut", "no_json", "other_json", "empty", "refusal")


def tenth_faulty(name, n):
    """Fail a tenth of the requests, each kind equally often, in any order of arrival."""
    draw = int.from_bytes(hashlib.sha256(f"{name} {n}".encode()).digest()[:4], "big") / 2**32
    return FAULTS[int(draw * 10 * len(FAULTS))] if draw < 0.1 else "good"


def test_of_200_documents_with_a_tenth_of_faults_none_is_lost_none_doubled(tmp_path, server):
    server.script = tenth_faulty
    source = write_corpus(tmp_path / "in", 200)
    # Patient enough that no good answer comes too late on a busy machine: it would be paid for twice.
    summary = run_rewriting(source, tmp_path / "out", server, backend={"timeout_s": 2.0})
    assert len(server.kinds) == len(FAULTS) + 1, server.kinds
    rows = rows_of(tmp_path / "out")
    assert sorted(row["rewritten_from"] for row in rows) == sorted(f"forum:{n}" for n in range(200))
    assert {row["id"]: row["text"] for row in rows} == {
        f"forum:{n}#short": swapped(TEXT.format(n=n)) + "\n" for n in range(200)
    }
    useless = server.kinds["empty"] + server.kinds["refusal"]
    assert server.paid.total() == 200 + useless == summary["total"]["requests"]
    assert summary["total"]["tries"] == server.asked.total()
    assert summary["total"]["kept"] == 200
    rejected = summary["styles"]["short"]["rejected_answers_by_screen"]
    assert rejected["empty"] == server.kinds["empty"]
    assert rejected["refusal"] == server.kinds["refusal"]


def test_a_document_carries_where_it_comes_from(tmp_path, server):
    source = write_corpus(tmp_path / "in", 3)
    run_rewriting(source, tmp_path / "out", server)
    row = rows_of(tmp_path / "out")[2]
    assert (row["id"], row["rewritten_from"], row["style"], row["model"]) == ("forum:2#short", "forum:2", "short", "m")
    assert (row["licence"], row["category"], row["source"], row["split"]) == ("CC-BY-SA-4.0", "debug", "forum", "train")
    assert (row["parts"], row["source_parts"], len(row["prompt_hash"])) == ("0", 1, 16)
    settings = {"temperature": 0.7, "top_p": 0.95, "max_tokens_ratio": 2.0}
    assert json.loads(row["sampling"]) == {**settings, "seeds": server.seeds["DOC2"]}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] == 3
    assert manifest["identity"]["backend"]["model"] == "m"
    assert [shard["documents"] for shard in manifest["shards"]] == [3]


def test_an_answer_that_fails_is_asked_for_with_another_seed_then_left_out(tmp_path, server):
    never = "I cannot help with this."
    server.script = lambda name, n: never if name == "DOC1" or (name == "DOC2" and n == 1) else "good"
    summary = run_rewriting(write_corpus(tmp_path / "in", 4), tmp_path / "out", server)
    assert server.asked == {"DOC0": 1, "DOC1": 3, "DOC2": 2, "DOC3": 1}
    assert len(set(server.seeds["DOC1"])) == 3
    assert left_out_of(tmp_path / "out") == {"forum:1": ["length", "refusal", "facts"]}
    style = summary["styles"]["short"]
    assert style["left_out_by_reason"] == {"length": 1}
    assert style["rejected_answers_by_screen"] == {"length": 4, "refusal": 4, "facts": 4}
    samples = (tmp_path / "out" / "samples.md").read_text()
    assert "left out: length" in samples
    assert never in samples
    assert "short, kept" in samples


def test_at_temperature_zero_the_same_question_is_not_asked_again(tmp_path, server):
    server.script = lambda name, n: "empty"
    cold = {"cold": {**STYLE, "temperature": 0.0}}
    run_rewriting(write_corpus(tmp_path / "in", 2), tmp_path / "out", server, styles=cold)
    assert set(server.asked.values()) == {1}


def test_a_long_document_is_rewritten_in_parts_and_joined_in_order(tmp_path, server):
    sections = [f"# Part {n}\n\nDOC{n} " + TEXT.format(n=n) for n in range(6)]
    source = write_corpus(tmp_path / "in", 1, text="\n\n".join(sections).replace("{", "{{").replace("}", "}}"))
    server.delay = 0.01
    run_rewriting(source, tmp_path / "out", server, part_characters=500)
    (row,) = rows_of(tmp_path / "out")
    places = [row["text"].index(f"node{n}") for n in range(6)]
    assert places == sorted(places)
    assert (row["parts"], row["source_parts"]) == ("0,1,2,3,4,5", 6)


@pytest.mark.parametrize(("whole", "kept"), [(True, None), (False, "0,2")])
def test_a_document_with_a_part_left_out_stands_only_where_its_parts_stand_alone(tmp_path, server, whole, kept):
    sections = [f"# Part {n}\n\nDOC{n} " + TEXT.format(n=n) for n in range(3)]
    source = write_corpus(tmp_path / "in", 1, text="\n\n".join(sections))
    server.script = lambda name, n: "empty" if name == "DOC1" else "good"
    styles = {"short": {**STYLE, "whole": whole}}
    run_rewriting(source, tmp_path / "out", server, part_characters=500, styles=styles)
    assert [row["parts"] for row in rows_of(tmp_path / "out")] == ([kept] if kept else [])
    assert left_out_of(tmp_path / "out") == ({} if kept else {"forum:0": ["empty"]})


def test_styles_take_the_documents_that_suit_them_and_pairs_are_kept_apart(tmp_path, server):
    pairs = [{"task": "Reload node0 of DOC0.", "command": "tool --reload"}]
    server.script = lambda name, n: json.dumps(pairs) if n == 1 else '[{"task": "x"}]'
    settings = {**STYLE, "form": "pairs", "pair_keys": ["task", "command"], "pair_text": "$task: `$command`"}
    styles = {
        "pairs": {**settings, "categories": ["de*"], "screens": {"length": None, "facts": None}},
        "venues": {**STYLE, "categories": ["general_system"]},
    }
    summary = run_rewriting(write_corpus(tmp_path / "in", 1), tmp_path / "out", server, styles=styles)
    (row,) = rows_of(tmp_path / "out")
    assert row["text"] == "Reload node0 of DOC0.: `tool --reload`\n"
    assert json.loads(row["pairs"]) == pairs
    assert summary["styles"]["venues"]["unsuited"] == 1
    server.script = lambda name, n: '[{"task": "x", "command": "y", "more": "z"}]'
    summary = run_rewriting(tmp_path / "in", tmp_path / "other", server, styles=styles)
    assert summary["styles"]["pairs"]["left_out_by_reason"] == {"malformed": 1}


@pytest.mark.parametrize(
    "answer", [r'[{"task": "a \ud800", "command": "b"}]', r'[{"task": "a\u0000", "command": "b"}]']
)
def test_an_answer_that_escapes_what_no_text_may_hold_is_left_out(tmp_path, server, answer):
    server.script = lambda name, n: answer
    settings = {**STYLE, "form": "pairs", "pair_keys": ["task", "command"], "pair_text": "$task: `$command`"}
    source = write_corpus(tmp_path / "in", 2)
    run_rewriting(source, tmp_path / "out", server, styles={"pairs": settings}, screens={})
    assert left_out_of(tmp_path / "out") == {"forum:0": ["broken_text"], "forum:1": ["broken_text"]}


def test_a_finished_folder_asks_for_nothing_again(tmp_path, server):
    source = write_corpus(tmp_path / "in", 20)
    first = run_rewriting(source, tmp_path / "out", server)
    assert run_rewriting(source, tmp_path / "out", server) == first
    assert server.asked.total() == 20


def test_chunks_do_not_wait_for_one_slow_document(tmp_path, server):
    server.script = lambda name, n: "hang" if name == "DOC0" and n == 1 else "good"
    run_rewriting(write_corpus(tmp_path / "in", 60), tmp_path / "out", server, chunk_documents=20)
    rows = rows_of(tmp_path / "out")
    assert [row["rewritten_from"] for row in rows] == [f"forum:{n}" for n in range(60)]
    assert len(list((tmp_path / "out" / "shards").iterdir())) == 3


def test_two_tasks_under_datatroves_executor_make_one_corpus(tmp_path, server):
    from datatrove.executor import LocalPipelineExecutor

    from data_pipeline.rewriting.step import RewriteStep

    source = write_corpus(tmp_path / "in", 100)
    plan = read_plan(settings_for(source, tmp_path / "out", tasks=2))
    backend = {"base_url": server.url, "model": "m"}
    step = RewriteStep(plan, Endpoint(**backend), backend)
    LocalPipelineExecutor([step], tasks=2, workers=1, logging_dir=str(tmp_path / "log")).run()
    assert sorted(row["rewritten_from"] for row in rows_of(tmp_path / "out")) == sorted(
        f"forum:{n}" for n in range(100)
    )
    assert set(server.paid.values()) == {1}
    assert (tmp_path / "out" / "manifest.json").exists()


def test_what_is_too_long_is_left_out_by_name_and_costs_nothing(tmp_path, server):
    source = tmp_path / "in"
    source.mkdir()
    texts = {"good": TEXT.format(n=1), "log": "```\n" + "x y\n" * 1500 + "```\n", "book": "word " * 30_000}
    (source / "a.jsonl").write_text("".join(json.dumps({"id": k, "text": t}) + "\n" for k, t in texts.items()))
    run_rewriting(source, tmp_path / "out", server)
    assert left_out_of(tmp_path / "out") == {"log": ["part_too_long"], "book": ["document_too_long"]}
    assert server.asked.total() == 1


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "last"}\n')
    problems = Problems()
    tracemalloc.start()
    texts = [document.text for document in Corpus(tmp_path).documents(problems)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == ["first", "last"]
    assert "a.jsonl: line 2: line too long" in problems.lines[0]
    assert peak < 60e6


class Instant(Backend):
    """Answers immediately, to measure everything else."""

    model, in_flight = "m", 16

    async def start(self, folder, requests, tokens):
        pass

    async def complete(self, request):
        return Answer(swapped(request.messages[-1]["content"]), "stop", 1, 1)

    async def close(self):
        pass


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path):
    peaks, text = [], TEXT * 4
    for documents in (600, 2400):  # so many that a chunk more or less, as the collector runs, is small beside the bound
        source = write_corpus(tmp_path / f"in{documents}", documents, text=text)
        plan = read_plan(settings_for(source, tmp_path / f"out{documents}", chunk_documents=32, screens={}))
        tracemalloc.start()
        rewrite(plan, Instant(), {})
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1800 * len(text) / 3  # not even the text, let alone the text and what is made of it


def test_json_lines_are_rewritten_and_broken_records_named(tmp_path, server):
    source = tmp_path / "in"
    source.mkdir()
    metadata = {"url": "http://x", "license": "MIT"}
    good = [json.dumps({"id": f"a{n}", "text": TEXT.format(n=n), "metadata": metadata}) for n in range(3)]
    (source / "a.jsonl").write_text(
        "\n".join([good[0], '{"text": ', good[1], '{"id": "b"}', r'{"id": "\ud800", "text": "c"}', good[2]]) + "\n"
    )
    Path(source / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    summary = run_rewriting(source, tmp_path / "out", server)
    rows = rows_of(tmp_path / "out")
    assert [row["rewritten_from"] for row in rows] == ["a0", "a1", "a2"]
    assert (rows[0]["url"], rows[0]["licence"]) == ("http://x", "MIT")
    broken = ("corrupt Parquet", "broken JSON", "no column 'text'", "not UTF-8")
    assert summary["skipped"] == dict.fromkeys(broken, 1)
    assert any("a.jsonl: line 2: broken JSON" in line for line in summary["problems"])


def test_shards_are_whole_files_with_their_counts_in_them(tmp_path, server):
    run_rewriting(write_corpus(tmp_path / "in", 40), tmp_path / "out", server)
    metadata = pq.read_metadata(tmp_path / "out" / "shards" / "train-00000-000000.parquet").metadata
    assert json.loads(metadata[b"palimpsest.rewriting"])["styles"]["short"]["counts"]["kept"] == 32
    assert not (tmp_path / "out" / "journals").exists()
