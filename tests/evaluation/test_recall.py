"""`job=evaluate benchmark=recall`: its questions, what counts as right, and the command."""

import itertools
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from evaluation.answering import answers
from evaluation.recall import job
from evaluation.recall.questions import KINDS, Recall, generated_sentences, is_right, sentences_of
from evaluation.recall.report import as_markdown, compared
from lit_modules.networks.caches import CacheSettings, CompressedCache, TensorSettings
from tests.evaluation.conftest import TEXT, make_starting_tokenizer

DEPTHS = (0, 0.25, 0.5, 1)


@pytest.fixture(scope="module")
def tokenizer():
    return make_starting_tokenizer()


@pytest.fixture(scope="module")
def recall(tokenizer):
    return Recall(tokenizer, None, 3, 0)


def asked_key(prompt, kind):
    return re.search(r"of the (.*) is$" if kind == "needles" else r"\n(.*):$", prompt)[1]


@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [600, 1001])
def test_a_prompt_states_the_answer_once_and_fills_the_length(tokenizer, text, kind, length):
    made = Recall(tokenizer, text, 3, 0)
    for depth, number in itertools.product(DEPTHS, range(2)):
        question = made.question(kind, length, depth, number)
        prompt = tokenizer.decode(question.prompt, skip_special_tokens=True)
        key = asked_key(prompt, kind)
        fact = (
            f"The access code of the {key} is {question.answer}." if kind == "needles" else f"{key}: {question.answer}"
        )
        assert prompt.count(fact) == 1
        assert prompt.count(question.answer) == 1
        assert question.prompt[0] == 0  # as the tokenizer begins a text
        assert length - 100 < len(question.prompt) + question.max_new_tokens <= length


@pytest.mark.parametrize("kind", KINDS)
def test_the_fact_is_at_the_depth_that_is_asked_for(recall, tokenizer, kind):
    for depth in DEPTHS:
        question = recall.question(kind, 3000, depth, 1)
        prompt = tokenizer.decode(question.prompt, skip_special_tokens=True)
        asked = prompt.rindex("\n\n")
        assert prompt.index(question.answer) / asked == pytest.approx(depth, abs=0.06)


def test_a_depth_of_one_is_right_before_the_question_and_of_nothing_at_the_beginning(recall, tokenizer):
    last = tokenizer.decode(recall.question("pairs", 800, 1, 0).prompt, skip_special_tokens=True)
    assert re.search(r"\d{6}\n\nThe access code", last)
    first = recall.question("pairs", 800, 0, 0)
    assert f": {first.answer}\n" in tokenizer.decode(first.prompt, skip_special_tokens=True).split("\n", 2)[1] + "\n"


def test_needles_and_pairs_have_different_keys_and_numbers(recall, tokenizer):
    needles = tokenizer.decode(recall.question("needles", 900, 0.5, 0).prompt, skip_special_tokens=True)
    facts = re.findall(r"The access code of the (.*?) is (\d{6})\.", needles)
    assert len(facts) == len(dict(facts)) == 3
    pairs = tokenizer.decode(recall.question("pairs", 900, 0.5, 0).prompt, skip_special_tokens=True)
    lines = re.findall(r"^(.*): (\d{6})$", pairs, re.MULTILINE)
    assert len(lines) == len(dict(lines)) == len({value for _, value in lines}) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_is_the_same_again_under_its_seed_and_another_under_another(tokenizer, kind):
    def ask(seed=0, length=700, depth=0.5, number=3):
        return Recall(tokenizer, None, 3, seed).question(kind, length, depth, number)

    assert ask() == ask()
    assert len({ask(), ask(seed=1), ask(length=701), ask(depth=0.75), ask(number=4)}) == 5


def test_a_length_without_room_is_a_mistake(recall):
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"^benchmark.lengths=60 has no room .* give at least \d+"):
            recall.question(kind, 60, 0.5, 0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 482913", True),
        (" 482913.", True),
        ("482913\nQuestion:", True),
        (" the code 482913", True),
        (" 4829137", False),
        (" 48291", False),
        (" 482914", False),
        (" 111111, not 482913", False),
        ("", False),
        (" ... !", False),
    ],
)
def test_the_first_number_has_to_be_the_answer(text, right):
    assert is_right(text, "482913") is right


def test_sentences_are_those_of_the_text_and_long_ones_are_cut():
    assert sentences_of("One two.  Three\nfour! Five?\n") == ["One two.", "Three four!", "Five?"]
    assert [len(part.split()) for part in sentences_of("word " * 100)] == [40, 40, 20]
    assert sentences_of(" \n") == []


def test_generated_sentences_hold_no_number_and_none_is_there_twice():
    every = generated_sentences()
    assert len(every) == len(set(every)) > 2000
    assert not any(character.isdigit() for sentence in every for character in sentence)


