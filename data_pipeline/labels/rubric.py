"""Rubric: the question to the LLM about a document, and the parser of its answer."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.settings import NO_VALUE, SettingError, check_number, check_whole, is_number
from data_pipeline.rewriting.prompts import chat_messages, check_template

HIGHEST = 5  # quality is a whole number from 0: one point per criterion
FIELDS = ("text", "categories", "criteria")
CATEGORY_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")  # also the name of a folder of the corpus
ANSWER_CHARACTERS = 20_000  # searched for JSON
KEY = "corpus.cleaning.labels.rubric"


@dataclass(frozen=True)
class Label:
    """Category and quality (0 to 5) of a document. `reason` is the LLM's."""

    category: str
    quality: int
    reason: str = ""


@dataclass(frozen=True)
class Rubric:
    """The question to the LLM.

    `categories`: {name: description}. `criteria`: five, each worth one point of quality. `system` and `user`: templates
    with $text (the document), $categories and $criteria ($$ for a dollar). The answer is a JSON object with "category"
    and "quality", of at most `max_tokens`.
    """

    categories: dict[str, str]
    criteria: list[str]
    system: str
    user: str
    temperature: float = 0.3
    top_p: float = 0.95
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.categories, Mapping) or len(self.categories) < 2:
            raise SettingError(f"{KEY}.categories", self.categories, "give two or more, as name: description")
        for name in self.categories:
            if not CATEGORY_NAME.fullmatch(str(name)):
                fix = "give a word of a-z, 0-9, _ and -"
                raise SettingError(f"{KEY}.categories", name, fix, "cannot name a folder")
        if isinstance(self.criteria, str) or len(self.criteria) != HIGHEST:
            raise SettingError(f"{KEY}.criteria", self.criteria, f"give a list of {HIGHEST}, a point each")
        check_template(f"{KEY}.system", self.system, FIELDS)
        check_template(f"{KEY}.user", self.user, FIELDS, needed="text")
        for key, low, high in (("temperature", 0, 2), ("top_p", 1e-6, 1)):
            check_number(f"{KEY}.{key}", getattr(self, key), least=low, most=high)
        check_whole(f"{KEY}.max_tokens", self.max_tokens, 1)

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the chat messages that ask about a text."""
        values = {
            "text": text.strip("\n"),
            "categories": "\n".join(f"- {name}: {what}" for name, what in self.categories.items()),
            "criteria": "\n".join(f"{number}. {what}" for number, what in enumerate(self.criteria, 1)),
        }
        return chat_messages(self.system, self.user, values)

    def read(self, answer: str) -> Label | None:
        """Return the label in an answer: its first JSON object with a category and a quality.

        None if there is no such object, the category is not in the rubric, or the quality is not a whole number from 0
        to 5.
        """
        found = next((entry for entry in _objects(answer) if "category" in entry and "quality" in entry), None)
        if found is None or not isinstance(found["category"], str):
            return None
        category, quality = found["category"].strip().lower(), _whole(found["quality"])
        if category not in self.categories or quality is None or not 0 <= quality <= HIGHEST:
            return None
        return Label(category, quality, str(found.get("reason", "")))


def read_rubric(settings: Mapping) -> Rubric:
    """Return the rubric for a configuration; raise ValueError, naming the key, for a wrong setting."""
    known = {entry.name for entry in fields(Rubric)}
    for key in settings:
        if key not in known:
            problem = "is not a setting of a rubric"
            raise SettingError(f"{KEY}.{key}", NO_VALUE, f"give one of {', '.join(sorted(known))}", problem)
    for key in ("categories", "criteria", "system", "user"):
        if not settings.get(key):
            problem = "is missing"
            raise SettingError(f"{KEY}.{key}", NO_VALUE, "give it, or choose a rubric as labels/rubric does", problem)
    return Rubric(**settings)


def _objects(answer: str) -> Iterator[dict]:
    """Yield the JSON objects in an answer, ignoring a fence, a remark or a model's thoughts around them."""
    answer, decoder = answer[:ANSWER_CHARACTERS], json.JSONDecoder()
    start = answer.find("{")
    while start >= 0:
        end = start + 1
        try:
            entry, end = decoder.raw_decode(answer, start)
            yield entry
        except (ValueError, RecursionError):
            pass
        start = answer.find("{", end)


def _whole(value: Any) -> int | None:
    """Return a whole number, also from "4" or 4.0; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d\s*", value):
        return int(value)
    if not is_number(value) or value not in range(10):
        return None
    return int(value)
