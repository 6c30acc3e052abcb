"""`job=evaluate benchmark=longbench`: its sets, prompts and cuts, and the command on tiny copies."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from evaluation.longbench import job
from evaluation.longbench.documents import Definition, Document, prompt_tokens
from evaluation.longbench.report import GROUPS, as_markdown, math_beside
from tests.conftest import ROOT
from tests.evaluation.conftest import TEXT, make_starting_tokenizer

DEFINITIONS = {
    name: Definition(**given)
    for name, given in yaml.safe_load((ROOT / "conf/benchmark/_longbench_sets.yaml").read_text(encoding="utf-8"))[
        "definitions"
    ].items()
}
PLAIN = Definition("Title", "group", "qa_f1", 4, "Read: {context}\nQ: {input}\nA:")
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_there_are_21_sets_in_six_groups_and_those_of_examples_and_code_go_without_a_template():
    assert len(DEFINITIONS) == 21
    sizes = {group: sum(each.group == group for each in DEFINITIONS.values()) for group in GROUPS}
    assert list(sizes.values()) == [4, 4, 4, 4, 3, 2]
    without = {name for name, each in DEFINITIONS.items() if not each.chat_template}
    assert without == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, each in DEFINITIONS.items() if each.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert [name for name, each in DEFINITIONS.items() if each.ends_at_newline] == ["samsum"]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_prompt_holds_the_context_and_what_is_asked(name):
    text = DEFINITIONS[name].prompt.format(context="<{the context}>", input="<the input>")
    assert "<{the context}>" in text
    asks = name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert ("<the input>" in text) is asks


def decoded(definition, document, max_length, template=None):
    tokenizer = make_starting_tokenizer()
    tokenizer.chat_template = template
    tokens, cut = prompt_tokens(tokenizer, definition, document, max_length, template is not None)
    return tokenizer.decode(tokens), tokens, cut


def test_a_short_prompt_is_whole_and_begins_as_the_tokenizer_begins_a_text():
    text, _, cut = decoded(PLAIN, Document("the key", "what?", ["a"], ()), 100)
    assert text == "<|start|>Read: the key\nQ: what?\nA:"
    assert not cut


@pytest.mark.parametrize("max_length", [40, 41])
def test_a_long_prompt_loses_its_middle_and_keeps_both_instructions(max_length):
    text, tokens, cut = decoded(PLAIN, Document(" ".join([TEXT] * 20), "what?", ["a"], ()), max_length)
    assert cut
    assert text.startswith("<|start|>Read: the gate")
    assert text.endswith("\nQ: what?\nA:")
    assert 30 < len(tokens) <= 41


def test_a_template_is_put_around_the_cut_prompt_and_brings_its_own_beginning():
    text, _, cut = decoded(PLAIN, Document(" ".join([TEXT] * 20), "what?", ["a"], ()), 40, TEMPLATE)
    assert cut
    assert text.startswith("[Read: ")
    assert text.endswith("A:]>")


ROWS = {
    "qasper": {"input": "what forgets?", "context": TEXT, "answers": ["the gate", "gate"], "all_classes": None},
    "dureader": {"input": "什么", "context": "今天天气好", "answers": ["天气"], "all_classes": None},
    "trec": {"input": "Type:", "context": TEXT, "answers": ["Key"], "all_classes": ["Key", "Value"]},
    "samsum": {"input": "A: key", "context": TEXT, "answers": ["a key"], "all_classes": None},
    "passage_count": {"input": "", "context": TEXT, "answers": ["3"], "all_classes": None},
    "lcc": {"input": "", "context": "x = 1\n", "answers": ["y = 2"], "all_classes": None},
}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "longbench"
    made.mkdir()
    for name, row in ROWS.items():
        whole = row | {"length": 10, "dataset": name, "language": "en", "_id": "0"}
        (made / f"{name}.jsonl").write_text("".join(json.dumps(whole) + "\n" for _ in range(3)))
    return made


@pytest.fixture
def measure(run, llama, folder, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(llama, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)

    def call(*changes):
        return run(
            *("job=evaluate", "benchmark=longbench", "device=cpu", f"checkpoint={chatty}", f"output={tmp_path}/out"),
            *(f"benchmark.folder={folder}", f"benchmark.sets=[{','.join(ROWS)}]", "benchmark.max_length=48"),
            *(f"benchmark.definitions.{name}.max_new_tokens=3" for name in ROWS),
            *changes,
            tiny=False,
        )

    return call


@pytest.fixture
def asked(monkeypatch):
    """Return what the model is asked: the number of prompts, and the settings."""
    seen, whole = [], job.answers

    def watched(*given, **settings):
        seen.append((len(given[2]), settings))
        return whole(*given, **settings)

    monkeypatch.setattr(job, "answers", watched)
    return seen


def test_the_command_leaves_tables_and_picture_and_more_documents_use_what_is_there(measure, asked, tmp_path):
    out = tmp_path / "out" / "evaluation"
    done = measure("benchmark.limit=2")
    assert done.status == 0, done.err
    assert "only the first 2 documents" in done.out
    assert [number for number, _ in asked] == [2] * 6
    assert [settings["min_new_tokens"] for _, settings in asked] == [0, 0, 0, 1, 0, 0]
    done = measure("batch_size=1")
    assert done.status == 0, done.err
    assert [number for number, _ in asked[6:]] == [1] * 6
    report = json.loads((out / "longbench.json").read_text())
    assert set(report["documents"].values()) == {3}
    assert report["cut_prompts"]["qasper"] == 3
    assert list(report["groups"]["score"]) == list(dict.fromkeys(GROUPS[DEFINITIONS[name].group] for name in ROWS))
    assert report["overall"]["score"]["All sets"]["full"]["value"] == pytest.approx(
        sum(each["full"]["value"] for each in report["sets"]["score"].values()) / 6
    )
    assert "each Chinese character counts as a word" in done.out
    assert done.out.strip() == (out / "longbench.md").read_text().strip()
    assert (out / "longbench.png").stat().st_size > 1000


def test_a_template_and_another_length_are_answered_anew(measure, asked):
    for change, again in (
        ("benchmark.limit=1", 6),
        ("benchmark.chat_template=false", 3),  # the others go without a template anyway
        ("benchmark.max_length=40", 6),
        ("benchmark.max_length=40", 0),
    ):
        before = len(asked)
        assert measure("benchmark.limit=1", change).status == 0
        assert len(asked) - before == again, change


def test_gsm8k_of_the_same_weights_and_caches_is_beside_the_groups(tmp_path):
    math = {"full": {"value": 0.5, "standard_error": 0.1}}
    measured = {"weights": "w", "caches": {"full": {}}, "dtype": "float32"}
    report = measured | {"score": {"strict-match": math}, "difference": {"strict-match": {}}}
    assert math_beside(measured, tmp_path) is None
    (tmp_path / "gsm8k.json").write_text(json.dumps(report))
    assert math_beside(measured, tmp_path)["score"] == {"Math (GSM8K)": math}
    assert math_beside(measured | {"weights": "other"}, tmp_path) is None
    assert math_beside(measured | {"caches": {"full": {}, "kivi": {}}}, tmp_path) is None


def test_answers_are_scored_by_their_sets_metric(measure, monkeypatch, tmp_path):
    given = iter(["The gate.", "天气", "Key\nValue", "a key", "3 or 4", "y = 2\n"])
    monkeypatch.setattr(job, "answers", lambda *_, **__: [next(given)])
    done = measure("benchmark.limit=1")
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "out" / "evaluation" / "longbench.json").read_text())
    found = {title: each["full"]["value"] for title, each in report["sets"]["score"].items()}
    expected = {"Qasper": 1, "DuReader": 1, "TREC": 1, "SAMSum": 1, "PassageCount": 0.5, "LCC": 1}
    assert found == pytest.approx(expected, abs=1e-6)
    report["math"] = {"score": {"Math (GSM8K)": {"full": {"value": 0.5, "standard_error": None}}}, "difference": {}}
    report["math"]["difference"]["Math (GSM8K)"] = {}
    assert as_markdown(report).splitlines()[2].startswith("| cache | Math (GSM8K) | Single-Document QA |")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "benchmark.folder=/no/such/folder",
            "benchmark.folder=/no/such/folder has no qasper.jsonl and 5 others: unpack",
        ),
        ("benchmark.sets=[qasper,lccc]", "benchmark.sets=lccc is not known: did you mean lcc?"),
        ("benchmark.sets=3", "benchmark.sets=3"),
        ("benchmark.sets=[]", "benchmark.sets=[]"),
        ("benchmark.limit=0", "benchmark.limit=0"),
        ("benchmark.max_length=1", "benchmark.max_length=1"),
        ("benchmark.max_length=null", "leaves no room"),
        ("benchmark.chat_template=maybe", "benchmark.chat_template=maybe"),
        ("benchmark.chinese_words=words", "benchmark.chinese_words=words"),
        ("benchmark.chunk=0", "benchmark.chunk=0"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(measure, change, said):
    changes = [change]
    if change == "benchmark.max_length=null":
        changes.append("benchmark.definitions.qasper.max_new_tokens=90")
    done = measure(*changes)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "line 1: is not JSON"),
        ('{"input": "a", "context": 3}', "line 1: has no context"),
        ("\n", "has no doc"),
    ],
)
def test_a_damaged_copy_is_named_with_its_line(measure, folder, text, said):
    (Path(folder) / "lcc.jsonl").write_text(text)
    done = measure()
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert f"{folder}/lcc.jsonl" in done.err
    assert said in done.err
