"""Convert a manual page's roff to Markdown: sections as headings, options as a list, verbatim text as code."""

import calendar
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.licences import licence_of_text
from data_pipeline.markup.blocks import fence
from data_pipeline.markup.roff import plain_text, unescape

# Marks that carry a line's kind through plain_text: characters that are removed from every page first.
SECTION, SUBSECTION, CODE, CODE_END, TAG_END = "\x11", "\x12", "\x13", "\x14", "\x15"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
TITLE = re.compile(r"^[.']\s*(?:TH|Dt)\s+\"?([^\s\"]+)\"?\s+\"?([^\s\"]+)\"?", re.MULTILINE)
TH_DATE = re.compile(r"^[.']\s*TH\s[^\n]*?\b(\d{4}-\d{2}-\d{2})\b", re.MULTILINE)
MDOC_DATE = re.compile(r"^[.']\s*Dd\s+(?:\$Mdocdate:\s*)?([A-Z][a-z]+)\s+(\d{1,2}),?\s+(\d{4})", re.MULTILINE)
MONTHS = tuple(calendar.month_name)  # the first is empty
COMMENT = re.compile(r"^[.']?\s*\\[\"#](.*)$", re.MULTILINE)
COMMENTS = 200  # lines at the head that may state the licence
SPDX = re.compile(r"SPDX-License-Identifier:\s*([\w.+-]+(?:\s+(?:OR|AND|WITH)\s+[\w.+-]+)*)")
INCLUDES_ANOTHER = re.compile(r"^[.']\s*so\s", re.MULTILINE)
VERBATIM = {"nf": "fi", "EX": "EE", "Vb": "Ve", "Bd": "Ed"}
NO_TAG = ("PD", "ne", "IX", "ft", "nh", "hy", "ad", "if", "ie", "el")
TAG_WORDS = 8
BULLETS = ("•", "·", "o", "*", "-", "—", "–")


@dataclass(frozen=True, slots=True)
class ManualPage:
    """A page's Markdown, date (ISO 8601) and licence; empty strings if unknown."""

    markdown: str
    date: str
    licence: str


def is_alias(roff: str) -> bool:
    """Return whether a page only includes another one."""
    lines = [line for line in roff.splitlines() if line.strip() and not COMMENT.match(line)]
    return not lines or (len(lines) < 4 and INCLUDES_ANOTHER.match(lines[0]) is not None)


def read_manual_page(roff: str, name: str) -> ManualPage:
    """Return a page as Markdown under its name and section (`name` if it has none); empty if it has no text."""
    roff = CONTROL.sub("", roff.replace("\r\n", "\n"))
    title = TITLE.search(roff)
    if title:
        command = unescape(title[1])
        name = f"{command.lower() if command.isupper() else command}({title[2].lower()})"
    blocks = list(_closed(list(_markdown(plain_text("\n".join(_marked(roff.split("\n"))))))))
    return ManualPage(_joined([f"# {name}", *blocks]) if blocks else "", _date(roff), _licence(roff))


def _marked(lines: list[str]) -> Iterator[str]:
    """Yield a page's lines with marks where sections, tags and verbatim text start and end."""
    tag_next = False
    heading = ""  # a section macro whose title is on the next line
    verbatim = ""
    for line in lines:
        name, _, rest = line[1:].strip().replace("\t", " ").partition(" ") if line[:1] in (".", "'") else ("", "", "")
        if heading:
            if not COMMENT.match(line):
                yield f'.SH "{heading}{line.strip()}"'
                heading = ""
        elif name in ("SH", "Sh", "SS", "Ss"):
            if verbatim:
                yield from (f".{VERBATIM[verbatim]}", ".PP", CODE_END, ".PP")
                verbatim = ""
            mark = SECTION if name in ("SH", "Sh") else SUBSECTION
            words = " ".join(rest.replace('"', " ").split())
            if words:
                yield f'.SH "{mark}{words}"'
            else:
                heading = mark
            tag_next = False
        elif (
            name in VERBATIM and not verbatim and not (name == "Bd" and re.search(r"-(?:ragged|filled|centered)", rest))
        ):
            verbatim, tag_next = name, False
            yield from (".PP", CODE, ".PP", line)
        elif verbatim and name == VERBATIM[verbatim]:
            verbatim = ""
            yield from (line, ".PP", CODE_END, ".PP")
        elif name in ("TP", "TQ"):
            tag_next = True
            yield line
        elif tag_next and line.strip() and name not in NO_TAG and not COMMENT.match(line):
            yield line
            if not line.rstrip().endswith("\\c"):
                yield TAG_END
                tag_next = False
        elif name in ("IP", "It") and rest.strip():
            yield from (line, TAG_END)
        else:
            yield line


