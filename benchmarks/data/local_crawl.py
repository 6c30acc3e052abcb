"""Turn a folder of HTML documentation into a crawl: `python -m benchmarks.data.local_crawl /usr/share/doc crawl`.

The folder is served on the loopback interface, and each folder in it is a site: crawled breadth first from its topmost
index pages (from all its pages if it has none), along links that stay within it. Requests and responses are recorded
as sent, with redirects and missing pages, so readers of the files meet what a real crawl holds.
"""

import argparse
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote, unquote, urljoin, urlsplit

from lxml import etree
from warcio.capture_http import capture_http  # before any use of http.client: it replaces its connections
from warcio.warcwriter import WARCWriter

from data_pipeline.progress import Stage

HOST = "127.0.0.1"
ENDINGS = (".html", ".htm", ".xhtml")
LINKS = "//a/@href | //area/@href | //frame/@src | //iframe/@src"
REFRESH = "//meta[translate(@http-equiv, 'REFSH', 'refsh') = 'refresh']/@content"


class Documentation(SimpleHTTPRequestHandler):
    """Serves the files under a folder, without listings and without targets of symlinks outside of it."""

    protocol_version = "HTTP/1.1"  # one connection for all requests
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait

    def send_head(self) -> object:
        """Send the headers and return the open file, or answer 404."""
        path = Path(self.translate_path(self.path)).resolve()
        if path.is_relative_to(Path(self.directory).resolve()):
            return super().send_head()
        return self.send_error(HTTPStatus.NOT_FOUND)

    def list_directory(self, path: str) -> None:
        """Answer 404: a listing does not belong to the documentation."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, *_: object) -> None:
        """Log nothing: the crawl counts the answers."""


@contextmanager
def served(folder: Path, port: int) -> Iterator[int]:
    """Serve a folder in a thread and yield the port; 0 picks a free one. Exit if the port is taken."""
    try:
        server = ThreadingHTTPServer((HOST, port), partial(Documentation, directory=str(folder)))
    except OSError as error:
        raise SystemExit(f"--port {port}: {error.strerror}; name another, or 0 for any free one") from error
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def start_pages(site: Path) -> list[Path]:
    """Return the index pages without another index page in a parent folder; all HTML files if there is no index."""
    indexes, pages = [], []
    for folder, below, names in os.walk(site):
        below.sort()
        found = [Path(folder, name) for name in sorted(names) if name.lower().endswith(ENDINGS)]
        pages.extend(found)
        if here := [page for page in found if page.name.lower().startswith("index.")]:  # index.html, index.en.html
            indexes.extend(here)
            below.clear()
    return indexes or pages


def links(body: bytes, path: str) -> Iterator[str]:
    """Yield the request paths on this server that a page at `path` links to."""
    parser = etree.HTMLParser(huge_tree=False, no_network=True)
    document = etree.fromstring(body, parser) if body.strip() else None
    if document is None:
        return
    refreshes = (content.partition("=")[2].strip(" '\"") for content in document.xpath(REFRESH))
    for link in [*document.xpath(LINKS), *filter(None, refreshes)]:
        try:
            parts = urlsplit(urljoin(f"//{HOST}{path}", link.strip()))
        except ValueError:
            continue
        if parts.scheme == "" and parts.netloc == HOST:
            yield quote(unquote(parts.path))


class Crawl:
    """A crawl of the sites in `folder`, of at most `pages` requests each."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.folder, self.pages = folder, pages
        self.answers: Counter[int] = Counter()
        self.bytes = 0
        self.site = ""
        self._paths = self._in_order()
        self._waiting: deque[str] = deque()
        self._seen: set[str] = set()

    def _in_order(self) -> Iterator[str]:
        """Yield paths to request, site by site; paths passed to `found` meanwhile are queued last."""
        for site in sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()):
            self.site = quote(f"/{site.name}/")
            self._waiting.clear()
            self._seen.clear()
            for start in start_pages(site):
                self.found(quote(f"/{start.relative_to(self.folder).as_posix()}"))
            for _ in range(self.pages):
                if not self._waiting:
                    break
                yield self._waiting.popleft()

    def found(self, path: str) -> None:
        """Queue a path for a request if it belongs to this site, may be a page and is new."""
        name = path.rpartition("/")[2].lower()
        if path.startswith(self.site) and path not in self._seen and ("." not in name or name.endswith(ENDINGS)):
            self._seen.add(path)
            self._waiting.append(path)

    def record(self, writer: WARCWriter, port: int, limit: int, stage: Stage) -> bool:
        """Record pages until the writer's file has `limit` bytes; return whether pages remain."""
        from http.client import HTTPConnection  # warcio's

        with capture_http(writer):
            connection = HTTPConnection(HOST, port, timeout=60)
            for path in self._paths:
                connection.request("GET", path, headers={"User-Agent": "palimpsest local_crawl"})
                response = connection.getresponse()
                body = response.read()
                self.answers[response.status] += 1
                self.bytes += len(body)
                stage.advance(1)
                if response.status == HTTPStatus.OK and response.headers.get_content_type() == "text/html":
                    for link in links(body, path):
                        self.found(link)
                elif location := response.headers.get("Location"):
                    self.found(urlsplit(urljoin(path, location)).path)
                if writer.out.tell() >= limit:
                    connection.close()
                    return True
            connection.close()
        return False


def crawl(folder: Path, output: Path, pages: int, port: int, file_bytes: int) -> Crawl:
    """Record a crawl of `folder` as output/crawl-00000.warc.gz and so on, and return the crawl with its counts."""
    output.mkdir(parents=True, exist_ok=True)
    done = Crawl(folder, pages)
    with served(folder, port) as port, Stage("crawling", "pages") as stage:
        more, number = True, 0
        while more:
            whole = output / f"crawl-{number:05d}.warc.gz"
            beside = whole.with_suffix(".part")  # gets the name of a WARC file only when complete
            with beside.open("wb") as file:
                more = done.record(WARCWriter(file, gzip=True), port, file_bytes, stage)
            beside.replace(whole)
            number += 1
            print(f"{whole}: {stage.done:,} pages so far, the last of {unquote(done.site)}", flush=True)
    return done


def main() -> None:
    """Crawl, and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of documentation: every folder in it is a site")
    parser.add_argument("output", type=Path, help="folder of the WARC files")
    parser.add_argument("--pages", type=int, default=2000, help="at most, of a site")
    parser.add_argument("--port", type=int, default=8000, help="part of the recorded addresses; 0: any free one")
    parser.add_argument("--megabytes", type=int, default=100, help="of a WARC file, after which the next is begun")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"folder {arguments.folder}: no such folder; give one with a folder of HTML for each site")
    if any(arguments.output.glob("*.warc.gz")):
        parser.error(f"output {arguments.output}: it has WARC files; remove them, or name another folder")
    start = time.perf_counter()
    limit = arguments.megabytes * 10**6
    done = crawl(arguments.folder, arguments.output, arguments.pages, arguments.port, limit)
    answers = ", ".join(f"{number:,} x {status}" for status, number in sorted(done.answers.items()))
    print(f"{answers}; {done.bytes / 1e6:,.1f} MB in {time.perf_counter() - start:,.0f} s; {arguments.output}")


if __name__ == "__main__":
    main()
