"""Markdown writers safe for any text: tables, fenced blocks, and human-readable numbers."""

import html
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from data_pipeline.markup.blocks import fence

CELL_CHARACTERS = 80
LINE_CHARACTERS = 200
SPECIAL = re.compile(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))")
# Control characters, line and paragraph separators, and marks that change the text direction.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
TOKEN_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def plain(text: str, characters: int = CELL_CHARACTERS) -> str:
    """Return a text on one line, cut to `characters`, escaped to show literally in Markdown, also in tables."""
    return html.escape(SPECIAL.sub(r"\\\1", one_line(text, characters)), quote=False)


def one_line(text: str, characters: int) -> str:
    """Return a text on one line, cut to `characters`, with control characters made visible."""
    line = CONTROLS.sub(_visible, " ".join(text.split()))
    return line if len(line) <= characters else line[: characters - 1] + "…"


def fenced(text: str, characters: int, lines: int) -> str:
    """Return the beginning of a text as a fenced block that its content cannot end, with visible control characters."""
    shown = text.replace("\r\n", "\n").strip("\n")
    rows = shown[:characters].split("\n")
    cut = [row if len(row) <= LINE_CHARACTERS else row[:LINE_CHARACTERS] + "…" for row in rows[:lines]]
    if len(rows) > lines or len(shown) > characters:
        cut.append("…")
    block = CONTROLS.sub(_visible, "\n".join(cut))
    return fence(block, "text")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first `left` columns are left-aligned, the others right-aligned."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * left}{'---:|' * (len(header) - left)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def picture(path: str, title: str) -> str:
    """Return a picture, given its path relative to the page."""
    return f"![{plain(title)}]({quote(path)})"


def folded(summary: str, content: str) -> str:
    """Return Markdown folded behind a clickable line of text."""
    line = html.escape(one_line(summary, LINE_CHARACTERS))
    return f"<details><summary>{line}</summary>\n\n{content}\n\n</details>"


def count(number: int) -> str:
    """Return 1234567 as 1,234,567."""
    return f"{number:,}"


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return "1 document" or "2 documents"; `several` for irregular plurals."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def size(length: float) -> str:
    """Return a number of bytes as 14.0 GB: in powers of ten, with one decimal."""
    return _with_unit(length, PREFIXES, "B")


def tokens(number: float) -> str:
    """Return a number of tokens as 3.3 B."""
    return _with_unit(number, TOKEN_UNITS, "").strip()


def percent(part: float, whole: float) -> str:
    """Return a share such as 12.3%; only nothing is shown as 0%, and only everything as 100%."""
    if part < 0:
        return f"-{percent(-part, whole)}"
    if not part or not whole:
        return "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "<0.01%"
    if share < 1:
        return f"{share:.2f}%"
    if share < 99.95:
        return f"{share:.1f}%"
    return ">99.9%" if share < 100 else f"{share:.0f}%"


def _with_unit(number: float, units: Sequence[tuple[float, str]], base: str) -> str:
    for factor, unit in units:
        if abs(number) >= 0.9995 * factor:  # 999.9 k becomes 1.0 M
            return f"{number / factor:,.1f} {unit}{base}"
    return f"{number:,.0f} {base}"


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # the symbol for a control character
    return f"\\u{code:04x}"
