"""One web page to Markdown: trafilatura chooses the main content; code blocks, tables and headings come through whole.

trafilatura is made for articles, and breaks preformatted text at each element in it. So a page's code blocks are taken
out of the tree before and put back after.
"""

import contextlib
import logging
import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from data_pipeline.licences import licence_of_address
from data_pipeline.markup.html.code_blocks import CodeBlocks
from data_pipeline.markup.html.trafilatura_markdown import written

if TYPE_CHECKING:
    from lxml.html import HtmlElement

META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
# What browsers read under these names (WHATWG's encodings), which is what pages that use them are written in.
BROWSER_NAMES = {
    "iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252", "us-ascii": "cp1252",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "shift-jis": "cp932", "euc-kr": "cp949",
    "iso-8859-9": "cp1254", "utf8": "utf-8", "utf-16": "utf-16-le",
}  # fmt: skip
# Characters that XML has not, raw or as references: lxml reads them from HTML, and refuses to write them.
CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffd\ufffe\uffff]"
    "|&#(?:0*(?:[0-8]|1[124-9]|2[0-9]|3[01])(?![0-9])|[xX]0*(?:1?[0-8]|1?[bcefBCEF]|1[9adAD])(?![0-9a-fA-F]));?"
)
DETECTION_BYTES = 64 * 1024
BROKEN_SHARE = 0.001  # of characters; more than this is another encoding, or no text at all
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
INLINE_NAMES = (
    "a abbr b bdi bdo big br cite code del dfn em font i img ins kbd mark q s samp small span strike strong sub sup"
    " tt u var wbr"
)
INLINE = frozenset(INLINE_NAMES.split())
PERMALINKS = ("", "¶", "#", "§", "🔗", "\uf0c1")
# Where a page's main part is: the first of these that it has exactly one of.
MAIN_PARTS = (
    ".//*[@role='main']",
    ".//main",
    ".//article",
    ".//*[@itemprop='articleBody']",
    ".//*[@id='content' or @id='main-content' or @id='page-content' or @id='mw-content-text']",
    ".//*[@id='main']",
)
INLINE_CHILDREN = 5000  # trafilatura's time grows with the square of these: a second or so for this many
HEAD_CHARACTERS = 4000
BLOCKS_IN_QUOTES = ("blockquote", "div", "pre", "ul", "ol", "table", "dl", *HEADINGS)


class UnusablePage(ValueError):
    """A page without a document in it. `kind` is a few words to count it under, `detail` says more."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Page:
    """A page's Markdown, and what it says of itself: ISO 8601 date and SPDX licence, empty where it does not."""

    markdown: str
    date: str
    licence: str


def decode(body: bytes, charset: str) -> str:
    """Return a page's text, by its byte order mark, the header's `charset`, its meta element, UTF-8, or detection.

    Raises UnusablePage("undecodable text") where more than one character in a thousand is broken in each of them.
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
    """Return the time in an HTTP header, in ISO 8601, or an empty string where it holds none."""
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        said = parsedate_to_datetime(header)
        return (said.astimezone(UTC) if said.tzinfo else said).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ""


def extract(text: str, maximum_elements: int) -> Page:
    """Return the main content of an HTML page as Markdown, with its own date and licence.

    The Markdown is empty where the page has none. Raises UnusablePage for one of more than `maximum_elements`.
    """
    import trafilatura
    from lxml.etree import LxmlError
    from lxml.html import HTMLParser, document_fromstring

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # its lines name no page
    parser = HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        tree = document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except LxmlError:  # nothing in it
        return Page("", "", "")
    elements = int(tree.xpath("count(//*)"))
    if elements > maximum_elements:
        raise UnusablePage("too many elements", f"{elements}, over {maximum_elements}")
    for box in tree.iter():
        if len(box) > INLINE_CHILDREN and sum(child.tag in INLINE for child in box) > INLINE_CHILDREN:
            raise UnusablePage("too many elements", f"over {INLINE_CHILDREN} in one paragraph")
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
            output_format="xml",  # we write the text ourselves
        )
        blocks = written(found.body) if found is not None else []
    except (RecursionError, ValueError) as error:
        raise UnusablePage("extraction failed", str(error)[:100]) from error
    return Page(_with_title(code.put_back("\n\n".join(blocks)), title) if blocks else "", date, licence)


def _decoded(body: bytes, name: str) -> str | None:
    try:
        text = body.decode(name, "replace")
    except (LookupError, ValueError):  # no such encoding, or one that is no text encoding
        return None
    broken = text.count("\ufffd")
    if broken > BROKEN_SHARE * len(text) and broken > body.count(b"\xef\xbf\xbd"):
        return None
    return CONTROL.sub("", text)


def _undecodable(names: str) -> str:
    raise UnusablePage("undecodable text", f"tried {names}")


def _date(tree: "HtmlElement") -> str:
    """Return the day that the page's head gives, or an empty string: dates in its text may be any."""
    from htmldate import find_date

    head = tree.find("head")
    if head is None:
        return ""
    with contextlib.suppress(ValueError, RecursionError):
        return find_date(head, extensive_search=False) or ""
    return ""