def test_answers_are_the_likeliest_tokens_whatever_the_batch_and_the_chunks(llama):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama).double().eval(), make_starting_tokenizer()
    model.generation_config.repetition_penalty = 5.0  # which a benchmark does not ask for
    prompts = [[0, 5, 6, 7, 8, 9, 10, 11, 12], [0, 40, 41], [0]]

    def generate(rows, chunk, cache=None):
        settings = {"max_new_tokens": 6, "chunk": chunk, "ends": ()}
        return answers(model, tokenizer, rows, cache or DynamicCache(config=model.config), **settings)

    def by_hand(row):
        for _ in range(6):
            with torch.no_grad():
                row = [*row, int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax())]
        return tokenizer.decode(row[-6:], skip_special_tokens=True)

    alone = [by_hand(row) for row in prompts]
    assert [generate([row], 64)[0] for row in prompts] == alone
    assert generate(prompts, 4) == generate(prompts, 64) == alone
    keeping = CompressedCache(
        model.config, CacheSettings(TensorSettings(group=16), TensorSettings(group=16), window=64)
    )
    assert generate(prompts, 4, keeping) == alone


def test_shares_are_of_all_questions_and_differences_are_paired():
    cells = [("needles", 100, 0.0), ("needles", 100, 1.0)]
    found = {
        "full": dict(zip(cells, ([True, True], [True, False]), strict=True)),
        "worse": dict(zip(cells, ([True, False], [True, False]), strict=True)),
    }
    report = compared(found, ("needles",))
    assert report["score"]["needles"]["full"] == {"value": 0.75, "standard_error": 0.25}
    assert report["difference"]["needles"] == {"worse": {"value": -0.25, "standard_error": 0.25}}
    assert report["cells"][2] == {"kind": "needles", "cache": "worse", "length": 100, "depth": 0.0, "share": 0.5}
    settings = {"kinds": ("needles",), "lengths": (100,), "depths": (0.0, 1.0), "samples": 2, "keys": 1, "text": None}
    made = {"checkpoint": "c", "settings": settings | {"seed": 0, "chunk": 1}, "caches": {"full": {}, "worse": {}}}
    made |= {"context": 99, "dtype": "float32", "device": "cpu", "versions": {}, "commit": "0", "date": "today"}
    text = as_markdown(report | made)
    assert "| needles | 75.0 ± 25.0 | 50.0 ± 28.9 (-25 ± 25) |" in text
    assert "| worse | 0 | 50 |" in text
    assert "above 99 tokens" in text


@pytest.fixture
def measure(run, ours, tmp_path):
    def call(*changes):
        return run(
            *("job=evaluate", "benchmark=recall", "device=cpu", f"checkpoint={ours}", f"output={tmp_path}/out"),
            *("benchmark.lengths=[450,500]", "benchmark.depths=[0,1]", "benchmark.samples=2", "benchmark.keys=2"),
            *changes,
            tiny=False,
        )

    return call


def test_the_command_leaves_report_table_and_picture_and_a_killed_one_goes_on(measure, tmp_path, monkeypatch):
    asked, whole = [], job.answers

    def dying(*given, **settings):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(given[2]))
        return whole(*given, **settings)

    with monkeypatch.context() as killing:
        killing.setattr(job, "answers", dying)
        assert measure().status == 130
    folder = tmp_path / "out" / "evaluation"
    assert not (folder / "recall.json").exists()
    monkeypatch.setattr(job, "answers", lambda *given, **settings: asked.append(2) or whole(*given, **settings))
    done = measure()
    assert done.status == 0, done.err
    assert len(asked) == 2 * 2 * 2  # kinds, lengths and depths, each once
    report = json.loads((folder / "recall.json").read_text())
    assert len(report["cells"]) == 8
    assert set(report["score"]) == set(KINDS)
    assert done.out.strip() == (folder / "recall.md").read_text().strip()
    assert (folder / "recall.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("benchmark.kinds=[needle]", "benchmark.kinds=needle"),
        ("benchmark.kinds=[]", "benchmark.kinds=[]"),
        ("benchmark.kinds=needles", "benchmark.kinds=needles"),
        ("benchmark.lengths=[0]", "benchmark.lengths=0"),
        ("benchmark.lengths=[450,450]", "benchmark.lengths=[450, 450]"),
        ("benchmark.lengths=[20]", "benchmark.lengths=20 has no room"),
        ("benchmark.depths=[0,2]", "benchmark.depths=[0, 2]"),
        ("benchmark.depths=[]", "benchmark.depths=[]"),
        ("benchmark.samples=0", "benchmark.samples=0"),
        ("benchmark.keys=0", "benchmark.keys=0"),
        ("benchmark.text=/no/such/file", "benchmark.text=/no/such/file cannot be read"),
        ("benchmark.text=/dev/null", "benchmark.text=/dev/null is empty"),
        ("benchmark.chunk=null", "benchmark.chunk=null"),
        ("benchmark.caches=fulll", "benchmark.caches=fulll is not known"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(measure, change, said):
    done = measure(change)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err
