"""Convert one web page to Markdown: trafilatura selects the main content; code blocks, tables and headings are kept.

trafilatura is made for articles, and breaks preformatted text at each element in it. A page's code blocks are therefore
extracted from the tree first and reinserted afterwards.
"""

import contextlib
import logging
import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from data_pipeline.documents import Unreadable
from data_pipeline.licences import licence_of_address
from data_pipeline.markup.html.code_blocks import CodeBlocks
from data_pipeline.markup.html.trafilatura_markdown import written

if TYPE_CHECKING:
    from lxml.html import HtmlElement

META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
# Encodings that browsers use for these names (WHATWG), and in which such pages are really written.
BROWSER_NAMES = {
    "iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252", "us-ascii": "cp1252",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "shift-jis": "cp932", "euc-kr": "cp949",
    "iso-8859-9": "cp1254", "utf8": "utf-8", "utf-16": "utf-16-le",
}  # fmt: skip
# Characters not allowed in XML, raw or as references: lxml reads them from HTML, but refuses to write them.
CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffd\ufffe\uffff]"
    "|&#(?:0*(?:[0-8]|1[124-9]|2[0-9]|3[01])(?![0-9])|[xX]0*(?:1?[0-8]|1?[bcefBCEF]|1[9adAD])(?![0-9a-fA-F]));?"
)
DETECTION_BYTES = 64 * 1024
BROKEN_SHARE = 0.001  # of characters; above it, the text has another encoding, or is not text
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
INLINE_NAMES = (
    "a abbr b bdi bdo big br cite code del dfn em font i img ins kbd mark q s samp small span strike strong sub sup"
    " tt u var wbr"
)
INLINE = frozenset(INLINE_NAMES.split())
PERMALINKS = ("", "¶", "#", "§", "🔗", "\uf0c1")
# XPaths of a page's main part: the first that matches exactly one element wins.
MAIN_PARTS = (
    ".//*[@role='main']",
    ".//main",
    ".//article",
    ".//*[@itemprop='articleBody']",
    ".//*[@id='content' or @id='main-content' or @id='page-content' or @id='mw-content-text']",
    ".//*[@id='main']",
)
INLINE_CHILDREN = 5000  # trafilatura's time is quadratic in their number: about a second for this many
HEAD_CHARACTERS = 4000
BLOCKS_IN_QUOTES = ("blockquote", "div", "pre", "ul", "ol", "table", "dl", *HEADINGS)


@dataclass(frozen=True, slots=True)
class Page:
    """A page's Markdown, with its ISO 8601 date and SPDX licence; empty strings if unknown."""

    markdown: str
    date: str
    licence: str


def decode(body: bytes, charset: str) -> str:
    """Return a page's text, decoded by byte order mark, header `charset`, meta element, UTF-8, or detection.

    Raises:
        Unreadable: "undecodable text", if each of them breaks more than one character in a thousand.
    """
    for mark, name in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if body.startswith(mark):
            return _decoded(body[len(mark) :], name) or _undecodable(name)
    declared = META_CHARSET.search(body[:4096])
    names = [charset, declared[1].decode("ascii", "replace") if declared else "", "utf-8"]
    for name in dict.fromkeys(name.lower() for name in names if name):
        text = _decoded(body, BROWSER_NAMES.get(name, name))
        if text is not None:
            return text
    from charset_normalizer import from_bytes

    best = from_bytes(body[:DETECTION_BYTES]).best()
    text = _decoded(body, best.encoding) if best is not None else None
    return text if text is not None else _undecodable(", ".join(name for name in names if name))


def http_date(header: str) -> str:
    """Return the time in an HTTP header, in ISO 8601, or "" if it has none."""
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        said = parsedate_to_datetime(header)
        return (said.astimezone(UTC) if said.tzinfo else said).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ""