def _markdown(text: str) -> Iterator[str]:
    """Yield the Markdown blocks of plain text with marks; the marks of code are separate blocks."""
    tags: list[str] = []  # of an item whose text follows
    for paragraph in text.split("\n\n"):
        first = paragraph[:1]
        if first in (SECTION, SUBSECTION):
            tags = []
            yield f"{'##' if first == SECTION else '###'} {paragraph[1:].strip()}"
        elif first in (CODE, CODE_END):
            if tags:
                yield _item(tags, "")
                tags = []
            yield first
        elif TAG_END in paragraph:
            tag, _, body = paragraph.partition(TAG_END)
            tags.append(" ".join(tag.split()))
            if body.strip():
                yield _item(tags, body.replace(TAG_END, " ").strip())
                tags = []
        elif tags and paragraph.strip():
            yield _item(tags, paragraph.strip())
            tags = []
        elif paragraph.strip():
            yield paragraph.strip("\n")
    if tags:
        yield _item(tags, "")


def _item(tags: list[str], body: str) -> str:
    tag = ", ".join(tag for tag in tags if tag)
    if tag in BULLETS or not tag:
        return f"- {body}"
    if not tag.startswith("-") and len(tag.split()) > TAG_WORDS:  # a sentence used as a tag
        return f"- {tag} {body}".rstrip()
    name = f"`{tag}`" if "`" not in tag else tag
    return f"- {name}: {body}" if body else f"- {name}"


def _closed(blocks: list[str]) -> Iterator[str]:
    """Yield blocks with the blocks between code marks joined in one fence, and without empty sections."""
    code: list[str] | None = None
    for index, block in enumerate(blocks):
        if block == CODE:
            code = [] if code is None else code
        elif block == CODE_END:
            if code:
                yield fence("\n\n".join(code))
            code = None
        elif code is not None:
            code.append(block)
        elif not (block.startswith("## ") and (index + 1 == len(blocks) or blocks[index + 1].startswith("## "))):
            yield block
    if code:
        yield fence("\n\n".join(code))


def _joined(blocks: list[str]) -> str:
    """Return blocks separated by blank lines, but list items by line ends."""
    pieces = blocks[:1]
    for before, block in itertools.pairwise(blocks):
        items = before.startswith("- ") and block.startswith("- ")
        pieces += ("\n" if items else "\n\n", block)
    return "".join(pieces)


def _date(roff: str) -> str:
    found = TH_DATE.search(roff)
    if found:
        return found[1]
    found = MDOC_DATE.search(roff)
    if found and found[1] in MONTHS:
        return f"{found[3]}-{MONTHS.index(found[1]):02d}-{int(found[2]):02d}"
    return ""


def _licence(roff: str) -> str:
    """Return the licence named by, or quoted in, the comments at a page's head."""
    comments = [match[1].strip() for match in COMMENT.finditer("\n".join(roff.split("\n", COMMENTS)[:COMMENTS]))]
    head = "\n".join(comments)
    named = SPDX.search(head)
    return named[1] if named else licence_of_text(head) or ""
