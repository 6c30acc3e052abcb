"""Web pages in WARC files: pages of an allow-list of sites, as Markdown with code and tables intact."""

import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems, Unreadable
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.sources.index_file import new_index, open_index
from data_pipeline.sources.parts import SourceInParts
from data_pipeline.sources.paths import as_list, named_files, plain
from data_pipeline.sources.web.sites import Sites
from data_pipeline.sources.web.warc import HEADER_BYTES
from data_pipeline.workers import available_processes, ordered_map

if TYPE_CHECKING:
    from data_pipeline.sources.web.warc import Capture

log = logging.getLogger(__name__)

ENDINGS = (".warc", ".warc.gz")
HTML = ("text/html", "application/xhtml+xml")
PLAIN = "text/plain"
INDEX = "web.sqlite"
ADDRESS_CHARACTERS = 2000
MINIMUM_CHARACTERS = 100  # shorter pages are a title and a menu


@dataclass(frozen=True)
class Web(SourceInParts):
    """Pages of the `sites` (category -> list of hosts or host/paths, see `Sites`) in WARC files.

    `paths`: a .warc or .warc.gz file, a folder, a glob, or a list of these: from Common Crawl, wget, warcio. Records
    read: responses with status 200, and resources, of HTML or plain text. Of several captures of one URL the first is
    kept, over all files in name order. A page over `max_page_bytes`, stored or expanded, or with more than
    `max_page_elements`, is reported and skipped: both bound the time and memory for one page.
    """

    paths: str | list[str]
    sites: Mapping[str, Sequence[str]]
    max_page_bytes: int = 4 * 1024 * 1024
    max_page_elements: int = 100_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", plain(self.paths))
        if not isinstance(self.sites, Mapping):
            raise SettingError("sites", self.sites, "give a mapping, as in {design: [lwn.net]}")
        lists = {str(name): sites if isinstance(sites, str) else list(sites) for name, sites in self.sites.items()}
        object.__setattr__(self, "sites", lists)
        Sites(lists)
        for name in ("max_page_bytes", "max_page_elements"):
            check_number(name, getattr(self, name), least=1)

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, the extractor's version, and the content of every file."""
        return {
            "web": settings_identity(self, by, "paths"),
            "trafilatura": version("trafilatura"),
            "files": file_identity(self.files(), by),
        }

    def files(self) -> list[Path]:
        """Return the WARC files, sorted; raise ValueError, naming `paths`, if there are none."""
        named = {file for path in as_list(self.paths) for file in named_files(path)}
        found = sorted(file for file in named if file.name.lower().endswith(ENDINGS))
        if not found:
            raise SettingError("paths", self.paths, f"give {' '.join(ENDINGS)} files", "matches no WARC file")
        return found

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Write the index of wanted pages into `scratch`; several processes read each file once.

        The cost is mostly decompression. `read` then reads only the wanted pages, and the first capture of a URL is
        known over all files.
        """
        if (scratch / INDEX).exists():
            return
        with new_index(scratch / INDEX) as database:
            database.execute("CREATE TABLE seen (address BLOB PRIMARY KEY) WITHOUT ROWID")
            database.execute("CREATE TABLE pages (file INTEGER, place INTEGER, category TEXT)")
            files = self.files()
            scans = ordered_map(
                partial(_Scanner, self, scratch), enumerate(files), min(available_processes(), len(files))
            )
            for number, (path, scan) in enumerate(zip(files, scans, strict=True)):
                _merge(database, number, path, scan, problems)
            database.execute("CREATE INDEX by_file ON pages (file, place)")

    def parts(self, scratch: Path) -> list[str]:
        """Return one part per file."""
        return [str(path) for path in self.files()]

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the wanted pages of a WARC file; broken ones are reported to `problems` by file and offset."""
        number, path, thin = self.parts(scratch).index(part), Path(part), 0
        with open_index(scratch / INDEX) as database:
            query = "SELECT place, category FROM pages WHERE file = ? ORDER BY place"
            for place, category in database.execute(query, (number,)):
                document = self._page(path, place, category, problems)
                if document is not None and len(document.text) >= MINIMUM_CHARACTERS:
                    yield document
                elif document is not None:
                    thin += 1
        if thin:
            log.info("%s: %d pages left out that have under %d characters", part, thin, MINIMUM_CHARACTERS)

    def _page(self, path: Path, place: int, category: str, problems: Problems) -> Document | None:
        """Return the page of the record at byte `place`; report an unreadable one and return None."""
        from data_pipeline.markup.html.web_page import decode, extract, http_date
        from data_pipeline.sources.web.warc import captures, payload

        url = ""
        try:
            with contextlib.closing(captures(path, place)) as items:  # keeps the file open while its page is read
                capture = next(items)
                if isinstance(capture, tuple):
                    raise capture[1]
                url = capture.url
                text = decode(payload(capture, self.max_page_bytes), capture.charset)
            if capture.media_type == PLAIN:
                text, about = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n"), {}
            else:
                page = extract(text, self.max_page_elements)
                text, about = page.markdown, {"date": page.date, "licence": page.licence}
        except Unreadable as error:
            problems.skip(f"{path}: offset {place}", error.kind, ", ".join(filter(None, (error.detail, url))))
            return None
        metadata = {"source": "web", "category": category, "origin": f"{path}: offset {place}", "url": url, **about}
        metadata["date"] = metadata.get("date") or http_date(capture.last_modified)
        return Document(text, f"web:{url}", {name: value for name, value in metadata.items() if value})


