"""Language, identified on prose alone: code, commands and logs look like no language or a wrong one."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.settings import SettingError, check_number
from data_pipeline.cleaning.prose import plain_words, split_prose

READ_CHARACTERS = 200_000  # of a document, searched for prose
JUDGED_CHARACTERS = 1_300  # of prose, from each of its beginning, middle and end: more does not change the result


class Identifier(Protocol):
    """Interface of a language identifier."""

    def probabilities(self, text: str) -> dict[str, float]:
        """Return {language code: probability}."""


class Langid:
    """py3langid, whose model of 140 languages (ISO 639 codes) comes with the package."""

    def __init__(self) -> None:
        self._identifier = langid_model()

    def probabilities(self, text: str) -> dict[str, float]:
        """Return {language code: probability}."""
        return dict(self._identifier.rank(text))


class FastText:
    """A fastText model file, such as lid.176.bin (codes like `en`) or GlotLID's (like `eng_Latn`)."""

    def __init__(self, path: str) -> None:
        try:
            from fasttext.FastText import _FastText
        except ImportError as error:
            fix = "run `pip install fasttext-numpy2-wheel`, or give null"
            raise SettingError("corpus.cleaning.language.model", path, fix, "needs fasttext") from error
        try:
            self._model = _FastText(path)
        except (ValueError, RuntimeError) as error:
            raise SettingError("corpus.cleaning.language.model", path, str(error), "is not a fastText model") from error

    def probabilities(self, text: str) -> dict[str, float]:
        """Return {language code: probability} of the 16 likeliest languages."""
        labels, values = self._model.predict(text.replace("\n", " "), k=16)
        return {label.removeprefix("__label__"): float(value) for label, value in zip(labels, values, strict=True)}


class Language(BaseFilter):
    """Filter that keeps documents with prose in one of `languages`: their probabilities sum to `threshold` at least.

    Documents with less than `minimum_bytes` of prose are kept, as too short to identify: a command with its output has
    no language. `model`: a fastText language identification model, or None for py3langid. The result is written to
    metadata "language" (the most probable) and "language_score".
    """

    name = "language"

    def __init__(
        self,
        languages: Sequence[str] = ("en",),
        threshold: float = 0.5,
        minimum_bytes: int = 300,
        model: str | None = None,
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        if isinstance(languages, str) or not languages:
            raise SettingError("corpus.cleaning.language.languages", languages, "give a list of codes, like [en]")
        check_number("corpus.cleaning.language.threshold", threshold, above=0, most=1)
        if model is not None and not Path(model).is_file():
            raise SettingError(
                "corpus.cleaning.language.model", model, "give a fastText model, or null", "is not a file"
            )
        self.languages, self.threshold = tuple(languages), threshold
        self.minimum_bytes, self.model = minimum_bytes, model
        self._identifier: Identifier | None = None  # loaded in the worker, not pickled

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, its language)."""
        words = " ".join(plain_words(split_prose(doc.text[:READ_CHARACTERS])[0]))
        prose = _excerpt(words)
        if len(prose.encode(errors="replace")) < self.minimum_bytes:
            self.stat_update("too_little_prose")
            return True
        probabilities = self._identify(prose)
        best = max(probabilities, key=lambda language: probabilities[language])
        wanted = sum(probabilities.get(language, 0.0) for language in self.languages)
        doc.metadata["language"], doc.metadata["language_score"] = best, f"{probabilities[best]:.3f}"
        return True if wanted >= self.threshold else (False, best if best not in self.languages else "unsure")

    def _identify(self, text: str) -> dict[str, float]:
        if self._identifier is None:
            self._identifier = FastText(self.model) if self.model else Langid()
            self._check_codes()
        return self._identifier.probabilities(text)

    def _check_codes(self) -> None:
        """Raise ValueError for a code unknown to py3langid, which would drop everything."""
        if isinstance(self._identifier, Langid):
            unknown = set(self.languages) - set(self._identifier.probabilities("a text"))
            if unknown:
                fix = "use ISO 639 codes that py3langid knows, such as en, de, zh"
                raise SettingError("corpus.cleaning.language.languages", sorted(unknown), fix, "is not known")

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_identifier": None}


@functools.cache
def langid_model() -> Any:
    """Return py3langid's model with probabilities, loaded once."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _excerpt(text: str) -> str:
    if len(text) <= 3 * JUDGED_CHARACTERS:
        return text
    middle = len(text) // 2
    return " ".join((text[:JUDGED_CHARACTERS], text[middle : middle + JUDGED_CHARACTERS], text[-JUDGED_CHARACTERS:]))
