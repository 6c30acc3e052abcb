"""Bibliographic records of computer science: the DBLP dump, streamed."""

import html.entities
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from data_pipeline.documents import Problems
from data_pipeline.sources.json_lines import allowed_bytes, open_bytes

if TYPE_CHECKING:
    from lxml import etree

CHUNK_BYTES = 1 << 20
RECORD_BYTES = 16 * 1024 * 1024  # enough for the longest list of authors
PAPERS = ("article", "inproceedings")
OTHERS = ("proceedings", "book", "incollection", "phdthesis", "mastersthesis", "www", "person", "data")
XML_ENTITIES = (b"amp", b"lt", b"gt", b"quot", b"apos")
DOCTYPE = re.compile(rb"<!DOCTYPE\s[^>\[]*>")
ENTITY = re.compile(rb"&([A-Za-z][A-Za-z0-9]{1,30});")
DOI = re.compile(r"(?:doi\.org/|^doi:\s*|^)(10\.\d{4,9}/\S+)", re.IGNORECASE)
ARXIV = re.compile(r"arxiv\.org/(?:abs|pdf)/([a-z-]+(?:\.[A-Z]{2})?/\d{7}|\d{4}\.\d{4,5})", re.IGNORECASE)


class XMLRefused(ValueError):
    """A document that declares its own entities, or has a record over the size limit."""


def dblp_records(path: Path, wanted: Callable[[str], bool], problems: Problems) -> Iterator[dict]:
    """Yield the papers of dblp.xml or dblp.xml.gz with wanted keys: key, title, venue, year, number, links.

    The dump's DTD is never loaded: its named characters are HTML's, and are resolved here. A file that declares
    entities itself, or is truncated, is reported to `problems` after the records before that point. Memory is bounded.
    """
    from lxml import etree

    parser = etree.XMLPullParser(("end",), tag=PAPERS + OTHERS, resolve_entities=False, load_dtd=False, no_network=True)
    offset = unfinished = 0
    try:
        allowed = allowed_bytes(path)
        with open_bytes(path) as stream:
            for chunk in _without_entities(stream):
                offset += len(chunk)
                unfinished += len(chunk)
                parser.feed(chunk)
                for _, element in parser.read_events():
                    unfinished = 0
                    if element.tag in PAPERS and wanted(element.get("key", "")):
                        yield _record(element)
                    while element.getprevious() is not None:
                        del element.getparent()[0]
                if offset > allowed:
                    raise XMLRefused("it expands too far to be a dump")
                if unfinished > RECORD_BYTES:
                    raise XMLRefused(f"no record ends within {RECORD_BYTES:,} bytes")
        parser.close()
    except XMLRefused as error:
        problems.skip(f"{path}: near byte {offset}", "refused XML", str(error))
    except etree.XMLSyntaxError as error:
        problems.skip(f"{path}: near byte {offset}", "broken XML", " ".join(str(error).split())[:200])
    except OSError as error:
        problems.skip(f"{path}: near byte {offset}", "corrupt file", str(error.strerror or error))


def _without_entities(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream in chunks, without its DOCTYPE, with named characters replaced by numeric references."""
    pending = b""
    at_start = True
    while chunk := stream.read(CHUNK_BYTES):
        chunk = pending + chunk
        if at_start:
            chunk, at_start = DOCTYPE.sub(b"", chunk, count=1), False
        # The end of a chunk may cut an entity reference or a declaration.
        cut = max(chunk.rfind(b"&", -40), chunk.rfind(b"<", -40))
        chunk, pending = (chunk[:cut], chunk[cut:]) if cut > 0 else (chunk, b"")
        yield _resolved(chunk)
    if pending:
        yield _resolved(pending)


def _resolved(chunk: bytes) -> bytes:
    if b"<!ENTITY" in chunk or b"<!DOCTYPE" in chunk:
        raise XMLRefused("it declares entities of its own")
    return ENTITY.sub(_character, chunk)


def _character(match: re.Match) -> bytes:
    name = match[1]
    if name in XML_ENTITIES:
        return match[0]
    code = html.entities.name2codepoint.get(name.decode())
    return b"&#%d;" % code if code else b"&#xFFFD;"  # an unknown name costs one character, not the file


def _record(element: "etree._Element") -> dict:
    found: dict[str, str] = {}
    links: list[str] = []
    for child in element:
        if child.tag == "ee" and child.text:
            links.append(child.text.strip())
        elif child.tag in ("title", "booktitle", "journal", "year", "number") and child.tag not in found:
            found[child.tag] = " ".join("".join(child.itertext()).split())  # titles contain <i>, <sub>, <sup>
    return {
        "key": element.get("key", ""),
        "title": found.get("title", "").removesuffix("."),
        "venue": found.get("booktitle") or found.get("journal", ""),
        "year": found.get("year"),
        "number": found.get("number", ""),
        "links": links,
    }


def doi_in(text: str) -> str | None:
    """Return the DOI in a link or an identifier, in lower case, or None."""
    match = DOI.search(text.strip())
    return match[1].lower() if match else None


def arxiv_in(link: str) -> str | None:
    """Return the arXiv id in a link, without its version, or None."""
    match = ARXIV.search(link)
    return match[1] if match else None