class _Scanner:
    """Scanner of one WARC file: writes its wanted and its broken records as JSON lines."""

    def __init__(self, source: Web, scratch: Path) -> None:
        self.source, self.scratch, self.sites = source, scratch, Sites(source.sites)

    def __call__(self, item: tuple[int, Path]) -> Path:
        """Return the path of the scan of a file, which is named by the file's number."""
        number, path = item
        scan = self.scratch / f"web-{number}.jsonl"
        with scan.open("w", encoding="utf-8") as lines:
            for place, url, category, problem in self._records(path):
                lines.write(json.dumps([place, url, category, problem]) + "\n")
        return scan

    def _records(self, path: Path) -> Iterator[tuple[int, str, str, list[str]]]:
        """Yield (place, url, category, []) for a wanted record, (place, "", "", problem) for a broken one."""
        from data_pipeline.sources.web.warc import Capture, captures

        pending: tuple | None = None  # the next item shows whether a record is complete
        try:
            for item in captures(path):
                if isinstance(item, Capture):
                    if pending:
                        yield pending
                    pending = self._wanted(item)
                    continue
                place, error = item
                if pending and pending[0] != place:
                    yield pending
                pending = None
                yield place, "", "", [error.kind, error.detail]
        except OSError as error:
            yield 0, "", "", ["unreadable file", str(error.strerror or error)]
        if pending:
            yield pending

    def _wanted(self, capture: "Capture") -> tuple[int, str, str, list[str]] | None:
        """Filter a record by its headers: URL, status, media type and length."""
        if capture.status != 200 or capture.media_type not in (*HTML, PLAIN):
            return None
        category = self.sites.category(capture.url)
        if category is None:
            return None
        if len(capture.url) > ADDRESS_CHARACTERS:
            return capture.offset, "", "", ["address too long", f"{len(capture.url)} characters"]
        if capture.length > self.source.max_page_bytes + HEADER_BYTES:
            return capture.offset, "", "", ["page too large", f"{capture.length} bytes, {capture.url}"]
        return capture.offset, capture.url, category, []


def _merge(database: sqlite3.Connection, number: int, path: Path, scan: Path, problems: Problems) -> None:
    """Add the new URLs of a file's scan to the index, report its problems, and remove the scan."""
    with scan.open(encoding="utf-8") as lines:
        for line in lines:
            place, url, category, problem = json.loads(line)
            if problem:
                problems.skip(f"{path}: offset {place}", *problem)
                continue
            address = url.partition("#")[0].partition("://")[2]  # http and https are the same page
            digest = hashlib.sha256(address.encode("utf-8", "surrogatepass")).digest()[:16]
            if database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount:
                database.execute("INSERT INTO pages VALUES (?, ?, ?)", (number, place, category))
    scan.unlink()
