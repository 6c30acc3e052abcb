"""Split text line by line into prose and the rest (code, commands, logs, tables), to apply different rules."""

import re

FENCE = re.compile(r" {0,8}(?:```|~~~)")
# Letters (base64 has longer runs), with the punctuation that sentences have around and within words.
PLAIN_WORD = re.compile(
    r"""(?<!\S)["'“‘«(\[*]{0,3}[^\W\d_]{1,60}(?:['’，、：；·-][^\W\d_]{1,60})*"""
    r"""[\])"'”’»*]{0,2}[.,;:!?。，、！？；：…)"'”’»*]{0,3}(?!\S)"""
)
PROSE_SHARE = 0.6  # least share of plain words in a prose line: a sentence may contain a path and a number
SHORT_LINE = 3  # words; shorter lines (ends of paragraphs, `else`, `}`) get the kind of the line before them


def split_prose(text: str) -> tuple[str, str]:
    """Return the lines of `text` that are prose, and the others (code, commands, logs, tables).

    Fenced code is never prose. In both results one blank line ends a paragraph.
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
    """Return the plain words of prose, without paths, numbers, flags and identifiers."""
    return PLAIN_WORD.findall(prose)