def extract(text: str, maximum_elements: int) -> Page:
    """Return the main content of an HTML page as Markdown, with the page's date and licence.

    The Markdown is empty if there is no main content.

    Raises:
        Unreadable: the page has more than `maximum_elements`.
    """
    import trafilatura
    from lxml.etree import LxmlError
    from lxml.html import HTMLParser, document_fromstring

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # its log lines name no page
    parser = HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        tree = document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except LxmlError:  # an empty page
        return Page("", "", "")
    elements = int(tree.xpath("count(//*)"))
    if elements > maximum_elements:
        raise Unreadable("too many elements", f"{elements}, over {maximum_elements}")
    for box in tree.iter():
        if len(box) > INLINE_CHILDREN and sum(child.tag in INLINE for child in box) > INLINE_CHILDREN:
            raise Unreadable("too many elements", f"over {INLINE_CHILDREN} in one paragraph")
    date, licence, title = _date(tree), _licence(tree), _title(tree)
    code = CodeBlocks()
    try:
        code.take_out(tree)
        _prepare(tree)
        found = trafilatura.bare_extraction(
            tree,
            fast=True,
            favor_recall=True,
            include_comments=False,
            include_formatting=True,
            output_format="xml",  # the Markdown is written here
        )
        blocks = [] if found is None or isinstance(found, dict) else written(found.body)  # a dict, where one asks
    except (RecursionError, ValueError) as error:
        raise Unreadable("extraction failed", str(error)[:100]) from error
    return Page(_with_title(code.put_back("\n\n".join(blocks)), title) if blocks else "", date, licence)


def _decoded(body: bytes, name: str) -> str | None:
    try:
        text = body.decode(name, "replace")
    except (LookupError, ValueError):  # unknown, or not a text encoding
        return None
    broken = text.count("\ufffd")
    if broken > BROKEN_SHARE * len(text) and broken > body.count(b"\xef\xbf\xbd"):
        return None
    return CONTROL.sub("", text)


def _undecodable(names: str) -> str:
    raise Unreadable("undecodable text", f"tried {names}")


def _date(tree: "HtmlElement") -> str:
    """Return the date in the page's head, or "": dates in its text may mean anything."""
    from htmldate import find_date

    head = tree.find("head")
    if head is None:
        return ""
    with contextlib.suppress(ValueError, RecursionError):
        return find_date(head, extensive_search=False) or ""
    return ""


def _licence(tree: "HtmlElement") -> str:
    """Return the only licence that a page links to with rel=license, or else at Creative Commons; "" if not unique."""
    own = tree.xpath("//*[self::a or self::link][contains(concat(' ', @rel, ' '), ' license ')]/@href")
    linked = own or tree.xpath("//a[contains(@href, 'creativecommons.org/')]/@href")
    found = {known for address in linked if (known := licence_of_address(address)) is not None}
    return found.pop() if len(found) == 1 else ""


def _title(tree: "HtmlElement") -> str:
    """Return the first h1's text, or the title element's."""
    for path in ("//body//h1", "//head/title"):
        for element in tree.xpath(path):
            title = " ".join(element.text_content().replace("¶", " ").split())
            if title:
                return title[:300]
    return ""


def _with_title(markdown: str, title: str) -> str:
    """Put the title above a text that does not have it as a heading."""
    headings = [line.lstrip("# ") for line in markdown[:4000].splitlines() if line.startswith("#")]
    plain = title.replace("`", "").casefold()
    if not title or any(plain == heading.replace("`", "").replace("*", "").casefold() for heading in headings):
        return markdown
    return f"# {title}\n\n{markdown}"


def _prepare(tree: "HtmlElement") -> None:
    """Prepare a tree for trafilatura: one frame, plain headings, terms as paragraphs, only genuine tables."""
    for element in [*tree.iter("samp", "kbd", "tt"), *tree.xpath("//span[contains(@class, 'literal')]")]:
        element.tag = "code"
    for element in list(tree.iter("code")):
        _flatten(element)
    for anchor in tree.xpath(
        "//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5 or self::h6 or self::dt]//a"
    ):
        if (anchor.text_content() or "").strip() in PERMALINKS:
            anchor.drop_tree()
    for heading in list(tree.iter(*HEADINGS)):
        _lift(heading)
    _frame(tree)
    for element in list(tree.iter("dl", "dd")):
        element.tag = "div"
        element.attrib.clear()
    for term in list(tree.iter("dt")):
        term.tag = "p"
        term.attrib.clear()
    for table in reversed(list(tree.iter("table"))):  # innermost first
        if _is_layout(table):
            _unwrap(table)
    for box in list(tree.iter("div", "section", "article", "details", "center")):
        _wrap_text(box)


