import gzip
import http.client
import http.server
import io
import itertools
import threading
import tracemalloc
import zlib
from pathlib import Path

import brotli
import pytest
import yaml
from warcio.capture_http import capture_http
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from data_pipeline.documents import Problems
from data_pipeline.sources.web.sites import Sites
from data_pipeline.sources.web.web import Web

PROSE = "The scheduler picks the task with the least virtual runtime, and charges it for the time that it has run. "
SITES = {"design": ["a.org"], "debug": ["a.org/bugs", "b.net"]}


def html(text, title="T"):
    return f"<html><head><title>{title}</title></head><body><p>{PROSE * 3}</p><p>{text}</p></body></html>".encode()


class Archive:
    """Writes a WARC file record by record."""

    def __init__(self, path, compressed=True):
        self.path, self.file = path, path.open("wb")
        self.writer = WARCWriter(self.file, gzip=compressed)

    def add(self, url, body, status="200 OK", kind="response", content_type="text/html", **headers):
        fields = [("Content-Type", content_type), *((name.replace("_", "-"), value) for name, value in headers.items())]
        http_headers = StatusAndHeaders(status, fields, protocol="HTTP/1.1") if kind == "response" else None
        record = self.writer.create_warc_record(
            url,
            kind,
            payload=io.BytesIO(body),
            http_headers=http_headers,
            warc_content_type=None if http_headers else content_type,
        )
        place = self.file.tell()
        self.writer.write_record(record)
        return place

    def close(self):
        self.file.close()
        return self.path


def read(paths, tmp_path, strict=False, sites=SITES, **settings):
    problems = Problems(strict)
    source = Web(str(paths), sites, **settings)
    scratch = tmp_path / f"scratch-{next(COUNTER)}"
    scratch.mkdir()
    source.prepare(scratch, problems)
    return [d for part in source.parts(scratch) for d in source.read(part, scratch, problems)], problems


COUNTER = itertools.count()


@pytest.mark.parametrize("compressed", [True, False])
def test_pages_of_the_listed_sites_are_read_and_nothing_else(tmp_path, compressed):
    archive = Archive(tmp_path / f"x.warc{'.gz' if compressed else ''}", compressed)
    place = archive.add("https://www.a.org/x", html("first"), Last_Modified="Wed, 21 Oct 2015 07:28:00 GMT")
    archive.add("http://www.a.org/x#part", html("the same address again"))
    archive.add("https://c.com/x", html("not listed"))
    archive.add("https://a.org/gone", html("gone"), status="404 Not Found")
    archive.add("https://a.org/moved", html("moved"), status="301 Moved")
    archive.add("https://a.org/picture", b"\x89PNG", content_type="image/png")
    archive.add(
        "https://a.org/bugs/1", f"plain\r\n  text\t\n{PROSE}".encode(), content_type="text/plain; charset=utf-8"
    )
    archive.add("https://b.net/r", html("a resource"), kind="resource")
    archive.add("https://a.org/thin", b"<html><body><p>Thin</p></body></html>")
    archive.add("metadata://gnu.org/software/wget/", b"log", kind="resource", content_type="text/plain")
    archive.close()
    documents, problems = read(tmp_path, tmp_path)
    assert not problems.counts
    assert [d.id for d in documents] == ["web:https://www.a.org/x", "web:https://a.org/bugs/1", "web:https://b.net/r"]
    assert documents[0].metadata == {
        "source": "web",
        "category": "design",
        "origin": f"{archive.path}: offset {place}",
        "url": "https://www.a.org/x",
        "date": "2015-10-21T07:28:00Z",
    }
    assert documents[0].text.startswith("# T\n\n")
    assert "first" in documents[0].text
    assert documents[1].text == f"plain\n  text\n{PROSE.strip()}"
    assert [d.metadata["category"] for d in documents[1:]] == ["debug", "debug"]


def test_the_first_capture_of_an_address_stays_over_all_files(tmp_path):
    for name, words in (("b", "second"), ("a", "first")):
        archive = Archive(tmp_path / f"{name}.warc.gz")
        archive.add("https://a.org/x", html(words))
        archive.add(f"https://a.org/{name}", html("own"))
        archive.close()
    documents = read(tmp_path, tmp_path)[0]
    assert [d.id for d in documents] == ["web:https://a.org/x", "web:https://a.org/a", "web:https://a.org/b"]
    assert "first" in documents[0].text


