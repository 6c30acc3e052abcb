"""Text of papers in PDF, read by pypdf in a separate process: a hostile file can only harm that process."""

import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.documents import Unreadable
from data_pipeline.sources.papers.dblp import doi_in
from data_pipeline.sources.papers.papers import without_bibliography

FILE_BYTES = 128 * 1024 * 1024
MEMORY_BYTES = 2 * 1024**3
PAGES = 200
CHARACTERS = 4 * 1024 * 1024
SERVE = "from data_pipeline.sources.papers.pdf import serve; serve()"
EDGE_LINES = 2  # at the top and bottom of a page, where running heads and page numbers are
DOI_ON_PAGE = re.compile(r"\b10\.\d{4,9}/[^\s\"<>,;]+")
PAGE_NUMBER = re.compile(r"[-–—\s]*(?:page\s*)?\d{1,5}(?:\s*(?:of|/)\s*\d{1,5})?[-–—\s]*|[ivxlc]{1,6}", re.IGNORECASE)
HEADING = re.compile(
    r"(?:\d{1,2}(?:\.\d{1,2})*\.?\s+[A-Z]|[IVX]{1,5}\.\s+[A-Z]|(?i:abstract|acknowledge?ments?|appendix\b.{0,60})$)"
)
BULLETS = ("•", "▪", "‣")
BROKEN_WORD = re.compile(r"\W*([^\W\d_]+(?:-[^\W\d_]+)*)-")
WORD_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class PDFPaper:
    """Title and DOI that a PDF states, and its pages as text."""

    title: str
    doi: str | None
    pages: list[str]


def read_pdf(path: Path, pages: int = PAGES, seconds: float = 120) -> PDFPaper:
    """Return the text of at most `pages` pages of a PDF.

    Raises:
        Unreadable: it is encrypted, broken, without text, over 128 MiB, or needs more than `seconds` of CPU time,
            twice that wall time, or 2 GiB of memory.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise Unreadable("unreadable file", str(error.strerror)) from None
    if size > FILE_BYTES:
        raise Unreadable("PDF too large", f"over {FILE_BYTES:,} bytes")
    request = json.dumps({"path": str(path), "pages": pages, "seconds": seconds})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    try:
        child = subprocess.run(
            [sys.executable, "-c", SERVE],
            input=request.encode(errors="surrogateescape"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=2 * seconds,
        )
    except subprocess.TimeoutExpired:
        raise Unreadable("PDF takes too long", f"over {2 * seconds:g} s") from None
    try:
        answer = json.loads(child.stdout)
    except ValueError:  # the process was killed by a limit, or crashed
        raise Unreadable("PDF takes too much", f"its reader ended with status {child.returncode}") from None
    if "kind" in answer:
        raise Unreadable(answer["kind"], answer["detail"])
    return PDFPaper(answer["title"], answer["doi"], answer["pages"])


def serve() -> None:
    """Read one PDF in this process: a JSON request on standard input, a JSON answer on standard output."""
    import resource

    request = json.load(sys.stdin)
    cpu_seconds = max(1, int(request["seconds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = _extract(request["path"], request["pages"])
    except Unreadable as error:
        answer = {"kind": error.kind, "detail": error.detail}
    except MemoryError:
        answer = {"kind": "PDF takes too much", "detail": "memory"}
    except Exception as error:  # pypdf raises many types for broken content: KeyError, TypeError, RecursionError
        answer = {"kind": "broken PDF", "detail": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    json.dump(answer, sys.stdout)


def _extract(path: str, limit: int) -> dict:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    reader = PdfReader(path)
    if reader.is_encrypted:
        try:
            opened: int = reader.decrypt("")  # many PDFs have only an owner password
        except (DependencyError, NotImplementedError):
            opened = 0
        if not opened:
            raise Unreadable("encrypted PDF")
    pages: list[str] = []
    characters = 0
    for page in reader.pages:
        if len(pages) >= limit or characters > CHARACTERS:
            break
        text = page.extract_text().encode(errors="replace").decode().replace("\0", "")
        characters += len(text)
        pages.append(text[:CHARACTERS])
    if not characters:
        raise Unreadable("no text in PDF", "scanned?")
    about: Mapping[str, Any] = reader.metadata or {}
    title = about.get("/Title")
    doi = doi_in(str(about.get("/doi") or about.get("/WPS-ARTICLEDOI") or ""))
    on_page = DOI_ON_PAGE.search(pages[0][:20000])
    return {
        "title": str(title) if title else "",
        "doi": doi or (on_page[0].rstrip(".)]").lower() if on_page else None),
        "pages": pages,
    }


def running_text(pages: list[str]) -> str:
    """Return the pages as one text, in pypdf's order of columns.

    Running heads and page numbers are dropped, lines joined into paragraphs, hyphenated words rejoined, headings
    written as Markdown, and the bibliography is removed.
    """
    lines = [line for page in _without_furniture(pages) for line in page]
    text = without_bibliography("\n".join(lines))
    return "\n\n".join(_paragraphs(text.split("\n")))


def _without_furniture(pages: list[str]) -> list[list[str]]:
    """Return each page's lines without edge lines that other pages repeat, apart from digits."""
    split = [[" ".join(line.split()) for line in page.splitlines() if line.strip()] for page in pages]
    edges = Counter(form for lines in split for form in {_form(line) for line in _edge(lines)})
    enough = 2 if len(pages) < 6 else 3  # a head may belong to a chapter, or only to left pages

    def furniture(line: str) -> bool:
        return bool(PAGE_NUMBER.fullmatch(line)) or edges[_form(line)] >= enough

    kept = []
    for lines in split:
        inside = slice(EDGE_LINES, max(EDGE_LINES, len(lines) - EDGE_LINES))
        head = [line for line in lines[: inside.start] if not furniture(line)]
        tail = [line for line in lines[inside.stop :] if not furniture(line)]
        kept.append(head + lines[inside] + tail)
    return kept


