"""Quality: the rules of Gopher, C4 and FineWeb, each on the part of a document that it was designed for."""

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.settings import NO_VALUE, SettingError, check_choice, check_keys
from data_pipeline.cleaning.prose import split_prose
from data_pipeline.cleaning.words import Words

JUDGED_CHARACTERS = 1_000_000  # from the beginning: the rest of a longer document is alike, and costs memory
PARTS = ("text", "prose", "code")


class EncodedData(BaseFilter):
    """Filter that drops texts that are mostly base64, minified code and the like.

    More than `max_share` of their characters are in whitespace-separated words of over `word_length` characters.
    """

    name = "encoded data"

    def __init__(self, max_share: float = 0.5, word_length: int = 200) -> None:
        super().__init__()
        self.max_share, self.word_length = max_share, word_length

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, "long_words")."""
        long = sum(len(word) for word in doc.text.split() if len(word) > self.word_length)
        return True if long <= self.max_share * len(doc.text) else (False, "long_words")


FILTERS: dict[str, Callable[..., BaseFilter]] = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
    "encoded_data": EncodedData,
}


class Quality(BaseFilter):
    """Filter that drops documents that break a rule.

    The reason for dropping is "rule: the filter's reason". The filters work on copies: no line of a document changes.

    Args:
        rules: {name: settings}. Each has `filter` (a name in FILTERS), `part` ("text", or only its sentence lines,
            "prose", or the other lines, "code"), `minimum_characters` (shorter parts pass) and that filter's arguments;
            None switches the rule off.
        by_category: {category: {name: settings or None}}, merged over the rules for documents with that metadata
            "category".
    """

    name = "quality"

    def __init__(
        self,
        rules: dict[str, dict | None],
        by_category: dict[str, dict[str, dict | None]] | None = None,
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self._rules = [_Rule(name, settings, "rules") for name, settings in rules.items() if settings is not None]
        self._by_category = {}
        for category, changes in (by_category or {}).items():
            unknown = set(changes) - set(rules)
            if unknown:
                key = f"corpus.cleaning.quality.by_category.{category}.{min(unknown)}"
                raise SettingError(key, NO_VALUE, "name one of corpus.cleaning.quality.rules", "is not a rule")
            self._by_category[category] = [
                _Rule(name, settings, f"by_category.{category}") for name, settings in _laid_over(rules, changes)
            ]

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, the first rule it breaks)."""
        for reason in self.verdicts(doc):
            if reason is not None:
                return False, reason
        return True

    def verdicts(self, doc: Document) -> Iterator[str | None]:
        """Yield for each rule in turn the reason it fails, or None."""
        text = doc.text[:JUDGED_CHARACTERS]
        prose, code = split_prose(text)
        parts = {"text": text, "prose": prose, "code": code}
        for rule in self._by_category.get(doc.metadata.get("category"), self._rules):
            yield rule.verdict(parts[rule.part])


class _Rule:
    """A datatrove filter with its settings, and the part of a document it applies to."""

    def __init__(self, name: str, settings: dict, place: str) -> None:
        key = f"corpus.cleaning.quality.{place}.{name}"
        settings = deepcopy(settings)
        kind = settings.pop("filter", None)
        self.name, self.part = name, settings.pop("part", "text")
        self.minimum_characters = settings.pop("minimum_characters", 1)
        check_choice(f"{key}.filter", kind, FILTERS)
        check_choice(f"{key}.part", self.part, PARTS)
        check_keys(key, settings, list(inspect.signature(FILTERS[kind]).parameters))
        if kind != "encoded_data":
            settings["language"] = Words()
        self.filter = FILTERS[kind](**settings)

    def verdict(self, text: str) -> str | None:
        """Return the reason a text fails, or None."""
        if len(text) < self.minimum_characters or sum(map(len, text.split())) < max(1, self.minimum_characters):
            return None
        result = self.filter.filter(Document(text, ""))
        kept, reason = result if isinstance(result, tuple) else (result, None)
        return None if kept else f"{self.name}: {reason}"


def _laid_over(rules: dict[str, dict | None], changes: dict[str, dict | None]) -> list[tuple[str, dict]]:
    """Return the rules with a category's changes, without those switched off."""
    merged = []
    for name, settings in rules.items():
        change = changes.get(name, {})
        if change is not None and (settings is not None or change):
            merged.append((name, {**(settings or {}), **change}))
    return merged
