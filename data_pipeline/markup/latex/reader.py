"""LaTeX text with matched braces and environments, and writers of the Markdown pieces."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

from data_pipeline.markup.blocks import fence
from data_pipeline.markup.latex.macros import after_space, brace_pairs

HOLD, END, REFERENCE, BREAK = "\ue000", "\ue001", "\ue002", "\ue003"
ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{([^{}\n]{1,60})\}")
OPTION = re.compile(r"[ \t]*\[((?:[^\[\]]|\[[^\[\]]{0,200}\]){0,500})\]")
ONE = re.compile(r"\\(?:[a-zA-Z@]+|[\s\S])|\ue000\d+\ue001|[^\s\\}&$]")  # an argument without braces


@dataclass(frozen=True, slots=True)
class Listing:
    """Verbatim text that was set aside: a block, or `inline`."""

    code: str
    language: str
    caption: str
    inline: bool


def placeholder(number: int) -> str:
    """Return the placeholder of listing `number`."""
    return f"{HOLD}{number}{END}"


class LatexReader(ABC):
    """A text with lookup of arguments and environments in constant time, regardless of nesting."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pairs = brace_pairs(text)
        self.environments = _environment_pairs(text)

    @abstractmethod
    def blocks(self, start: int, end: int, depth: int) -> list[str]:
        """Return the blocks of a part of the text."""

    def inline(self, start: int, end: int, depth: int) -> str:
        """Return a part of the text as one line."""
        return " ".join(" ".join(self.blocks(start, end, depth + 1)).split())

    def argument(self, position: int, end: int) -> tuple[int, int, int]:
        """Return the start and end of a command's argument, and the position after it."""
        start = after_space(self.text, position, end)
        if start < end and self.text[start] == "{":
            close = self.pairs.get(start, end)
            return (start + 1, close, close + 1) if close < end else (start + 1, start + 1, start + 1)
        if match := ONE.match(self.text, start, end):
            return match.start(), match.end(), match.end()
        return position, position, position

    def options(self, position: int, end: int) -> int:
        """Return the position after directly following options: a bracket after a space may be text."""
        while self.text[position : position + 1] == "[" and (match := OPTION.match(self.text, position, end)):
            position = match.end()
        return position


def _environment_pairs(text: str) -> dict[int, tuple[int, int]]:
    r"""Return {\begin: (start, end) of its \end}, by position; an \end closes unclosed inner environments."""
    pairs: dict[int, tuple[int, int]] = {}
    opened: list[tuple[str, int]] = []
    names: Counter[str] = Counter()
    for match in ENVIRONMENT.finditer(text):
        if match[1] == "begin":
            opened.append((match[2], match.start()))
            names[match[2]] += 1
        elif names[match[2]]:
            while True:
                name, start = opened.pop()
                names[name] -= 1
                pairs[start] = match.span()
                if name == match[2]:
                    break
                pairs[start] = (match.start(), match.start())
    return pairs


def flow(text: str) -> str:
    lines = re.sub(r"[ \t\n]+", " ", text).split(BREAK)
    return "\n".join(stripped for line in lines if (stripped := line.strip()))


def marked(text: str, mark: str) -> str:
    text = text.strip()
    return f"{mark}{text}{mark}" if text and not (mark == "`" and "`" in text) else text


def fenced(listing: Listing) -> str:
    code = listing.code.strip("\n").rstrip()
    return fence(code, listing.language) if code.strip() else ""