def _edge(lines: list[str]) -> list[str]:
    return lines[:EDGE_LINES] + lines[-EDGE_LINES:]


def _form(line: str) -> str:
    return re.sub(r"\d+", "#", line.casefold())


def _paragraphs(lines: list[str]) -> list[str]:
    """Join lines: a paragraph ends at a short line that ends a sentence, before a bullet, and around headings."""
    full = [len(line) for line in lines if len(line) > 20]
    usual = statistics.median(full) if full else 0
    vocabulary = Counter(word for line in lines for word in re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*", line)[:-1])
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        heading = len(line) < 0.8 * max(usual, 60) and HEADING.match(line) and not line.endswith((".", ",", ";"))
        if heading or not line:
            paragraphs += [[f"## {line}"] if line else [], []]
            continue
        if line.startswith(BULLETS):
            paragraphs.append([])
        _add_line(paragraphs[-1], line, vocabulary)
        if len(line) < 0.8 * usual and line.endswith((".", "?", "!")):
            paragraphs.append([])
    return ["".join(pieces) for pieces in paragraphs if pieces]


def _add_line(pieces: list[str], line: str, vocabulary: Counter[str]) -> None:
    """Add a line to a paragraph's pieces.

    A hyphen at the end of the previous line stays if the document writes the word with it elsewhere, or the word has
    another hyphen.
    """
    last_word = pieces[-1].rpartition(" ")[2][-WORD_CHARACTERS:] if pieces else ""
    broken = BROKEN_WORD.fullmatch(last_word)
    following = re.match(r"[^\W\d_]+", line)
    if not broken or not following or not line[0].islower():
        pieces.append(f" {line}" if pieces else line)
        return
    first, second = broken[1], following[0]
    hyphenated, whole = vocabulary[f"{first}-{second}"], vocabulary[f"{first}{second}"]
    if not (hyphenated > whole or (hyphenated == whole and "-" in first)):
        pieces[-1] = pieces[-1][:-1]
    pieces.append(line)
