"""The study of caches: equal bytes, what is kept, questions, and a run that goes on where it ended."""

import argparse
import itertools
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cache.study import recall_text, report, runs
from benchmarks.cache.study.cases import (
    BEST,
    EVICTED,
    FIRST_AND_RECENT,
    FULL_CASE,
    GATE,
    KIVI_AT_BALANCED,
    KIVI_OF_BEST,
    RECENT,
    SPARSE,
    SPARSE_AT_EVICTED,
    Case,
    Sizes,
    cases,
)
from benchmarks.cache.study.measuring import Subject
from benchmarks.cache.study.records import FILE, Records, Result, joined
from evaluation.recall.questions import KINDS, WORDS, is_right
from lit_modules.networks.caches import CacheSettings
from lit_modules.networks.caches.calibration import fit_rotations
from lit_modules.networks.caches.rotations import write_rotations
from lit_modules.networks.caches.settings import BLOCK
from tests.conftest import composed
from tests.evaluation.conftest import TEXT, make_starting_tokenizer

SIZES = Sizes(8192, 3, 64, 3, 64)
BALANCED = Case(FIRST_AND_RECENT, "balanced", 2, 192)


@pytest.fixture(scope="module")
def tokenizer():
    return make_starting_tokenizer()


def llama(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes)).eval()


def subject(model, tokenizer, path, chunk=64):
    ids = torch.randint(3, 40, (1, 64), generator=torch.Generator().manual_seed(0))
    write_rotations(path, fit_rotations(model, [ids]))
    return Subject("tiny", model, tokenizer, path, chunk)


def test_what_is_compared_at_equal_bytes_has_equal_bytes_to_within_a_block():
    pairs = {
        Case(RECENT, "plain", 2, 192, KIVI_AT_BALANCED): BALANCED,
        KIVI_OF_BEST: BEST,
        Case(SPARSE, EVICTED, 0, 192, SPARSE_AT_EVICTED): Case(SPARSE, "plain", 2, 192),
    }
    for one, other in pairs.items():
        bits = [case.bits_per_number(case.slots(SIZES), SIZES) for case in (one, other)]
        assert 0 <= bits[1] - bits[0] < 16 * BLOCK / SIZES.length
        assert one.slots(SIZES) > other.slots(SIZES)


@pytest.mark.parametrize(
    "case", [BALANCED, BEST, Case(SPARSE, "plain", 4, 96), Case(FIRST_AND_RECENT, EVICTED, 0, 300)]
)
def test_predicted_bits_are_those_of_a_cache(case, tokenizer, tmp_path):
    tiny = subject(llama(tokenizer).bfloat16(), tokenizer, tmp_path / "r.safetensors")
    sizes, ids = tiny.sizes(1024), torch.randint(3, 40, (2, 1025), generator=torch.Generator().manual_seed(0))
    _, _, bits = tiny.losses(case, ids)
    predicted = case.bits_per_number(case.slots(sizes), sizes)
    assert predicted == pytest.approx(bits, rel=1 / 16)  # storage grows by a sixteenth


def test_the_best_case_is_what_the_configuration_has():
    found = CacheSettings.of(composed("cache/best", "cache.rotations=maps.safetensors").cache)
    assert BEST.settings(SIZES, "maps.safetensors") == found


def test_every_case_has_valid_settings_and_is_there_once():
    for has_gates in (False, True):
        every = cases(has_gates)
        assert len({case.key for case in every}) == len(every)
        assert [case.tier for case in every] == sorted(case.tier for case in every)
        assert any(case.policy == GATE for case in every) == has_gates
        for case in every:
            settings = case.settings(SIZES, "maps.safetensors")
            assert settings.compresses == (case != FULL_CASE)


def test_training_documents_state_each_answer_before_it_is_asked_for_in_other_words():
    every = [set(itertools.chain(*lists)) for lists in (recall_text.TRAINING_WORDS, WORDS)]
    assert not every[0] & every[1]
    sentences = ["A sentence.", "Another one with more words in it.", "A third."]
    texts = list(recall_text.documents(sentences, 100_000, seed=0))
    asked = 0
    for text in texts:
        for key, value in re.findall(r"Answer: The access code of the (.*) is (\d{6})", text):
            assert 0 <= text.index(f"The access code of the {key} is {value}.") < text.index("Question:")
            asked += 1
        for key, value in re.findall(r"The access code of (.*):\n\1: (\d{6})", text):
            assert f"\n{key}: {value}\n" in text[: text.index("The access code of")]
            asked += 1
    assert asked > 100