def _wrap_text(box: "HtmlElement") -> None:
    """Wrap loose text between the blocks of a box in paragraphs: trafilatura loses parts of it."""
    paragraph = None
    if (box.text or "").strip():
        paragraph = box.makeelement("p")
        paragraph.text, box.text = box.text, None
        box.insert(0, paragraph)
    for child in list(box):
        if child is paragraph:
            continue
        if child.tag in INLINE and (paragraph is not None or "".join(child.itertext()).strip()):
            if paragraph is None:
                paragraph = box.makeelement("p")
                child.addprevious(paragraph)
            paragraph.append(child)  # with its tail
        elif child.tag not in INLINE:
            paragraph = None
            if (child.tail or "").strip():
                paragraph = box.makeelement("p")
                paragraph.text, child.tail = child.tail, None
                child.addnext(paragraph)


def _flatten(code: "HtmlElement") -> None:
    """Reduce inline code to its text: emphasis marks within it would read as part of it."""
    text = code.text_content()
    for child in list(code):
        code.remove(child)
    code.text = text


def _frame(tree: "HtmlElement") -> None:
    """Make the page's main part its only article, and remove names for which trafilatura would drop content.

    Without a known frame, trafilatura gathers loose paragraphs and drops headings. It also drops elements named after
    buttons, menus, tags, sharing; in generated documentation an id is a heading ("shared-memory").
    """
    body = tree.find("body")
    if body is None:
        return
    main = next((found[0] for path in MAIN_PARTS if (found := body.xpath(path)) and len(found) == 1), body)
    for element in list(main.iter("article", "main", "blockquote")):
        if element.tag != "blockquote" or next(element.iterdescendants(*BLOCKS_IN_QUOTES), None) is not None:
            element.tag = "div"  # quotations lose their blocks; most of these only indent
    for element in main.iter("p", "span", "li", "section", "table", "td", "th", "tr", *HEADINGS):
        for name in ("id", "class"):
            element.attrib.pop(name, None)
    for heading in list(main.iter(*HEADINGS)):
        heading.getparent().attrib.pop("id", None)
    frame = tree.makeelement("article")
    head = _head_before(main)
    if head is None:
        frame.text = main.text
    else:
        frame.append(head)
        head.tail = main.text
    frame.extend(list(main))
    for child in list(body):
        body.remove(child)
    body.text = None
    body.append(frame)


def _head_before(main: "HtmlElement") -> "HtmlElement | None":
    """Return the box just before the main part if the page's first heading is there, not in the main part."""
    box = main.getprevious()
    if box is None or next(main.iter("h1"), None) is not None or next(box.iter("h1"), None) is None:
        return None
    if sum(map(len, box.itertext())) > HEAD_CHARACTERS or next(box.iter("nav", "form"), None) is not None:
        return None
    if box.tag != "h1":
        box.tag = "div"
    for element in box.iter():
        element.attrib.clear()
    for contents in box.xpath(".//div[.//li/a]"):
        contents.drop_tree()
    return box


def _lift(heading: "HtmlElement") -> None:
    """Replace the boxes that contain only a heading by it: trafilatura drops boxes named after titles."""
    for _ in range(5):
        box = heading.getparent()
        if box is None or box.tag not in ("div", "header", "hgroup", "span", "a") or box.getparent() is None:
            return
        if (box.text or "").strip() or (heading.tail or "").strip():
            return
        if any("".join(other.itertext()).strip() for other in box if other is not heading):
            return
        heading.tail, box.tail = box.tail, None
        box.getparent().replace(box, heading)


def _is_layout(table: "HtmlElement") -> bool:
    """Return whether a table is only layout: blocks in its cells, or fewer than two rows with two filled cells."""
    if next(table.iter("ul", "ol", *HEADINGS), None) is not None or table.xpath(".//table | .//*[@data-code]"):
        return True
    filled = (sum(1 for cell in row if "".join(cell.itertext()).strip()) for row in table.iter("tr"))
    return sum(1 for count in filled if count > 1) < 2


def _unwrap(table: "HtmlElement") -> None:
    for element in list(table.iter("table", "thead", "tbody", "tfoot", "tr", "td", "th", "caption", "colgroup", "col")):
        inline = all(child.tag in INLINE for child in element) and element.tag in ("td", "th", "caption")
        element.tag = "p" if inline else "div"
        element.attrib.clear()
