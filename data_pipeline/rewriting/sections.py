"""Cut documents at sections into parts that a model can rewrite one by one, each with its context.

A part starts at a heading if possible, else at a paragraph. A fenced code block is never cut, so a longer one is a part
by itself. The concatenated parts are the original text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})(.*)")
HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a text with the blank lines after them: a heading, a fenced code block, or a paragraph."""

    kind: str
    text: str
    level: int = 0  # of a heading
    title: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a document, counted from 0; `section`: its path of headings, `before`: end of the preceding text."""

    number: int
    text: str
    section: str
    before: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a Markdown text, which together are the text. An open fence closes at the end."""
    kind, lines, fence = "", [], ""
    for line in text.splitlines(keepends=True):
        stripped = line.rstrip("\r\n")
        if fence:
            lines.append(line)
            if _closes(stripped, fence):
                fence = ""
            continue
        opening, heading = FENCE.match(stripped), HEADING.match(stripped)
        if not stripped.strip():
            lines.append(line)
            kind = kind or "paragraph"
            continue
        begins = opening or heading or kind in ("code", "heading") or _is_blank(lines)
        if begins and lines:
            yield _block(kind, lines)
            lines, kind = [], ""
        lines.append(line)
        if opening and "`" not in opening.group(2):
            kind, fence = "code", opening.group(1)
        else:
            kind = kind or ("heading" if heading else "paragraph")
    if lines:
        yield _block(kind, lines)


def prose(text: str) -> str:
    """Return a text without its fenced code blocks."""
    return "".join(block.text for block in blocks(text) if block.kind != "code")


def title_of(text: str) -> str:
    """Return the first heading of a text, or ""."""
    return next((block.title for block in blocks(text) if block.kind == "heading"), "")


def cut(text: str, characters: int, context: int) -> list[Part]:
    """Return the parts of a text, each of at most about `characters`, with up to `context` preceding characters.

    Only a fenced code block, or a heading and the paragraph under it, can make a part longer.
    """
    headings: list[tuple[int, str]] = []
    parts: list[Part] = []
    before = ""
    for group in _packed(text, characters):
        piece = "".join(block.text for block in group)
        if group[0].kind == "heading":
            headings = _under(headings, group[0])
        section = " > ".join(title for _, title in headings)
        parts.append(Part(len(parts), piece, section, _tail(before, context)))
        for block in group:
            if block.kind == "heading":
                headings = _under(headings, block)
        before = piece
    return parts


def _packed(text: str, characters: int) -> Iterator[list[Block]]:
    """Yield runs of blocks: whole sections while they fit together, a longer section paragraph by paragraph."""
    group: list[Block] = []
    size = 0
    for section in _sections(text):
        section_size = sum(len(block.text) for block in section)
        if group and size + section_size > characters:
            yield group
            group, size = [], 0
        if section_size <= characters:
            group, size = group + section, size + section_size
            continue
        for block in (piece for whole in section for piece in _pieces(whole, characters)):
            only_heading = all(held.kind == "heading" for held in group)
            if not only_heading and size + len(block.text) > characters:
                yield group
                group, size = [], 0
            group, size = [*group, block], size + len(block.text)
        if group:
            yield group
            group, size = [], 0
    if group:
        yield group


def _sections(text: str) -> Iterator[list[Block]]:
    """Yield each heading with the blocks under it; the text before the first heading is a section too."""
    section: list[Block] = []
    for block in blocks(text):
        if block.kind == "heading" and section:
            yield section
            section = []
        section.append(block)
    if section:
        yield section


def _pieces(block: Block, characters: int) -> Iterator[Block]:
    """Yield a long paragraph in pieces cut at line ends, else sentence ends, else anywhere; other blocks whole."""
    if block.kind != "paragraph" or len(block.text) <= characters:
        yield block
        return
    start = 0
    while start < len(block.text):
        end = min(start + characters, len(block.text))
        if end < len(block.text):
            window = block.text[start:end]
            sentence = max((found.end() for found in SENTENCE_END.finditer(window)), default=0)
            end = start + (window.rfind("\n") + 1 or sentence or window.rfind(" ") + 1 or characters)
        yield Block("paragraph", block.text[start:end])
        start = end


def _block(kind: str, lines: list[str]) -> Block:
    heading = HEADING.match(lines[0].rstrip("\r\n")) if kind == "heading" else None
    return (
        Block(kind, "".join(lines), len(heading.group(1)), heading.group(2)) if heading else Block(kind, "".join(lines))
    )


def _is_blank(lines: list[str]) -> bool:
    return bool(lines) and not lines[-1].strip()


def _closes(line: str, fence: str) -> bool:
    bare = line.strip(" \t>")
    return len(bare) >= len(fence) and bare == fence[0] * len(bare)


def _under(headings: list[tuple[int, str]], heading: Block) -> list[tuple[int, str]]:
    return [*(held for held in headings if held[0] < heading.level), (heading.level, heading.title)]


def _tail(text: str, characters: int) -> str:
    """Return the end of a text, from the start of a line if possible."""
    if characters == 0:
        return ""
    tail = text.rstrip()[-characters:]
    if len(tail) == len(text.rstrip()):
        return tail
    _, newline, rest = tail.partition("\n")
    return rest if newline and rest.strip() else tail
