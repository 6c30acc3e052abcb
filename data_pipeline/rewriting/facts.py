"""Facts of a technical text: what a rewriting must neither lose nor invent.

URLs, paths, flags, numbers with units, identifiers, and commands and words set as code. They are recognized by form
alone, so that the same rules apply to the source and to the model's text.
"""

import re
from collections.abc import Iterator

from data_pipeline.rewriting.sections import FENCE, blocks

SHELLS = ("sh", "bash", "zsh", "shell", "console", "shell-session", "shellsession", "terminal", "powershell", "cmd")
UNITS = (
    r"(?:[KMGTPE]i?B?|[kmgt]i?b|B|bytes?|bits?|[kMG]?bps|[KMG]bit/s|[KMG]B/s|[kMGT]?Hz|[kmµun]?s|msecs?|secs?|seconds?"
    r"|minutes?|mins?|hours?|days?|[kmM]?W|[m]?V|°?C|rpm|%|x|cores?|threads?|GPUs?|nodes?)"
)
NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)*)(?:[ \t]?({UNITS})(?![\w]))?(?!\w)|(?<!\w)0x[0-9A-Fa-f]+")
FOUND_IN_ORDER = (  # each match is removed before the next search: a path within a URL is not a second fact
    ("url", re.compile(r"\b[a-z][a-z0-9+]*://[^\s<>\"'`)\]}|]+")),
    ("path", re.compile(r"(?<![\w./~<-])(?:~|\.{1,2})?(?:/[\w.+@%-]*\w)+/?|(?<!\w)[A-Za-z]:(?:\\[\w.+@%-]+)+")),
    ("flag", re.compile(r"(?<![\w-])(?:--[A-Za-z][\w-]*|-[A-Za-z]{1,3}(?![\w-]))")),
    ("number", NUMBER),
    (
        "identifier",
        re.compile(
            r"(?<![\w.])(?:"
            r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w+)+(?:\(\))?"  # dotted
            r"|_*[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+"  # snake_case, UPPER_CASE
            r"|[A-Z]?[a-z0-9]+(?:[A-Z][a-z0-9]+)+"  # CamelCase, camelCase
            r")(?!\w)"
        ),
    ),
)
INLINE_CODE = re.compile(r"(?<!`)`([^`\s]{2,60})`(?!`)")
PROMPT = re.compile(r"\s*(?:\$|#|>|PS[^>]*>|\w+@[\w.-]+[:~][^$#]*[$#])\s+(.*)")
COMMAND = re.compile(r"(?:sudo\s+)?([a-z][\w.+-]*)(?=\s|$)")
NO_FACT = {"", "e.g", "i.e", "a.k.a"}


def facts(text: str) -> dict[tuple[str, str], str]:
    """Return the facts of a Markdown text: (kind, normalized form) -> the words in the text."""
    found = {("command", command): command for command in _commands(text)}
    rest = text
    for kind, pattern in FOUND_IN_ORDER:

        def take(match: re.Match, kind: str = kind) -> str:
            words = match.group().rstrip(".,;:")
            compared = _number(match) if kind == "number" else words
            if compared not in NO_FACT and (kind == "number" or any(map(str.isalpha, words))):
                found.setdefault((kind, compared), words)
            return " "

        rest = pattern.sub(take, rest)
    for match in INLINE_CODE.finditer(rest):
        found.setdefault(("code", match.group(1)), match.group(1))
    return found


def kept_and_invented(source: str, rewritten: str, known: str = "") -> tuple[float, float, int, int]:
    """Compare the facts of a source and its rewriting.

    Returns:
        The share of the source's facts that the rewriting keeps; the share of the rewriting's facts found neither in
        the source nor in `known` (other input of the model); and the number of facts in each of the two texts. Without
        facts the shares are 1.0 and 0.0.
    """
    before, after = facts(source), facts(rewritten)
    kept = sum(_stands_in(fact, words, after, rewritten) for fact, words in before.items())
    told = source + "\n" + known
    told_facts = {**facts(known), **before}
    invented = sum(not _stands_in(fact, words, told_facts, told) for fact, words in after.items())
    return (kept / len(before) if before else 1.0, invented / len(after) if after else 0.0, len(before), len(after))


def _stands_in(fact: tuple[str, str], words: str, others: dict, text: str) -> bool:
    """Return whether a fact is found: a number as the same number, others anywhere, even in longer names."""
    return fact in others or (fact[0] != "number" and words in text)


def _number(match: re.Match) -> str:
    """Return a number's normal form, "10gb" for "10 GB"; "" for a bare digit, which may be a list's."""
    if match.group(1) is None:
        return match.group().lower()
    digits = match.group(1).replace(",", "").rstrip(".")
    unit = match.group(2) or ""
    if len(unit) > 2 and unit.endswith("s") and unit.islower():
        unit = unit[:-1]  # 3 cores, 1 core
    return "" if not unit and len(digits) == 1 else digits + unit


def _commands(text: str) -> Iterator[str]:
    """Yield the first words of shell lines: in fenced shell blocks, and after a prompt in any block."""
    for block in blocks(text):
        if block.kind != "code":
            continue
        first, *lines = block.text.splitlines()
        fence = FENCE.match(first)
        language = fence[2].strip().lower() if fence else ""
        for line in lines:
            prompted = PROMPT.match(line)
            if prompted or language in SHELLS:
                command = COMMAND.match(prompted.group(1) if prompted else line.strip())
                if command:
                    yield command.group(1)