def chunked(body):
    half = len(body) // 2
    pieces = (body[:half], body[half:])
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def bare_deflate(body):
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("encode", "headers"),
    [
        (chunked, {"Transfer_Encoding": "chunked"}),
        (gzip.compress, {"Content_Encoding": "gzip"}),
        (zlib.compress, {"Content_Encoding": "deflate"}),
        (bare_deflate, {"Content_Encoding": "deflate"}),
        (brotli.compress, {"Content_Encoding": "br"}),
        (lambda body: chunked(gzip.compress(body)), {"Transfer_Encoding": "chunked", "Content_Encoding": "gzip"}),
        (
            lambda body: body,
            {"Transfer_Encoding": "chunked", "Content_Encoding": "gzip"},
        ),  # headers that no longer hold
        (lambda body: gzip.compress(gzip.compress(body)), {"Content_Encoding": "gzip, gzip"}),
        (lambda body: body.decode().encode("cp1252"), {"content_type": "text/html; charset=ISO-8859-1"}),
    ],
)
def test_encodings_of_pages_are_undone(tmp_path, encode, headers):
    archive = Archive(tmp_path / "x.warc.gz")
    archive.add("https://a.org/x", encode(html("naïve “quotes”")), **headers)
    documents, problems = read(archive.close(), tmp_path)
    assert not problems.counts
    assert "naïve “quotes”" in documents[0].text


def archive_of_three(path, compressed=True):
    archive = Archive(path, compressed)
    places = [archive.add(f"https://a.org/{n}", html(f"page {n} " * 50)) for n in range(3)]
    return archive.close(), places


def broken(name, tmp_path):
    """Return a file of three pages with its second or third record broken, and the expected error words."""
    path, places = archive_of_three(
        tmp_path / f"x.warc{'' if name.startswith('plain') else '.gz'}", not name.startswith("plain")
    )
    content = path.read_bytes()
    if name == "cut gzip":
        content, words, left = content[:-40], f"offset {places[2]}: truncated WARC record", [0, 1]
    elif name == "cut gzip in the headers":
        content, words, left = content[: places[2] + 60], f"offset {places[2]}: ", [0, 1]
    elif name == "flipped gzip":
        content = content[: places[1] + 300] + b"\xff\x00\xff" * 9 + content[places[1] + 327 :]
        words, left = f"offset {places[1]}: corrupt gzip", [0, 2]
    elif name == "noise between":
        content = content[: places[1]] + b"noise " * 100 + content[places[1] :]
        words, left = f"offset {places[1]}: corrupt gzip", [0, 1, 2]
    elif name == "whole gzip":
        content, words, left = gzip.compress(gzip.decompress(content)), "recompress", []
    elif name == "plain cut":
        content, words, left = content[:-40], f"offset {places[2]}: truncated WARC record", [0, 1]
    elif name == "plain wrong length":
        content = content[: places[1]] + content[places[1] :].replace(b"Content-Length: 7", b"Content-Length: 6", 1)
        words, left = f"offset {places[1]}: broken WARC record", [0, 2]
    elif name == "plain no length":
        content = content[: places[1]] + content[places[1] :].replace(b"Content-Length", b"Content-Breadth", 1)
        words, left = f"offset {places[1]}: broken WARC record (no Content-Length)", [0, 2]
    elif name == "plain endless header":
        record = b"WARC/1.0\r\nX: " + b"y" * 600_000 + b"\r\n"
        content, words, left = content[: places[1]] + record + content[places[1] :], "bytes of headers", [0, 1, 2]
    elif name == "plain false length":
        record = (
            b"WARC/1.0\r\nWARC-Type: resource\r\nWARC-Target-URI: http://a.org/q\r\nContent-Length: 99999999999\r\n\r\n"
        )
        content, words, left = content[: places[1]] + record + content[places[1] :], "over 99999", [0, 1, 2]
    path.write_bytes(content)
    return path, words, left


