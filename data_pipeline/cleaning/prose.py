"""Prose told from code, commands, logs and tables, line by line: each is judged by rules of its own."""

import re

FENCE = re.compile(r" {0,8}(?:```|~~~)")
# Letters (of base64 there would be more at once), with the punctuation that sentences have around and within words.
PLAIN_WORD = re.compile(
    r"""(?<!\S)["'“‘«(\[*]{0,3}[^\W\d_]{1,60}(?:['’，、：；·-][^\W\d_]{1,60})*"""
    r"""[\])"'”’»*]{0,2}[.,;:!?。，、！？；：…)"'”’»*]{0,3}(?!\S)"""
)
PROSE_SHARE = 0.6  # of a line's words that are plain: a sentence may well have a path and a number in it
SHORT_LINE = 3  # words; shorter lines (ends of paragraphs, `else`, `}`) are what the line before them is


def split_prose(text: str) -> tuple[str, str]:
    """Return the lines of `text` that are prose, and those that are not (code, commands, logs, tables).

    Fenced code is never prose. One blank line ends a paragraph in both.
    """
    prose: list[str] = []
    other: list[str] = []
    fenced, before = False, prose
    for line in text.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
            other.append(line)
            continue
        if not line.strip():
            for lines in (prose, other):
                if lines and lines[-1]:
                    lines.append("")
            continue
        if fenced:
            other.append(line)
            continue
        words = len(line.split())
        plain = len(PLAIN_WORD.findall(line))
        if words < SHORT_LINE:
            kind = before if plain == words else other
        else:
            kind = before = prose if plain >= PROSE_SHARE * words else other
        kind.append(line)
    return "\n".join(prose), "\n".join(other)


def plain_words(prose: str) -> list[str]:
    """Return the plain words of prose, without paths, numbers, flags and identifiers among them."""
    return PLAIN_WORD.findall(prose)
