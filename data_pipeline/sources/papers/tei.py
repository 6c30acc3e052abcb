"""Papers as TEI XML, GROBID's output format."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.documents import Unreadable
from data_pipeline.sources.json_lines import open_bytes
from data_pipeline.sources.papers.dblp import doi_in
from data_pipeline.sources.papers.papers import NUMERIC, licence_of, year_in

if TYPE_CHECKING:
    from lxml import etree

NAMESPACE = "{http://www.tei-c.org/ns/1.0}"
FILE_BYTES = 32 * 1024 * 1024  # a book of 1,000 pages takes a tenth
CUT = ("formula", "figure", "table", "graphic", "listBibl", "note", "biblStruct")
SPACE_BEFORE = re.compile(r"\s+([.,;:)])")


@dataclass(frozen=True, slots=True)
class TEIPaper:
    """A paper's title, year, DOI and arXiv id as far as the header has them, and its text with Markdown headings."""

    title: str
    year: int | None
    keys: tuple[str, ...]
    licence: str | None
    text: str


def read_tei(path: Path, with_text: bool = True) -> TEIPaper:
    """Return a paper from a TEI file (also .gz and .zst), without bibliography, formulae, figures and notes.

    Raises:
        Unreadable: the file is over 32 MiB, broken, not TEI, or declares entities.
    """
    from lxml import etree

    try:
        with open_bytes(path) as stream:
            content = stream.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise Unreadable("refused XML", f"over {FILE_BYTES:,} bytes")
        parser = etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True, remove_comments=True)
        root = etree.fromstring(content, parser)
        declared = root.getroottree().docinfo.internalDTD
    except etree.XMLSyntaxError as error:
        raise Unreadable("broken XML", " ".join(str(error).split())[:200]) from None
    except OSError as error:
        raise Unreadable("corrupt file", str(error.strerror or error)) from None
    if declared is not None and next(declared.iterentities(), None) is not None:
        raise Unreadable("refused XML", "it declares entities of its own")
    if etree.QName(root).localname != "TEI":
        raise Unreadable("not TEI", f"its root is <{etree.QName(root).localname}>")
    for element in root.iter(f"{NAMESPACE}*"):  # drop the namespace, so that files with and without it look alike
        element.tag = etree.QName(element).localname
    header = root.find("teiHeader")
    if header is None:
        raise Unreadable("not TEI", "no <teiHeader>")
    return _paper(root, header, with_text)


def _paper(root: "etree._Element", header: "etree._Element", with_text: bool) -> TEIPaper:
    source = header.find(".//sourceDesc")
    identifiers = {(node.get("type") or "").lower(): _words(node) for node in header.iterfind(".//idno")}
    arxiv = re.search(r"\d{4}\.\d{4,5}|[a-z-]+(?:\.[A-Z]{2})?/\d{7}", identifiers.get("arxiv", ""))
    keys = {"doi": doi_in(identifiers.get("doi", "")), "arxiv": arxiv and arxiv[0]}
    title = header.find("fileDesc/titleStmt/title")
    date = source.find(".//date[@when]") if source is not None else None
    licence = header.find(".//availability/licence")
    title = _words(title) if title is not None else ""
    return TEIPaper(
        title=title,
        year=year_in(date.get("when")) if date is not None else None,
        keys=tuple(f"{kind}:{value}" for kind, value in keys.items() if value),
        licence=licence_of(licence.get("target") or _words(licence)) if licence is not None else None,
        text=_text(root, header) if with_text else "",
    )


def _text(root: "etree._Element", header: "etree._Element") -> str:
    from lxml import etree

    divisions = root.findall("text/body") + root.findall("text/back/div[@type='annex']")
    abstract = header.find("profileDesc/abstract")
    parts: list[str] = []
    if abstract is not None:
        parts += filter(None, (_paragraph(node) for node in abstract.iter("p", "ab")))
        if parts:
            parts.insert(0, "## Abstract")
    for division in divisions:
        etree.strip_elements(division, *CUT, with_tail=False)
        for node in division.iter("head", "p", "list"):
            if next(node.iterancestors("list"), None) is not None:
                continue  # written with its list
            if node.tag == "list":
                parts += (f"- {item}" for item in map(_paragraph, node.findall("item")) if item)
            elif node.tag == "p":
                parts.append(_paragraph(node))
            elif words := _words(node):
                number = (node.get("n") or "").rstrip(".")
                parts.append(f"{'#' * min(number.count('.') + 2, 6)} {words}")
    return "\n\n".join(_with_content(list(filter(None, parts))))


def _with_content(parts: list[str]) -> list[str]:
    """Drop trailing headings without text: of figures, of a bibliography."""
    while parts and parts[-1].startswith("#"):
        parts.pop()
    return parts


def _paragraph(node: "etree._Element") -> str:
    """Return a paragraph's words, without purely numeric citations."""
    for reference in node.iterfind(".//ref[@type='bibr']"):
        if NUMERIC.fullmatch("".join(reference.itertext())):
            reference.text = None
            for child in list(reference):
                reference.remove(child)
    return SPACE_BEFORE.sub(r"\1", _words(node))


def _words(node: "etree._Element") -> str:
    return " ".join("".join(node.itertext()).split())
