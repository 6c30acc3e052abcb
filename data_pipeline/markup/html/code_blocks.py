"""Code blocks of HTML pages: extract them with their language, without line numbers, and reinsert them as fences."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.html import HtmlElement

GUTTER_CLASSES = (
    "lineno linenos linenumber line-number linenumbers line-numbers-rows gutter rouge-gutter blob-num hljs-ln-numbers"
    " hljs-ln-n lnt ln code-gutter linenodiv"
)
GUTTERS = frozenset(GUTTER_CLASSES.split())
LEFT_OUT = frozenset(("button", "script", "style", "noscript", "svg", "template"))
LINES = frozenset(("div", "li", "tr", "p", "pre"))  # within a code block, each of these starts and ends a line
LANGUAGE = re.compile(
    r"(?:^|\s)(?:language-|lang-|highlight-source-|highlight-|brush:\s*|code-)([A-Za-z][\w+#.-]{0,24})"
)
NO_LANGUAGE_NAMES = (
    "none default text plain plaintext txt notranslate nohighlight no-highlight auto wrapper block box example"
    " container highlight code output literal listing"
)
NO_LANGUAGE = frozenset(NO_LANGUAGE_NAMES.split())
FILLER_CHARACTERS = 2000
MARK = re.compile(r"\s*zqcode(\d+)zq(?: filler)*\s*")
LEAD = re.compile(r"[ >]*(?:- |\d+\. )?")


class CodeBlocks:
    """The code blocks of one page.

    Each is replaced in the tree by a placeholder paragraph of about its length, so that filters by text length are not
    affected.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[str, str]] = []  # text, language

    def take_out(self, tree: "HtmlElement") -> None:
        """Replace every code block of the tree by its placeholder paragraph."""
        for table in list(tree.iter("table")):
            _only_code(table)
        for block in tree.xpath(
            "//pre[not(ancestor::pre)] | //code[.//br][not(ancestor::pre)] | //textarea[@readonly]"
        ):
            text = code_text(block)
            if not text:
                block.drop_tree()
                continue
            self._blocks.append((text, _language(block)))
            words = ["filler"] * (min(len(text), FILLER_CHARACTERS) // 7)
            tail, parent = block.tail, block.getparent()
            stand_in = parent.makeelement("p", {"data-code": "1"})
            stand_in.text, stand_in.tail = " ".join([f"zqcode{len(self._blocks) - 1}zq", *words]), tail
            parent.replace(block, stand_in)

    def put_back(self, markdown: str) -> str:
        """Return `markdown` with each placeholder replaced by its fenced code, each block once."""
        lines: list[str] = []
        for line in markdown.split("\n"):
            if MARK.search(line) is None:
                lines.append(line)
            elif line.startswith("|"):  # a table row cannot contain a fence
                lines.append(MARK.sub(lambda match: f" {_span(self._claim(match[1])[0])} ", line))
            else:
                self._split(line, lines)
        return "\n".join(lines)

    def _split(self, line: str, lines: list[str]) -> None:
        """Add a line's text and code to `lines`, on separate lines with the line's indentation."""
        match = LEAD.match(line)
        lead = match[0] if match else ""
        inner = re.sub(r"[^ >]", " ", lead)  # indentation of a list item's later lines
        for number, piece in enumerate(MARK.split(line[len(lead) :])):
            if number % 2:
                text, language = self._claim(piece)
                added = fence(text, language).split("\n") if text else []
            else:
                added = [piece] if piece.strip("*_` ") else []  # drop emphasis marks around the code
            if not added:
                continue
            if lead is inner and lines and lines[-1].strip(" >"):
                lines.append(inner.rstrip())
            lines.append(lead + added[0])
            lead = inner
            lines.extend((inner + part).rstrip() if not part else inner + part for part in added[1:])

    def _claim(self, number: str) -> tuple[str, str]:
        """Return a block and clear it: a page that quotes a placeholder must not multiply the block."""
        index = int(number) if len(number) < 8 else -1
        if not 0 <= index < len(self._blocks):
            return "", ""
        block, self._blocks[index] = self._blocks[index], ("", "")
        return block


def fence(text: str, language: str = "") -> str:
    """Return a fenced block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"^\s*(`{3,})", text, re.MULTILINE)), default=2)
    marks = "`" * (longest + 1)
    return f"{marks}{language}\n{text}\n{marks}"


def code_text(block: "HtmlElement") -> str:
    """Return the text of a code block: all lines with their indentation, without line numbers and buttons."""
    pieces: list[str] = []
    _collect(block, pieces)
    lines = [line.rstrip() for line in "".join(pieces).replace("\r\n", "\n").replace("\xa0", " ").split("\n")]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)


def _collect(element: "HtmlElement", pieces: list[str]) -> None:
    """Add an element's text, with a line end before and after each child in LINES."""
    pieces.append(element.text or "")
    for child in element:
        if child.tag == "br":
            pieces.append("\n")
        elif _is_left_out(child):
            pass
        elif child.tag in LINES:
            _end_line(pieces)
            before = len(pieces)
            _collect(child, pieces)
            if any(pieces[before:]):
                _end_line(pieces)
            else:
                pieces.append("\n")  # an empty line
        else:
            _collect(child, pieces)
        pieces.append(child.tail or "")


def _end_line(pieces: list[str]) -> None:
    last = next((piece for piece in reversed(pieces) if piece), "\n")
    if not last.endswith("\n"):
        pieces.append("\n")


def _is_left_out(element: "HtmlElement") -> bool:
    return element.tag in LEFT_OUT or not GUTTERS.isdisjoint((element.get("class") or "").split())


def _language(block: "HtmlElement") -> str:
    """Return the language named by the class of a block, of its code element or of the elements around it."""
    nearby = [block, *block.iter("code"), *(box for box, _ in zip(block.iterancestors(), range(3), strict=False))]
    for element in nearby[:6]:
        said = element.get("data-lang") or element.get("data-language")
        for name in [said] if said else LANGUAGE.findall(element.get("class") or ""):
            if name.lower() not in NO_LANGUAGE and re.fullmatch(r"[\w+#.-]{1,24}", name):
                return name.lower()
    return ""


def _only_code(table: "HtmlElement") -> None:
    """Replace a highlighter's table of line numbers and one code block by that block."""
    cells = [cell for cell in table.iter("td", "th") if not _is_left_out(cell)]
    if not 1 <= len(cells) <= 2 or len(cells) == sum(1 for _ in table.iter("td", "th")) == 1:
        return
    texts = [(cell, code) for cell in cells if (code := code_text(cell))]
    if len(texts) != 1:
        return
    cell, code = texts[0]
    block = next(cell.iter("pre"), None)
    named = "code" in (cell.get("class") or "").split()
    if (block is None and not named) or (block is not None and code_text(block) != code):
        return
    table.tag, table.text = "pre", code
    for child in list(table):
        table.remove(child)


def _span(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line and "`" not in line else line
