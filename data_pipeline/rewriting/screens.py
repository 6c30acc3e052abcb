"""Screens: checks that a rewriting must pass. Each has its thresholds in YAML, and can be switched off.

An answer is first cleaned (a model's thoughts and remarks about the answer are removed and counted). Then every screen
checks it, and is named if it fails.
"""

import functools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from common.settings import NO_VALUE, SettingError, check_number
from data_pipeline.rewriting.facts import kept_and_invented
from data_pipeline.rewriting.sections import prose

FENCED_WHOLE = re.compile(r"\s*```(?:markdown|md)?[ \t]*\n(.*)\n```\s*", re.DOTALL)
SYMBOL = re.compile(r"[/\\_=<>{}|]")  # in paths, tags and names, not in words of a language
THOUGHTS = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Material:
    """Input of a screen: the part to rewrite, the model's other input, and the rewritten text."""

    source: str
    known: str
    rewritten: str


class Screen(Protocol):
    """Interface of a screen."""

    def fails(self, material: Material) -> bool:
        """Return whether the material fails the screen."""


@dataclass(frozen=True)
class Language:
    """Screen: prose of at least `min_characters` is in one of `languages` (ISO 639-1 codes)."""

    languages: list[str]
    min_probability: float
    min_characters: int

    def fails(self, material: Material) -> bool:
        without_code = re.sub(r"`[^`\n]{1,200}`", " ", prose(material.rewritten))
        plain = (word for word in without_code.split() if not SYMBOL.search(word))
        text = " ".join(re.findall(r"[^\W\d_]{2,}", " ".join(plain)))
        if len(text) < self.min_characters:
            return False
        from data_pipeline.cleaning.language import langid_model  # datatrove, which that imports, is slow to import

        language, probability = langid_model().classify(text)
        return language not in self.languages or probability < self.min_probability


@dataclass(frozen=True)
class Length:
    """Screen: the rewriting's length in characters is `min_ratio` to `max_ratio` of the source's."""

    min_ratio: float
    max_ratio: float

    def fails(self, material: Material) -> bool:
        ratio = len(material.rewritten.strip()) / max(len(material.source.strip()), 1)
        return not self.min_ratio <= ratio <= self.max_ratio


