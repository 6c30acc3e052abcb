"""Pieces of Markdown that hold any text: fenced blocks, code in a line, tables."""

import re
from collections.abc import Sequence


def fence(text: str, language: str = "") -> str:
    """Return a fenced block whose fence is longer than any run of backticks in the text."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def inline_code(text: str) -> str:
    """Return a text of one line as code; "" for an empty one."""
    ticks = "`" * (_longest_run(text) + 1)
    padding = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{padding}{text}{padding}{ticks}" if text else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of escaped cells as a table; the first row is its head, and shorter rows are filled."""
    width = max(map(len, rows))
    lines = [f"| {' | '.join([*row, *[''] * (width - len(row))])} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * width}", *lines[1:]])


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
