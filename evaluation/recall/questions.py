"""Multi-key recall: one of several facts is asked for, at a given depth of a prompt of a given length.

Two kinds. `needles`: sentences that state the number of a key, among the sentences of a text (the multi-key retrieval
of RULER, arXiv 2404.06654, with wording of its own). `pairs`: a list of keys and numbers from end to end (the key-value
retrieval of "Lost in the Middle", arXiv 2307.03172). The prompt ends where the number follows, so that base models
answer too. A question is a function of the seed, the kind, the length, the depth and its own number.
"""

import functools
import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.settings import SettingError

KINDS = ("needles", "pairs")
ANSWER_TOKENS = 2  # beyond those of the number: room to see that it ends

FIRST = (
    "amber ancient bitter blue bold brave bright calm clever cold copper crimson dusty early eager fading fierce "
    "gentle golden green grey hidden hollow humble icy iron jolly late little lonely loud mellow"
)
SECOND = (
    "autumn birch canyon cedar cloud coast desert evening forest garden glacier granite harbour hill island lake "
    "lantern marble meadow midnight morning mountain ocean orchard prairie river sandstone silver spring summer "
    "valley winter"
)
THIRD = (
    "badger beaver bison camel crane crow deer eagle falcon ferret finch fox goose hare hawk heron horse ibis lark "
    "lynx marten mole moose otter owl panther raven robin salmon sparrow tiger wolf"
)
WORDS = tuple(words.split() for words in (FIRST, SECOND, THIRD))

WHO = ("The clerk", "A traveller", "The gardener", "My neighbour", "The baker", "An engineer", "The pilot", "A teacher")
DID = ("opened", "repaired", "painted", "forgot", "measured", "carried", "sold", "described")
WHAT = ("the gate", "a wooden boat", "the old clock", "two maps", "the long table", "a heavy coat", "the north wall")
WHEN = ("before noon", "in the rain", "after the meeting", "without a word", "on the second day", "as it was agreed")


@dataclass(frozen=True)
class Question:
    """A prompt and the number that follows.

    Attributes:
        prompt: token ids, with those that the tokenizer puts before a text.
        answer: digits.
        max_new_tokens: enough to see the answer end.
    """

    prompt: tuple[int, ...]
    answer: str
    max_new_tokens: int


def is_right(text: str, answer: str) -> bool:
    """Return whether the first number of a generated text is the answer, digit for digit."""
    first = re.search(r"\d+", text)
    return first is not None and first[0] == answer


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences; what has no full stop is cut after 40 words."""
    words = " ".join(text.split())
    found = []
    for sentence in re.split(r"(?<=[.!?]) ", words):
        parts = sentence.split(" ")
        found += [" ".join(parts[start : start + 40]) for start in range(0, len(parts), 40)]
    return [sentence for sentence in found if sentence]


def generated_sentences() -> list[str]:
    """Return sentences without numbers, each of which is there once."""
    every = [" ".join(parts) + "." for parts in itertools.product(WHO, DID, WHAT, WHEN)]
    random.Random(0).shuffle(every)
    return every


class Recall:
    """Makes questions.

    Args:
        tokenizer: of the model that is asked.
        text: what needles are put into; None: generated sentences.
        keys: needles in a text; the pairs of a list fill it.
        seed: of everything that is drawn.
    """

    def __init__(self, tokenizer: Any, text: str | None, keys: int, seed: int) -> None:
        self.tokenizer, self.keys, self.seed = tokenizer, keys, seed
        self.sentences = generated_sentences() if text is None else sentences_of(text)

    def question(self, kind: str, length: int, depth: float, number: int) -> Question:
        """Return one question.

        Args:
            kind: one of KINDS.
            length: tokens of prompt and answer, at most; what is missing is less than a sentence or a pair.
            depth: place of the fact that is asked for, from 0 (at the beginning) to 1 (at the end).
            number: tells questions with the same other arguments apart.

        Raises:
            SettingError: the length has no room for the facts, or more than there are keys.
        """
        draw = random.Random(f"{self.seed} {kind} {length} {depth} {number}")
        return self._needles(draw, length, depth) if kind == "needles" else self._pairs(draw, length, depth)

    def _needles(self, draw: random.Random, length: int, depth: float) -> Question:
        facts = new_facts(draw, self.keys)
        needles = [f"The access code of the {key} is {value}." for key, value in facts]
        key, value = facts[0]
        asked = f"\n\nQuestion: What is the access code of the {key}?\nAnswer: The access code of the {key} is"
        begin, others = draw.randrange(len(self.sentences)), [draw.random() for _ in needles[1:]]

        def written(number: int) -> str:
            places = [round(depth * number), *(round(place * number) for place in others)]
            text = [self.sentences[(begin + i) % len(self.sentences)] for i in range(number)]
            for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
                text.insert(place, needle)
            return " ".join(text) + asked

        return self._longest(written, value, length)

    def _pairs(self, draw: random.Random, length: int, depth: float) -> Question:
        # More than fit, so that the same pairs come first whatever their number is.
        facts = new_facts(draw, max(2, length // 4))

        def written(number: int) -> str:
            lines = [f"{key}: {value}" for key, value in facts[1 : number + 1]]
            lines.insert(round(depth * number), ": ".join(facts[0]))
            return "\n".join(["Access codes:", *lines, "", f"The access code of {facts[0][0]}:\n{facts[0][0]}:"])

        return self._longest(written, facts[0][1], length, len(facts) - 1)

    def _longest(self, written: Any, value: str, length: int, most: int | None = None) -> Question:
        """Return the question with as many sentences or pairs as fit, found by bisection."""
        answer = len(self.tokenizer(f" {value}", add_special_tokens=False)["input_ids"]) + ANSWER_TOKENS
        room = length - answer

        @functools.cache
        def tokens(number: int) -> tuple[int, ...]:
            return tuple(self.tokenizer(written(number), verbose=False)["input_ids"])

        if len(tokens(1)) > room:
            fix = f"give at least {len(tokens(1)) + answer}, or fewer benchmark.keys"
            raise SettingError("benchmark.lengths", length, fix, "has no room for the facts and the question")
        low, high = 1, 2
        while len(tokens(high)) <= room and (most is None or high < most):
            low, high = high, 2 * high if most is None else min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(tokens(middle)) <= room else (low, middle)
        return Question(tokens(low), value, answer)


def new_facts(draw: random.Random, number: int) -> list[tuple[str, str]]:
    """Draw so many keys of three words, and numbers of six digits; none is there twice.

    Raises:
        SettingError: there are not so many keys.
    """
    most = math.prod(map(len, WORDS))
    if number > most:
        problem = f"has room for more than the {most:,} keys that there are"
        raise SettingError("benchmark.lengths", 4 * number, f"give at most {4 * most}", problem)
    values = draw.sample(range(100_000, 1_000_000), number)
    return [(key_of(place), str(value)) for place, value in zip(draw.sample(range(most), number), values, strict=True)]


def key_of(place: int) -> str:
    """Return the key of three words at this place of all."""
    words = []
    for list_of_words in WORDS:
        place, word = divmod(place, len(list_of_words))
        words.append(list_of_words[word])
    return " ".join(words)


def check_depths(depths: Sequence[Any]) -> None:
    """Check that depths are numbers from 0 to 1, each there once.

    Raises:
        SettingError: they are not.
    """
    right = all(isinstance(d, int | float) and not isinstance(d, bool) and 0 <= d <= 1 for d in depths)
    if not depths or not right or len(set(depths)) < len(depths):
        raise SettingError("benchmark.depths", list(depths), "give different numbers from 0 to 1")
