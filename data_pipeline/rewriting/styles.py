"""Styles of rewriting: a prompt with named fields, sampling settings, and the form of the answer."""

import json
import math
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase

from common.settings import NO_VALUE, SettingError, check_choice, check_number
from data_pipeline.documents import Document
from data_pipeline.fingerprint import fingerprint
from data_pipeline.rewriting.prompts import chat_messages, check_template

FIELDS = ("text", "title", "section", "context", "category")
FORMS = ("markdown", "pairs")
CHARACTERS_PER_TOKEN = 3.5  # of technical English; for requested lengths and budgets only, never for counts
LEAST_TOKENS = 256


class Malformed(Exception):
    """An answer without its style's form."""


@dataclass(frozen=True)
class Style:
    """One style. `system` and `user` are templates with $text, $title, $section, $context, $category ($$ for a dollar).

    `max_tokens_ratio`: maximum answer length in tokens, as a multiple of the part's. `form`: markdown, or pairs (a JSON
    array of objects with exactly the keys `pair_keys`, each rendered by the template `pair_text`). `categories`:
    patterns of categories or source names that the style applies to, or None for all. `whole`: drop a document if one
    of its parts is dropped; otherwise its other parts are kept. `screens`: overrides of the common thresholds.
    """

    name: str
    system: str
    user: str
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens_ratio: float = 1.5
    form: str = "markdown"
    pair_keys: list[str] | None = None
    pair_text: str | None = None
    categories: list[str] | None = None
    whole: bool = True
    screens: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_templates()
        check_choice(self._key("form"), self.form, FORMS)
        for key, low, high in (("temperature", 0, 2), ("top_p", 1e-6, 1), ("max_tokens_ratio", 0.01, 100)):
            check_number(self._key(key), getattr(self, key), least=low, most=high)

    def _key(self, name: str) -> str:
        return f"rewrite.styles.{self.name}.{name}"

    def _check_templates(self) -> None:
        check_template(self._key("system"), self.system, FIELDS)
        check_template(self._key("user"), self.user, FIELDS, needed="text")
        if self.form == "pairs":
            if not self.pair_keys or not self.pair_text:
                raise SettingError(self._key("form"), "pairs", "give both", "needs pair_keys and pair_text")
            check_template(self._key("pair_text"), self.pair_text, self.pair_keys)

    def prompt_hash(self) -> str:
        """Return 16 digits that change with the prompt or the form of its answer."""
        return fingerprint({name: asdict(self)[name] for name in ("system", "user", "form", "pair_keys", "pair_text")})

    def suits(self, document: Document) -> bool:
        """Return whether the style applies to the document's category or source name."""
        names = [document.metadata.get("category", ""), document.metadata.get("source", "")]
        return self.categories is None or any(fnmatchcase(n, pattern) for n in names for pattern in self.categories)

    def messages(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the chat messages with the fields filled in."""
        return chat_messages(self.system, self.user, values)

    def max_tokens(self, text: str) -> int:
        """Return the maximum answer length, in tokens, for a part's text."""
        return max(LEAST_TOKENS, math.ceil(len(text) / CHARACTERS_PER_TOKEN * self.max_tokens_ratio))

    def read(self, answer: str) -> tuple[str, list[dict[str, str]]]:
        """Return an answer as Markdown, and its pairs if the form has them; raise Malformed if it is not in form."""
        if self.form == "markdown":
            return answer, []
        pairs = self._pairs(answer)
        assert self.pair_text is not None  # this form needs it
        template = string.Template(self.pair_text)
        return "\n\n".join(template.substitute(pair).strip() for pair in pairs) + "\n", pairs

    def _pairs(self, answer: str) -> list[dict[str, str]]:
        body = answer.strip()
        if body.startswith("```") and body.endswith("```"):  # models fence JSON against instructions
            body = body.removeprefix("```json").removeprefix("```").removesuffix("```")
        try:
            pairs = json.loads(body, object_pairs_hook=_no_doubled_keys)
        except (ValueError, RecursionError) as error:
            raise Malformed("not JSON") from error
        if not isinstance(pairs, list) or not pairs:
            raise Malformed("not a JSON array with something in it")
        keys = self.pair_keys or []
        for pair in pairs:
            if not isinstance(pair, dict) or sorted(pair) != sorted(keys):
                raise Malformed(f"an entry without exactly the keys {', '.join(keys)}")
            if not all(isinstance(value, str) and value.strip() for value in pair.values()):
                raise Malformed("an entry with an empty value, or one that is no text")
        return pairs


def _no_doubled_keys(items: list[tuple[str, object]]) -> dict:
    if len({key for key, _ in items}) < len(items):
        raise ValueError("a key twice")
    return dict(items)


def read_styles(settings: Mapping[str, Mapping]) -> dict[str, Style]:
    """Return the styles of `rewrite.styles`, by name; raise ValueError, naming the key, for a wrong setting."""
    if not settings:
        fix = "choose some, as in rewrite/style=[textbook,rephrase_easy]"
        raise SettingError("rewrite.styles", NO_VALUE, fix, "is empty")
    known = {entry.name for entry in fields(Style)} - {"name"}
    styles = {}
    for name, style in settings.items():
        for key in style:
            if key not in known:
                problem = "is not a setting of a style"
                raise SettingError(f"rewrite.styles.{name}.{key}", NO_VALUE, f"give one of {sorted(known)}", problem)
        for key in ("system", "user"):
            if not isinstance(style.get(key), str):
                raise SettingError(f"rewrite.styles.{name}.{key}", NO_VALUE, "give a template", "is missing")
        styles[name] = Style(name=name, **style)
    return styles