def test_questions_are_equally_long_and_keep_their_answers(tokenizer, tmp_path):
    tiny = Subject("tiny", None, tokenizer, tmp_path, 64)
    for kind in KINDS:
        found = tiny.questions(kind, 700, 2, 0, TEXT * 50)
        assert len({len(question.prompt) for question in found}) == 1
        for question in found:
            text = tokenizer.decode(question.prompt)
            assert question.prompt[0] == 0
            assert text.count(question.answer) == 1
            assert is_right(f" {question.answer} and", question.answer)


def test_processes_share_the_tasks_and_their_results_come_together(tmp_path):
    tasks = [runs.Task(number % 3, 0, str(number), print, of_full=number == 4) for number in range(11)]
    found = [runs.own_tasks(tasks, 3, part, of_full) for of_full in (True, False) for part in range(3)]
    assert sorted(task.name for own in found for task in own) == sorted(task.name for task in tasks)
    assert [task for own in found[:3] for task in own] == [tasks[4]]
    assert max(map(len, found)) - min(map(len, found[3:])) <= 1
    assert runs.own_tasks(tasks, 1, None, of_full=False) == tasks

    def result(policy):
        value, values = joined([1.0, 2.0])
        return Result(
            model="tiny", policy=policy, treatment="plain", bits=2, reserved=192, match="slots", measure="loss",
            text="words", value=value, bits_per_number=2.5, values=values, seconds=1.0, gpu="", commit="", date="",
        )  # fmt: skip

    everything = Records(tmp_path / FILE)
    everything.add([result("full")])
    for name, policy in (("one", RECENT), ("two", SPARSE)):
        part = Records(tmp_path / name, known=tmp_path / FILE)
        assert part.results == everything.results
        part.add([result(policy), result("full")])
        everything.take(tmp_path / name)
        assert not (tmp_path / name).exists()
    assert [each.policy for each in Records(tmp_path / FILE).results] == ["full", RECENT, SPARSE]


def test_a_task_without_memory_is_put_off_and_given_up_after_a_few_attempts(tmp_path, caplog):
    options = argparse.Namespace(texts=[], minutes=5.0)
    ran = []

    def task(name, tier, failures):
        def run():
            ran.append(name)
            if ran.count(name) <= failures:
                raise torch.OutOfMemoryError(name)

        return runs.Task(tier, 0, name, run)

    study = runs.Study(options, Records(tmp_path / FILE))
    assert study.run([task("last", 2, 0), task("large", 1, 1), task("first", 0, 0)])
    assert ran == ["first", "large", "last", "large"]
    ran.clear()
    assert not study.run([task("too large", 0, 100), task("small", 1, 0)])
    assert ran == ["too large", "small", *["too large"] * runs.RETRIES]


def test_a_run_goes_on_where_it_ended_and_the_page_has_what_was_measured(tokenizer, tmp_path, monkeypatch, capsys):
    text = tmp_path / "words.txt"
    text.write_text(" ".join([TEXT] * 300), encoding="utf-8")
    options = argparse.Namespace(
        texts=[text], length=640, sequences=2, chunk=128, recall_lengths=[], questions=1, attention_sequences=2,
        queries=8, tiers=2, minutes=5.0, seed=0, output=tmp_path,
    )  # fmt: skip
    tiny = subject(llama(tokenizer), tokenizer, tmp_path / "r.safetensors", 128)

    def measure(minutes):
        options.minutes = minutes
        study = runs.Study(options, Records(tmp_path / FILE))
        with torch.no_grad():
            return study.run(study.tasks(0, tiny)), study.records.results

    done, nothing = measure(-1.0)
    assert not done
    assert not nothing
    done, results = measure(5.0)
    assert done
    study = runs.Study(options, Records(tmp_path / FILE))
    with torch.no_grad():
        study.refuse_another(tiny)
        other = llama(tokenizer)
        other.lm_head.weight.mul_(16)
        with pytest.raises(SystemExit, match="give the model"):
            study.refuse_another(subject(other, tokenizer, tmp_path / "other.safetensors", 128))
    assert {result.measure for result in results} == {"loss", "late_loss", "coverage", "l1"}
    monkeypatch.setattr(Subject, "losses", None)  # nothing is measured again
    monkeypatch.setattr(runs, "Attention", None)
    done, again = measure(5.0)
    assert done
    assert again == results
    monkeypatch.setattr("sys.argv", ["report", "--output", str(tmp_path)])
    report.main()
    page = capsys.readouterr().out
    assert (tmp_path / "cache_study.md").read_text(encoding="utf-8") in page
    full = next(result for result in results if result.case == FULL_CASE.key and result.measure == "loss")
    assert f"| 16 bits | 32.00 | {2.718281828459045**full.value:.3f} |" in page
    assert "log-sparse (LogQuant), plain" in page
    assert (tmp_path / "cache_study_losses.png").is_file()
    assert (tmp_path / "cache_study_attention.png").is_file()