@dataclass(frozen=True)
class Copied:
    """Screen: at most `max_share` of the prose's runs of `words` words occur in the source; code may be copied."""

    words: int
    max_share: float

    def fails(self, material: Material) -> bool:
        made = self._runs(prose(material.rewritten))
        if not made:
            return False
        source = set(self._runs(prose(material.source)))
        return sum(run in source for run in made) / len(made) > self.max_share

    def _runs(self, text: str) -> list[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return [tuple(words[start : start + self.words]) for start in range(len(words) - self.words + 1)]


@dataclass(frozen=True)
class Repetition:
    """Screen: the text has no loops.

    At most `max_duplicate_lines` of the characters are in repeated lines, at most `max_duplicate_words` in repeated
    runs of 5 words, and text of 400 bytes or more compresses to no less than `min_packed` of its size. A limit is
    raised to the source's own value: a table may repeat what the source's does.
    """

    max_duplicate_lines: float
    max_duplicate_words: float
    min_packed: float

    def fails(self, material: Material) -> bool:
        measured, source = self._measures(material.rewritten), self._measures(material.source)
        limits = (self.max_duplicate_lines, self.max_duplicate_words, 1 - self.min_packed)
        return any(m > max(limit, s) for m, s, limit in zip(measured, source, limits, strict=True))

    def _measures(self, text: str) -> tuple[float, float, float]:
        from datatrove.pipeline.filters.gopher_repetition_filter import find_all_duplicate, find_duplicates

        lines = [line.strip() for line in text.splitlines() if line.strip()]
        words = text.split()
        encoded = text.encode()
        packed = len(zlib.compress(encoded)) / len(encoded) if len(encoded) >= 400 else 1.0
        in_lines = find_duplicates(lines)[1] / max(sum(map(len, lines)), 1)
        in_words = find_all_duplicate(words, 5) / max(sum(map(len, words)), 1)
        return in_lines, in_words, 1 - packed


@dataclass(frozen=True)
class Refusal:
    """Screen: the first `characters` match none of `patterns`, so the answer is no refusal."""

    characters: int
    patterns: list[str]

    def fails(self, material: Material) -> bool:
        beginning = material.rewritten[: self.characters].replace("’", "'")
        return any(_compiled(pattern).search(beginning) for pattern in self.patterns)


@dataclass(frozen=True)
class MetaTalk:
    """Screen: the text does not talk about the answer.

    A first or last paragraph of one line that matches `strip` is removed. Anything else in the prose that matches
    `patterns` fails, unless the source contains the same words.
    """

    strip: list[str]
    patterns: list[str]

    def fails(self, material: Material) -> bool:
        text, source = prose(material.rewritten), material.source.lower()
        found = (match.group().lower() for p in self.patterns for match in _compiled(p).finditer(text))
        return any(words not in source for words in found)

    def clean(self, text: str) -> str:
        """Return the text without first and last lines that are about the text."""
        lines = text.strip().split("\n")
        while len(lines) > 1 and self._is_meta(lines[0]):
            lines = _without_rule("\n".join(lines[1:]).strip("\n").split("\n"), 0)
        while len(lines) > 1 and self._is_meta(lines[-1]):
            lines = _without_rule("\n".join(lines[:-1]).strip("\n").split("\n"), -1)
        return "\n".join(lines)

    def _is_meta(self, line: str) -> bool:
        return any(_compiled(pattern).fullmatch(line.strip()) for pattern in self.strip)


@dataclass(frozen=True)
class Facts:
    """Screen: at least `min_kept` of the source's facts survive, and at most `max_invented` of the facts are new.

    Each is checked only with at least `min_facts` facts.
    """

    min_kept: float
    max_invented: float
    min_facts: int

    def fails(self, material: Material) -> bool:
        kept, invented, before, after = kept_and_invented(material.source, material.rewritten, material.known)
        return (before >= self.min_facts and kept < self.min_kept) or (
            after >= self.min_facts and invented > self.max_invented
        )


class Screens:
    """The screens of one style: those of `rewrite.screens`, with the style's overrides."""

    KINDS: ClassVar[dict[str, type]] = {
        "language": Language,
        "length": Length,
        "copied": Copied,
        "repetition": Repetition,
        "refusal": Refusal,
        "meta_talk": MetaTalk,
        "facts": Facts,
    }

    def __init__(self, settings: Mapping[str, Mapping | None], style: str, overrides: Mapping[str, Mapping | None]):
        """Build the screens; raise ValueError, naming the key, for an unknown, missing or useless setting."""
        self.screens: dict[str, Screen] = {}
        for place, names in (("rewrite.screens", settings), (f"rewrite.styles.{style}.screens", overrides)):
            for name in names:
                if name not in self.KINDS:
                    fix = f"give one of {', '.join(self.KINDS)}"
                    raise SettingError(f"{place}.{name}", NO_VALUE, fix, "is not a screen")
        for name, kind in self.KINDS.items():
            general, own = settings.get(name, {}), overrides.get(name, {})
            if general is None or own is None or not {**general, **own}:
                continue  # switched off, for all styles or for this one
            place = f"rewrite.styles.{style}.screens.{name}" if own else f"rewrite.screens.{name}"
            self.screens[name] = _screen(kind, place, {**general, **own})

    def clean(self, answer: str) -> str:
        """Return an answer without the model's thoughts, a fence around all of it, and lines about itself."""
        thoughts = THOUGHTS.match(answer)
        text = answer[thoughts.end() :] if thoughts else answer
        meta = self.screens.get("meta_talk")
        if isinstance(meta, MetaTalk):
            text = meta.clean(text)
        whole = FENCED_WHOLE.fullmatch(text)
        if whole and "\n```" not in whole.group(1):
            text = whole.group(1)
        return text.strip()

    def failing(self, material: Material) -> list[str]:
        """Return the names of the screens that the material fails."""
        return [name for name, screen in self.screens.items() if screen.fails(material)]


def _screen(kind: type, place: str, settings: Mapping) -> Screen:
    known = {entry.name: entry.type for entry in fields(kind)}
    for key, value in settings.items():
        if key not in known:
            raise SettingError(
                f"{place}.{key}", NO_VALUE, f"give {', '.join(known)}", "is not a setting of this screen"
            )
        if known[key] in (int, float):
            check_number(f"{place}.{key}", value, least=0)
        elif isinstance(value, str | int | float | None):
            raise SettingError(f"{place}.{key}", value, "give a list")
        for pattern in value if key in ("patterns", "strip") else ():
            try:
                _compiled(pattern)
            except re.error as error:
                problem = "is not a regular expression"
                raise SettingError(f"{place}.{key}", pattern, str(error), problem) from error
    missing = [key for key in known if key not in settings]
    if missing:
        problem = "is missing"
        raise SettingError(f"{place}.{missing[0]}", NO_VALUE, "give it, or switch the screen off with null", problem)
    return kind(**settings)


@functools.cache
def _compiled(pattern: str) -> re.Pattern:
    return re.compile(pattern, re.IGNORECASE)


def _without_rule(lines: list[str], end: int) -> list[str]:
    """Remove the rule (---) that models put between their remark and the text."""
    if len(lines) > 1 and lines[end].strip() == "---":
        del lines[end]
    return "\n".join(lines).strip("\n").split("\n")
