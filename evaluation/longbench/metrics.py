"""LongBench's metrics: each scores an answer against one right answer, from 0 to 1.

They give the numbers of LongBench/metrics.py at THUDM/LongBench 2e00731, peculiarities included, so that published
values can be compared; each function says which there are.
"""

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from rouge import Rouge

from common.settings import SettingError

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
RECURSION = 100_000
Metric = Callable[[str, str, Sequence[str]], float]
"""A function of the answer, a right answer, and all classes of the set."""


def english_words(text: str) -> list[str]:
    """Return lower-case words without ASCII punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def word_f1(answer: Sequence[str], right: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of words, counted as often as they are there."""
    common = sum((Counter(answer) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(right)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of English words."""
    return word_f1(english_words(answer), english_words(right))


def rouge(answer: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return ROUGE-L's F1 as the package `rouge` has it: sentences end at full stops, words are counted once.

    An empty answer has 0. Where a long sentence exceeds Python's limit of recursion LongBench's code counts 0; here it
    is scored.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(RECURSION)
    try:
        return Rouge(metrics=["rouge-l"], stats=["f"]).get_scores([answer], [right], avg=True)["rouge-l"]["f"]
    except ValueError:  # nothing but full stops
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the answer names, if the right one is among them.

    A class that is part of the right one's name does not count. As in LongBench, the class after one that is taken out
    is not looked at.
    """
    named = [name for name in classes if name in answer]
    place = 0
    while place < len(named):
        if named[place] in right and named[place] != right:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if right in named else 0.0


def share_of_numbers(answer: str, right: str) -> float:
    """Return the share of an answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def count(answer: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the count."""
    return share_of_numbers(answer, right)


def retrieval(answer: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the paragraph's, "Paragraph 3" or "段落3"."""
    return share_of_numbers(answer, re.findall(r"(?:Paragraph |段落)(\d+)", right)[0])


def code_similarity(answer: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity in whole percent of the first line that is neither comment nor Markdown.

    It is fuzzywuzzy's ratio, which is difflib's, without python-Levenshtein, as in LongBench's requirements.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    if line == right:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, right).ratio()) / 100 if line and right else 0.0


class Metrics:
    """The metrics by name.

    Args:
        chinese_words: "jieba", as LongBench has it, or "characters": each Chinese character is a word.

    Raises:
        SettingError: jieba is not installed.
    """

    def __init__(self, chinese_words: str) -> None:
        self.words = chinese_characters if chinese_words == "characters" else jieba_words()
        self.by_name: dict[str, Metric] = {
            "qa_f1": qa_f1,
            "qa_f1_zh": self.qa_f1_zh,
            "rouge": rouge,
            "rouge_zh": self.rouge_zh,
            "classification": classification,
            "count": count,
            "retrieval": retrieval,
            "code_similarity": code_similarity,
        }

    def qa_f1_zh(self, answer: str, right: str, classes: Sequence[str] = ()) -> float:
        """Return the F1 of Chinese words without punctuation."""
        return word_f1(self._bare_words(answer), self._bare_words(right))

    def rouge_zh(self, answer: str, right: str, classes: Sequence[str] = ()) -> float:
        """Return ROUGE-L's F1 of Chinese words."""
        return rouge(" ".join(self.words(answer)), " ".join(self.words(right)))

    def _bare_words(self, text: str) -> list[str]:
        left_out = set(string.punctuation + CHINESE_PUNCTUATION)
        bare = ("".join(c for c in word.lower() if c not in left_out and not c.isspace()) for word in self.words(text))
        return [word for word in bare if word]

    def score(self, name: str, answer: str, answers: Sequence[str], classes: Sequence[str], first_line: bool) -> float:
        """Return the best score of an answer against any of the right ones.

        Args:
            name: of the metric.
            first_line: whether the first line of the answer counts alone.
        """
        if first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        return max((self.by_name[name](answer, right, classes) for right in answers), default=0.0)


def chinese_characters(text: str) -> list[str]:
    """Return each character as a word, but for runs of Latin letters and digits; white space is left out."""
    return re.findall(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]", text)


def jieba_words() -> Callable[[str], list[str]]:
    """Return the function that cuts a text as LongBench does."""
    try:
        import jieba
    except ImportError as error:
        fix = "pip install jieba, or give characters"
        raise SettingError("benchmark.chinese_words", "jieba", fix, "is not installed") from error
    return lambda text: list(jieba.cut(text, cut_all=False))
