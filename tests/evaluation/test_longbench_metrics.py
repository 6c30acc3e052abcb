"""LongBench's metrics against values computed by hand."""

import sys
from types import SimpleNamespace

import pytest

from evaluation.longbench import metrics
from evaluation.longbench.metrics import Metrics, chinese_characters, classification, code_similarity, count, rouge


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("The red fox.", "a red fox", 1.0),  # articles, case and punctuation do not count
        ("red red fox", "red fox", 2 * (2 / 3) / (2 / 3 + 1)),
        ("red", "red fox", 2 * 0.5 / 1.5),
        ("blue", "red", 0.0),
        ("", "red", 0.0),
        ("...!", "red", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("don't", "dont", 1.0),
    ],
)
def test_f1_of_english_words(answer, right, score):
    assert metrics.qa_f1(answer, right) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("北京市。", "北京", 2 * (2 / 3) / (2 / 3 + 1)),
        ("，。！", "北京", 0.0),
        ("", "北京", 0.0),
        ("GPT4 很好", "gpt4很好！", 1.0),
    ],
)
def test_f1_of_chinese_characters(answer, right, score):
    assert Metrics("characters").qa_f1_zh(answer, right) == pytest.approx(score)


def test_latin_words_and_numbers_are_one_word_among_characters():
    assert chinese_characters("第12章 GPT-4 好。") == ["第", "12", "章", "GPT", "-", "4", "好", "。"]


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat", "the cat sat down", 2 * 1.0 * 0.5 / 1.5),
        ("cat the", "the cat", 2 * 0.5 * 0.5 / 1.0),  # in order
        ("", "the cat", 0.0),
        ("...", "the cat", 0.0),
        ("dog", "the cat", 0.0),
    ],
)
def test_rouge_l(answer, right, score):
    assert rouge(answer, right) == pytest.approx(score, abs=1e-6)


def test_a_sentence_beyond_the_limit_of_recursion_is_scored_and_the_limit_stays():
    limit, words = sys.getrecursionlimit(), [f"w{number}" for number in range(700)]
    assert rouge(" ".join(words), " ".join(reversed(words))) == pytest.approx(1 / 700, rel=1e-4)
    assert sys.getrecursionlimit() == limit


def test_rouge_of_chinese_characters():
    assert Metrics("characters").rouge_zh("今天天气好", "天气好") == pytest.approx(2 * (3 / 4) / (3 / 4 + 1), abs=1e-6)


CLASSES = ["Food", "Food product", "Animal", "Plant"]


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("Animal", "Animal", 1.0),
        ("Animal or Plant", "Animal", 0.5),
        ("Plant", "Animal", 0.0),
        ("", "Animal", 0.0),
        ("Food product", "Food product", 1.0),  # Food is a part of the right name
        ("Food product", "Food", 0.5),
    ],
)
def test_classification(answer, right, score):
    assert classification(answer, right, CLASSES) == score


def test_the_class_after_one_that_is_taken_out_is_not_looked_at():
    assert classification("A B C", "A B C", ["A", "B", "C", "A B C"]) == pytest.approx(1 / 2)  # B stays


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [("5", "5", 1.0), ("5 or 6", "5", 0.5), ("15", "5", 0.0), ("five", "5", 0.0), ("", 5, 0.0)],
)
def test_count(answer, right, score):
    assert count(answer, right) == score


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("Paragraph 3", "Paragraph 3", 1.0),
        ("3 and 30", "Paragraph 3", 0.5),
        ("段落3", "段落3", 1.0),
        ("Paragraph 30", "段落3", 0.0),
        (" .", "Paragraph 3", 0.0),
    ],
)
def test_retrieval(answer, right, score):
    assert metrics.retrieval(answer, right) == score


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("return x", "return x", 1.0),
        ("\n# a comment\n// another\n```python\nreturn x\nmore", "return x", 1.0),
        ("abcd", "bcde", 0.75),
        ("abc", "abd", 0.67),  # whole percent
        ("", "return x", 0.0),
        ("# only a comment", "return x", 0.0),
        ("", "", 1.0),
    ],
)
def test_code_similarity(answer, right, score):
    assert code_similarity(answer, right) == score


def test_the_best_of_the_right_answers_counts_and_where_asked_the_first_line_alone():
    score = Metrics("characters").score
    assert score("qa_f1", "red fox", ["blue", "red fox"], (), False) == 1.0
    assert score("qa_f1", "\n\nred\nfox", ["red"], (), True) == 1.0
    assert score("qa_f1", "red\nfox", ["red"], (), False) == pytest.approx(2 / 3)
    assert score("qa_f1", "red", [], (), False) == 0.0


def test_jieba_cuts_words_where_it_is_asked_for(monkeypatch):
    words = {"今天天气": ["今天", "天气"], "天气": ["天气"]}
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(cut=lambda text, cut_all: iter(words[text])))
    assert Metrics("jieba").qa_f1_zh("今天天气", "天气") == pytest.approx(2 * 0.5 / 1.5)
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"benchmark.chinese_words=jieba is not installed: pip install jieba"):
        Metrics("jieba")