@pytest.mark.parametrize(
    "name",
    [
        "cut gzip",
        "cut gzip in the headers",
        "flipped gzip",
        "noise between",
        "whole gzip",
        "plain cut",
        "plain wrong length",
        "plain no length",
        "plain endless header",
        "plain false length",
    ],
)
def test_a_broken_record_is_named_by_its_offset_and_the_others_stay(tmp_path, capsys, name):
    path, words, left = broken(name, tmp_path)
    documents, problems = read(path, tmp_path)
    assert [d.id for d in documents] == [f"web:https://a.org/{n}" for n in left]
    assert problems.counts.total() == 1
    assert f"{path}: " in problems.lines[0]
    assert words in problems.lines[0]
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="strict=false"):
        read(path, tmp_path, strict=True)


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (html("x") * 40_000, {}, "page too large"),
        (gzip.compress(bytes(100_000_000)), {"Content_Encoding": "gzip"}, "page too large (over 1000000 bytes when"),
        (
            brotli.compress(bytes(300_000_000), quality=1),
            {"Content_Encoding": "br"},
            "page too large (over 1000000 bytes when",
        ),
        (b"\x1f\x8b\x08" + b"broken" * 99, {"Content_Encoding": "gzip"}, "broken content encoding"),
        (b"broken" * 99, {"Content_Encoding": "br"}, "broken content encoding"),
        (html("x"), {"Content_Encoding": "zebra"}, "unknown content encoding (zebra, https://a.org/x)"),
        (bytes(range(128, 256)) * 50, {}, "undecodable text"),
        (b"<html><body>" + b"<p>x" * 30_000, {"max_page_elements": 1000}, "too many elements"),
    ],
    ids=["large", "gzip bomb", "brotli bomb", "broken gzip", "broken brotli", "unknown", "noise", "elements"],
)
def test_a_page_that_is_too_large_or_broken_is_named_in_little_memory(tmp_path, body, headers, words):
    settings = {"max_page_elements": headers.pop("max_page_elements")} if "max_page_elements" in headers else {}
    archive = Archive(tmp_path / "x.warc.gz")
    place = archive.add("https://a.org/x", body, **headers)
    archive.add("https://a.org/y", html("good"))
    archive.close()
    tracemalloc.start()
    documents, problems = read(archive.path, tmp_path, max_page_bytes=1_000_000, **settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [d.id for d in documents] == ["web:https://a.org/y"]
    assert problems.counts.total() == 1
    assert f"offset {place}: {words}" in problems.lines[0]
    assert peak < 25e6


def test_sites_match_hosts_under_them_and_the_longest_decides():
    sites = Sites({"design": ["Kernel.org", "a.org/docs/"], "debug": ["bugs.kernel.org", "a.org/docs/faq"]})
    found = {
        "https://kernel.org/": "design",
        "https://docs.kernel.org:8080/x?y": "design",
        "http://user@DOCS.KERNEL.ORG./x": "design",
        "https://mykernel.org/": None,
        "https://kernel.org.evil.com/": None,
        "https://bugs.kernel.org/1": "debug",
        "https://a.org/": None,
        "https://a.org/docs": "design",
        "https://a.org/docs-old/x": None,
        "https://www.a.org/docs/faq/1": "debug",
        "https://[::1": None,
        "mailto:x@kernel.org": None,
    }
    assert {url: sites.category(url) for url in found} == found


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ({"design": ["https://a.org"]}, r"^sites=.*https://a\.org.* is not a site"),
        ({"design": ["*.a.org"]}, "is not a site"),
        ({"design": "a.org"}, r"^sites=.*design.*a\.org.*: give a list"),
        ({"design": ["a.org"], "debug": ["A.org/"]}, "debug.* is in design too"),
        ({}, "sites is empty"),
        ("systems", "give a mapping"),
    ],
)
def test_a_wrong_list_of_sites_is_named(sites, words):
    with pytest.raises(ValueError, match=words):
        Web("x.warc", sites)


def test_no_file_names_the_key(tmp_path):
    (tmp_path / "x.html").write_text("x")
    with pytest.raises(ValueError, match=r"^paths=.*no WARC file"):
        Web(str(tmp_path), SITES).identity()


def test_identity_changes_with_files_and_settings(tmp_path):
    path = archive_of_three(tmp_path / "x.warc.gz")[0]
    before = Web(str(tmp_path), SITES).identity()
    assert Web(str(tmp_path), SITES).identity() == before
    assert Web(str(tmp_path), {"design": ["a.org"]}).identity() != before
    path.write_bytes(path.read_bytes() * 2)
    assert Web(str(tmp_path), SITES).identity() != before


def test_the_sites_that_ship_are_many_and_well_formed():
    categories = yaml.safe_load(Path("conf/source/sites/systems.yaml").read_text())
    Sites(categories)
    sites = [site for group in categories.values() for site in group]
    assert len(sites) == len(set(sites)) > 120
    assert set(categories) == {"general_system", "design", "debug"}


def test_what_a_crawler_captured_from_a_real_server_is_read(tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = html(f"served at {self.path}")
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with capture_http(str(tmp_path / "x.warc.gz")):
        for path in ("/one", "/two"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", path)
            connection.getresponse().read()
            connection.close()
    server.shutdown()
    documents, problems = read(tmp_path, tmp_path, sites={"design": ["127.0.0.1"]})
    assert not problems.counts
    assert [d.text.rpartition(" ")[2] for d in documents] == ["/one", "/two"]
