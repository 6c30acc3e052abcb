"""HTML to Markdown: code blocks unchanged, with their language; tables, lists and links kept; the rest plain."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lxml import etree

from data_pipeline.markup.blocks import fence, inline_code, table

DEPTH = 60  # of nested elements that are converted; deeper ones give only their text
COLUMNS = 100  # limit of a colspan
# All white space but single spaces: replacing each of those would take most of the time.
SPACE_BUT_LINES = re.compile(r"\t[ \t]*| [ \t]+")
SPACE = re.compile(r"[\t\n\r\f\xa0][ \t\n\r\f\xa0]*| [ \t\n\r\f\xa0]+")
# Characters that XML, and so lxml, cannot represent; HTML pages contain them anyway.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
HEADINGS = {f"h{level}": level for level in range(1, 7)}
LISTS = ("ul", "ol", "menu")
DROPPED_NAMES = "script style head template svg iframe object button input select textarea noscript"
BLOCK_NAMES = (
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form "
    "header hr html li main nav p pre section summary table tbody td tfoot th thead tr"
)
DROPPED = frozenset(DROPPED_NAMES.split())
BLOCKS = frozenset(BLOCK_NAMES.split()).union(HEADINGS, LISTS)
EMPHASIS = {"b": "**", "strong": "**", "i": "*", "em": "*", "var": "*", "cite": "*", "dfn": "*"} | dict.fromkeys(
    ("del", "s", "strike"), "~~"
)
CODE = ("code", "kbd", "samp", "tt")
GUTTERS = {"linenos", "linenodiv", "lineno", "line-numbers", "line-number", "gutter", "blob-num"}
LANGUAGE = re.compile(
    r"(?<![\w-])(?:(?:lang|language|highlight-source|highlight)[-_]|brush:\s*)([\w+#.-]{1,30})(?=[\s;]|$)",
    re.IGNORECASE,
)
LANGUAGE_NOTE = re.compile(r"\s*language(?:-all)?:\s*(?:lang-)?([\w+#.-]+)\s*")  # a comment before a code block
NO_LANGUAGE = {"", "none", "default", "text", "plaintext", "plain", "nohighlight", "no-highlight"}


def markdown(html: str | bytes, heading_offset: int = 0) -> str:
    """Return the Markdown of an HTML page or fragment; "" if it has no text.

    `bytes` are decoded as UTF-8. Headings move down by `heading_offset` levels. Markdown's special characters are not
    escaped, since the text is for reading. Images are replaced by their alternative text, links within the site by
    their text.

    Raises:
        ValueError: elements are nested over 2,000 deep; the parser would lose what follows.
    """
    text = html.decode("utf-8", errors="replace") if isinstance(html, bytes) else html
    # lxml needs bytes with a known encoding: it refuses text that declares one.
    parser = etree.HTMLParser(encoding="utf-8", remove_pis=True, huge_tree=True)  # 2,048 levels instead of 256
    root = etree.fromstring(CONTROL.sub("", text).encode() or b"<p>", parser)
    if (fatal := parser.error_log.filter_from_fatals()) and "depth" in fatal[0].message:
        raise ValueError("elements nested too deep")
    if root is None:
        return ""
    return "\n\n".join(_Converter(heading_offset).blocks(root, 0))


@dataclass(slots=True)
class _Run:
    """Inline text until the next block; `end` returns its trimmed lines."""

    pieces: list[str] = field(default_factory=list)

    def end(self) -> str:
        text = "".join(self.pieces)
        self.pieces = []
        if not text or text.isspace():
            return ""
        lines = SPACE_BUT_LINES.sub(" ", text).split("\n")  # line ends in a run come from <br>
        return "\n".join(line.strip() for line in lines).strip()


class _Converter:
    def __init__(self, heading_offset: int) -> None:
        self.heading_offset = heading_offset
        self.language = ""  # from a comment, for the next code block
        special = {"pre": self._pre, "table": self._table, "blockquote": self._quote, "hr": lambda *_: ["---"]}
        self._converters: dict[str, Callable[[etree._Element, int], list[str]]] = {
            **special,
            **dict.fromkeys(LISTS, self._list),
            **dict.fromkeys(HEADINGS, self._heading),
            "dd": self._description,
        }

    def blocks(self, element: etree._Element, depth: int) -> list[str]:
        """Return the blocks of an element: paragraphs, and the blocks of its block children."""
        if depth > DEPTH:
            return [text] if (text := _flat("".join(element.itertext()))) else []
        found: list[str] = []
        run = _Run([_collapse(element.text)])
        for child in element:
            if isinstance(child.tag, str) and child.tag not in DROPPED and not _is_gutter(child):
                if child.tag in BLOCKS or _holds_block(child):
                    found.append(run.end())
                    found += self._converters.get(child.tag, self.blocks)(child, depth + 1)
                else:
                    run.pieces.append(self._inline(child, depth + 1))
            elif child.tag is etree.Comment and (note := LANGUAGE_NOTE.fullmatch(child.text or "")):
                self.language = note[1]
            run.pieces.append(_collapse(child.tail))
        found.append(run.end())
        return [block for block in found if block]

    def _inline(self, element: etree._Element, depth: int) -> str:
        tag = element.tag
        if tag == "br":
            return "\n"
        if tag == "img":
            return _collapse(element.get("alt"))
        if tag in CODE:
            return inline_code(SPACE.sub(" ", "".join(element.itertext())).strip())
        text = self._inline_children(element, depth)
        if tag in EMPHASIS:
            return _around(text, EMPHASIS[tag])
        if tag == "a":
            return _link(text, element.get("href") or "")
        if tag in ("sup", "sub") and text.strip() and "](" not in text:
            mark, text = "^" if tag == "sup" else "_", text.strip()
            return f"{mark}{text}" if text.isalnum() else f"{mark}({text})"
        return text

    def _inline_children(self, element: etree._Element, depth: int) -> str:
        if depth > DEPTH:
            return _collapse("".join(element.itertext()))
        pieces = [_collapse(element.text)]
        for child in element:
            if isinstance(child.tag, str) and child.tag not in DROPPED and not _is_gutter(child):
                pieces.append(self._inline(child, depth + 1))
            pieces.append(_collapse(child.tail))
        return "".join(pieces)

    def _heading(self, element: etree._Element, depth: int) -> list[str]:
        text = _flat(" ".join(self.blocks(element, depth)))
        level = min(6, HEADINGS[element.tag] + self.heading_offset)
        return [f"{'#' * level} {text}"] if text else []

    def _quote(self, element: etree._Element, depth: int) -> list[str]:
        lines = "\n\n".join(self.blocks(element, depth)).splitlines()
        return ["\n".join(f"> {line}".rstrip() for line in lines)] if lines else []

    def _description(self, element: etree._Element, depth: int) -> list[str]:
        blocks = self.blocks(element, depth)
        return [_indent("\n\n".join(blocks), ":   ")] if blocks else []

    def _list(self, element: etree._Element, depth: int) -> list[str]:
        start = element.get("start", "")
        number = int(start) if start.isascii() and start.isdigit() and len(start) < 10 else 1
        items: list[str] = []
        loose = False
        for child in element:
            if not isinstance(child.tag, str) or child.tag in DROPPED:
                continue
            # A list directly in a list is invalid, but common: it belongs to the item before.
            nested = child.tag in LISTS
            blocks = self._list(child, depth + 1) if nested and depth < DEPTH else self.blocks(child, depth + 1)
            if not blocks:
                continue
            loose = loose or any(paragraph.tag == "p" for paragraph in child)
            body = ("\n" if _is_tight(child) else "\n\n").join(blocks)
            if nested and items:
                items.append(_indent(body, "  "))
            else:
                items.append(_indent(body, f"{number}. " if element.tag == "ol" else "- "))
                number += 1
        return [("\n\n" if loose else "\n").join(items)] if items else []

    def _pre(self, element: etree._Element, depth: int) -> list[str]:
        language = _language(element) or self.language
        self.language = ""
        code = "".join(_code(element, 0)).replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
        code = code.removeprefix("\n").rstrip()
        if not code.strip():
            return []
        return [fence(code, language)]

    def _table(self, element: etree._Element, depth: int) -> list[str]:
        caption = [block for part in element.iterchildren("caption") for block in self.blocks(part, depth + 1)]
        rows = [[cell for cell in row if cell.tag in ("td", "th")] for row in _rows(element)]
        cells = [cell for row in rows for cell in row]
        if depth > DEPTH or max(map(len, rows), default=0) < 2 or any(_is_layout(cell) for cell in cells):
            kept = [cell for cell in cells if not _is_gutter(cell)]
            return caption + [block for cell in kept for block in self.blocks(cell, depth + 1)]
        lines = [[text for cell in row for text in self._cell(cell, depth)] for row in rows]
        width = max(map(len, lines))
        lines = [line + [""] * (width - len(line)) for line in lines if any(line)]
        return [*caption, table(lines)] if lines else caption

    def _cell(self, cell: etree._Element, depth: int) -> list[str]:
        text = _flat(" ".join(self.blocks(cell, depth + 1))).replace("|", "\\|")
        span = cell.get("colspan", "")
        columns = min(int(span), COLUMNS) if span.isascii() and span.isdigit() and len(span) < 10 else 1
        return [text, *[""] * (columns - 1)]


def _collapse(text: str | None) -> str:
    return SPACE.sub(" ", text) if text else ""


def _flat(text: str) -> str:
    return " ".join(text.split())


def _indent(text: str, marker: str) -> str:
    """Return the text with `marker` before its first line and equal indentation before the others."""
    return marker + text.replace("\n", "\n" + " " * len(marker)).replace(f"\n{' ' * len(marker)}\n", "\n\n")


def _around(text: str, mark: str) -> str:
    """Return the text between two marks; outer white space stays outside them, as Markdown requires."""
    inner = text.strip()
    if not inner or "\n" in inner or (inner.startswith(mark) and inner.endswith(mark)):
        return text
    start = text.index(inner)
    return f"{text[:start]}{mark}{inner}{mark}{text[start + len(inner) :]}"


def _link(text: str, address: str) -> str:
    address = address.strip()
    if not address.lower().startswith(("http://", "https://", "ftp://")) or not text.strip() or len(address) > 2000:
        return text
    address = re.sub(r"\s", "%20", address)
    inner = text.strip()
    if inner.rstrip("/") == address.rstrip("/"):
        return text.replace(inner, address)
    lead = text[: text.index(inner)]
    address = f"<{address}>" if "(" in address or ")" in address else address
    return f"{lead}[{_flat(inner)}]({address}){text[len(lead) + len(inner) :]}"


def _is_gutter(element: etree._Element) -> bool:
    classes = element.get("class")
    return classes is not None and not GUTTERS.isdisjoint(classes.lower().split())


def _holds_block(element: etree._Element) -> bool:
    return len(element) > 0 and any(child.tag in BLOCKS for child in element.iterdescendants(etree.Element))


def _is_layout(cell: etree._Element) -> bool:
    return any(child.tag in ("pre", "table") for child in cell.iterdescendants(etree.Element))


def _is_tight(item: etree._Element) -> bool:
    """Return whether the only blocks of a list item are nested lists."""
    return not any(child.tag in BLOCKS and child.tag not in LISTS for child in item)


def _rows(table: etree._Element) -> Iterator[etree._Element]:
    for child in table:
        if child.tag == "tr":
            yield child
        elif child.tag in ("thead", "tbody", "tfoot"):
            yield from child.iterchildren("tr")


def _code(element: etree._Element, depth: int) -> Iterator[str]:
    """Yield the text of a code block, without line numbers."""
    if depth > DEPTH:
        yield "".join(element.itertext())
        return
    yield element.text or ""
    for child in element:
        if child.tag == "br":
            yield "\n"
        elif isinstance(child.tag, str) and not _is_gutter(child) and child.tag not in DROPPED:
            yield from _code(child, depth + 1)
        yield child.tail or ""


def _language(pre: etree._Element) -> str:
    """Return the language in a code block's markup: on itself, in its <code>, or around it."""
    around = [parent for parent in list(pre.iterancestors())[:2] if parent.tag in ("div", "figure")]
    for element in (pre, *pre.iterchildren("code"), *around):
        names = [element.get("data-lang", ""), element.get("data-language", "")]
        names += LANGUAGE.findall(element.get("class") or "")
        classes = (element.get("class") or "").lower().split()
        if "sourcecode" in classes:  # pandoc: class="sourceCode bash"
            names += [name for name in classes if name not in ("sourcecode", "numbersource", "numberlines")]
        for name in names:
            if name.lower() not in NO_LANGUAGE and re.fullmatch(r"[\w+#.-]{1,30}", name):
                return name.lower()
    return ""