def _licence(tree: "HtmlElement") -> str:
    """Return the one licence that a page links to as its own, or to Creative Commons' text of it."""
    own = tree.xpath("//*[self::a or self::link][contains(concat(' ', @rel, ' '), ' license ')]/@href")
    linked = own or tree.xpath("//a[contains(@href, 'creativecommons.org/')]/@href")
    found = {licence_of_address(address) for address in linked} - {None}
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
    """Give trafilatura one frame, plain headings, terms as paragraphs, and only those tables that are tables."""
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
    for table in reversed(list(tree.iter("table"))):  # inner ones first
        if _is_layout(table):
            _unwrap(table)
    for box in list(tree.iter("div", "section", "article", "details", "center")):
        _wrap_text(box)


def _wrap_text(box: "HtmlElement") -> None:
    """Put text that lies in a box between its blocks into paragraphs: trafilatura loses pieces of it."""
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
    """Leave only the text of inline code: marks of emphasis within it would read as part of it."""
    text = code.text_content()
    for child in list(code):
        code.remove(child)
    code.text = text


def _frame(tree: "HtmlElement") -> None:
    """Make the page's main part its only article, and take away names by which trafilatura would drop content.

    Without a frame that it knows, trafilatura gathers loose paragraphs and leaves headings out. It also drops what is
    named after buttons, menus, tags, sharing: in generated documentation an id is a heading ("shared-memory").
    """
    body = tree.find("body")
    if body is None:
        return
    main = next((found[0] for path in MAIN_PARTS if (found := body.xpath(path)) and len(found) == 1), body)
    for element in list(main.iter("article", "main", "blockquote")):
        if element.tag != "blockquote" or next(element.iterdescendants(*BLOCKS_IN_QUOTES), None) is not None:
            element.tag = "div"  # a quotation with blocks in it loses them; most are there to indent
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
    """Return the box right before the main part when the page's first heading is there, not in the main part."""
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
    """Put a heading in place of the boxes that hold nothing else: trafilatura drops those named after titles."""
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
    """Whether a table has blocks in its cells, or no two rows with two cells each: a box around text, or a note."""
    if next(table.iter("ul", "ol", *HEADINGS), None) is not None or table.xpath(".//table | .//*[@data-code]"):
        return True
    filled = (sum(1 for cell in row if "".join(cell.itertext()).strip()) for row in table.iter("tr"))
    return sum(1 for count in filled if count > 1) < 2


def _unwrap(table: "HtmlElement") -> None:
    for element in list(table.iter("table", "thead", "tbody", "tfoot", "tr", "td", "th", "caption", "colgroup", "col")):
        inline = all(child.tag in INLINE for child in element) and element.tag in ("td", "th", "caption")
        element.tag = "p" if inline else "div"
        element.attrib.clear()
