"""Write trafilatura's extracted content as Markdown.

trafilatura's own writer escapes characters that systems text is full of: underscores, brackets, angle brackets.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data_pipeline.markup.blocks import table

if TYPE_CHECKING:
    from lxml.etree import _Element

HEADING_MARKS = re.compile(r"(#{1,6}) ")


def written(body: "_Element") -> list[str]:
    """Return the Markdown blocks of a body from `trafilatura.bare_extraction`."""
    return _without_empty_sections(list(_blocks(body)))


def _without_empty_sections(blocks: list[str]) -> list[str]:
    """Drop headings without content, which had only links."""
    kept: list[str] = []
    following = 0  # level of the next kept block if it is a heading, else 7
    for block in reversed(blocks):
        marks = HEADING_MARKS.match(block)
        level = len(marks[1]) if marks else 7
        if level == 7 or level < following:
            kept.append(block)
            following = level
    return kept[::-1]


def _blocks(element: "_Element") -> Iterator[str]:
    """Yield the Markdown of an element's blocks, in order; text between blocks becomes a paragraph."""
    line = [element.text or ""]
    for child in element:
        if _is_block(child):
            yield from _paragraph(line)
            line = []
            yield from _block(child)
        else:
            line.append(_inline(child))
        line.append(child.tail or "")
    yield from _paragraph(line)


def _is_block(element: "_Element") -> bool:
    return element.tag in ("p", "head", "list", "item", "table", "quote", "div", "body", "main") or (
        next(element.iterdescendants("p", "head", "list", "table", "quote"), None) is not None
    )


def _block(element: "_Element") -> Iterator[str]:
    if element.tag == "head":
        level = element.get("rend", "h2")[1:]
        text = " ".join(_inline_content(element).replace("\v", " ").split())
        if text:
            yield f"{'#' * (int(level) if level in '123456' and level else 2)} {text}"
    elif element.tag == "list":
        yield from _list(element)
    elif element.tag == "table":
        yield from _table(element)
    elif element.tag == "quote":
        yield from ("\n".join(f"> {line}".rstrip() for line in block.splitlines()) for block in _blocks(element))
    else:
        yield from _blocks(element)


def _paragraph(pieces: list[str]) -> Iterator[str]:
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\v"))  # \v marks an intended line break
    text = "\n".join(line for line in lines if line)
    if text:
        yield text


def _list(element: "_Element") -> Iterator[str]:
    ordered = element.get("rend") == "ol"
    items: list[str] = []
    for item in element:
        blocks = list(_blocks(item))
        if blocks:
            marker = f"{len(items) + 1}. " if ordered else "- "
            text = ("\n\n" if any("\n" in block for block in blocks) or len(blocks) > 2 else "\n").join(blocks)
            items.append(
                marker + text.replace("\n", "\n" + " " * len(marker)).replace("\n" + " " * len(marker) + "\n", "\n\n")
            )
    if items:
        yield "\n".join(items)


def _table(element: "_Element") -> Iterator[str]:
    rows = []
    for row in element.iter("row"):
        cells = [" ".join(" ".join(_blocks(cell)).split()).replace("|", "\\|") for cell in row.iterchildren("cell")]
        if any(cells):
            rows.append(cells)
    if rows:
        yield table(rows)


def _inline(element: "_Element") -> str:
    if element.tag == "lb":
        return "\v"
    text = _inline_content(element)
    mark = {"#b": "**", "#i": "*", "#t": "`"}.get(element.get("rend", ""), "") if element.tag == "hi" else ""
    if element.tag == "code":
        mark = "`"
    core = text.strip()
    if not mark or not core or (mark == "*" and core == "*"):
        return text
    if mark == "`":
        core = " ".join(core.split())
        mark = "``" if "`" in core else "`"
    start = text[: len(text) - len(text.lstrip())]
    return f"{start}{mark}{core}{mark}{text[len(text.rstrip()) :]}"


def _inline_content(element: "_Element") -> str:
    pieces = [element.text or ""]
    for child in element:
        pieces += (_inline(child), child.tail or "")
    return "".join(pieces)
