import gzip
import io
import json
import tarfile
import tracemalloc
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data_pipeline.documents import Problems
from data_pipeline.sources import arxiv
from data_pipeline.sources.arxiv import Arxiv

WORDS = "Locks are slow when caches bounce between sockets. " * 15


def record(identity, categories="cs.OS cs.DC", **others):
    """Return a record of the metadata snapshot."""
    return {
        "id": identity,
        "submitter": "A. Nobody",
        "authors": "A. Nobody and B. Nobody",
        "title": "On  Locks\n  in $O(n)$",
        "comments": "12 pages",
        "journal-ref": None,
        "doi": None,
        "report-no": None,
        "categories": categories,
        "license": "http://creativecommons.org/licenses/by/4.0/",
        "abstract": "  We study\nlocks.\n  And more.\n",
        "versions": [
            {"version": "v1", "created": "Mon, 2 Jan 2023 19:18:42 GMT"},
            {"version": "v2", "created": "Thu, 9 Feb 2023 20:00:00 GMT"},
        ],
        "update_date": "2023-03-01",
        "authors_parsed": [["Nobody", "A.", ""]],
        **others,
    }


def metadata(folder, *records, name="arxiv-metadata-oai-snapshot.json"):
    lines = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in records)
    path = folder / name
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return path


def tar(members, form=tarfile.PAX_FORMAT):
    """Return a tar of {name: bytes or TarInfo}."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def paper(text=WORDS, **files):
    """Return a gzipped tar of LaTeX."""
    main = f"\\documentclass{{article}}\n\\begin{{document}}\n{text}\n\\end{{document}}"
    return gzip.compress(tar({"main.tex": main.encode(), "figure.pdf": b"%PDF-1.5", **files}))


def sources(folder, members, name="arXiv_src_2301_001.tar"):
    (folder / "src").mkdir(exist_ok=True)
    path = folder / "src" / name
    path.write_bytes(tar(members))
    return path


def read(folder, strict=False, **settings):
    problems = Problems(strict)
    (path,) = folder.glob("*.json*")
    return list(Arxiv(str(path), str(folder / "src"), **settings).documents(problems, 1)), problems


def test_a_paper_has_its_title_abstract_and_body(tmp_path):
    metadata(tmp_path, record("2301.00001"))
    archive = sources(tmp_path, {"2301": link("2301", tarfile.DIRTYPE), "2301/2301.00001.gz": paper()})
    (document,), problems = read(tmp_path)
    assert document.text == f"# On Locks in $O(n)$\n\n## Abstract\n\nWe study locks.\n\nAnd more.\n\n{WORDS.strip()}\n"
    assert document.id == "arxiv:2301.00001"
    assert document.metadata == {
        "source": "arxiv",
        "category": "general_system",
        "origin": f"{archive}: 2301/2301.00001.gz",
        "url": "https://arxiv.org/abs/2301.00001",
        "date": "2023-02-09",
        "licence": "CC-BY-4.0",
    }
    assert not problems.counts


def link(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_only_papers_of_the_categories_are_read(tmp_path):
    metadata(
        tmp_path,
        *(record("2301.00001", "math.AG"), record("2301.00002", "stat.ML cs.PF"), record("2301.00003", "cs.OSX")),
        *(record("2301.00004", "math.AG", title="about cs.OS"), record("2301.00005", "cs.CL")),
    )
    sources(tmp_path, {f"2301/2301.0000{n}.gz": paper() for n in range(1, 7)})
    assert [document.id for document in read(tmp_path)[0]] == ["arxiv:2301.00002"]
    assert [document.id for document in read(tmp_path, categories=["cs.CL"])[0]] == ["arxiv:2301.00005"]
    with pytest.raises(ValueError, match=r"^metadata=.*categories \(cs\.GL\)"):
        read(tmp_path, categories=["cs.GL"])


def test_old_names_single_files_and_compressed_metadata_are_known(tmp_path):
    metadata(tmp_path, record("hep-th/9901001"), record("cs/0001002"), name="meta.jsonl.gz").rename(
        tmp_path / "m.json.gz"
    )
    single = gzip.compress(f"\\documentstyle{{article}}\r\n\\begin{{document}}caf\xe9 {WORDS}".encode("latin-1"))
    sources(tmp_path, {"9901/hep-th9901001.gz": single, "0001/cs0001002.gz": paper()}, "arXiv_src_9901_001.tar")
    documents, problems = read(tmp_path)
    assert [document.id for document in documents] == ["arxiv:hep-th/9901001", "arxiv:cs/0001002"]
    assert documents[0].metadata["url"] == "https://arxiv.org/abs/hep-th/9901001"
    assert "café Locks" in documents[0].text
    assert not problems.counts


@pytest.mark.parametrize(
    ("address", "licence"),
    [
        ("http://creativecommons.org/licenses/by-nc-sa/3.0/", "CC-BY-NC-SA-3.0"),
        ("https://creativecommons.org/licenses/by-nc-nd/4.0/", "CC-BY-NC-ND-4.0"),
        ("http://creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
        ("http://arxiv.org/licenses/nonexclusive-distrib/1.0/", "http://arxiv.org/licenses/nonexclusive-distrib/1.0/"),
        (None, None),
    ],
)
def test_licences_have_their_spdx_ids_where_there_is_one(tmp_path, address, licence):
    metadata(tmp_path, record("2301.00001", license=address, versions=None))
    sources(tmp_path, {"2301/2301.00001.gz": paper()})
    (document,), _ = read(tmp_path)
    assert document.metadata.get("licence") == licence
    assert document.metadata["date"] == "2023-03-01"


def test_papers_without_source_are_counted_and_no_fault(tmp_path):
    metadata(tmp_path, record("2301.00001"), record("2301.00002"))
    sources(tmp_path, {"2301/2301.00001.pdf": b"%PDF", "2301/2301.09999.pdf": b"%PDF", "2301/2301.00002.gz": paper()})
    documents, problems = read(tmp_path, strict=True)
    assert [document.id for document in documents] == ["arxiv:2301.00002"]
    assert problems.counts == {"paper without LaTeX source": 1}


def long_name(size):
    """Return a tar that starts with a name of `size` bytes."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(size))


def truncated_tar():
    return gzip.compress(tar({"main.tex": WORDS.encode() * 20})[:5000])


def broken_header():
    return gzip.compress(tar({"a.tex": b"x"})[:1024] + b"\xff" * 512 + tar({"main.tex": WORDS.encode()}))


BAD_SOURCES = {
    "no gzip": (b"plain", "broken source", "Not a gzipped file"),
    "truncated gzip": (paper(**{"x.tex": bytes(range(256)) * 50})[:-60], "broken source", ""),
    "truncated tar": (truncated_tar(), "broken source", "unexpected end of data"),
    "broken header": (broken_header(), "broken source", ""),
    "long name": (long_name(3 << 20), "broken source", "a name of 3,145,728 bytes"),
    "bomb": (gzip.compress(tar({"main.tex": b"x", "zeros.dat": bytes(30 << 20)})), "broken source", "unpacks to over"),
    "long text": (gzip.compress(bytes(range(32, 127)) * 60_000), "broken source", "one file of over"),
    "many texts": (
        gzip.compress(tar({f"{n}.tex": b" " * 3_000_000 for n in range(12)})),
        "broken source",
        "text files",
    ),
    "no main file": (gzip.compress(tar({"a.tex": b"hello"})), "unreadable LaTeX", "no main file"),
    "postscript": (gzip.compress(b"%!PS-Adobe-2.0\n"), "unreadable LaTeX", "no main file"),
    "nested tar": (
        gzip.compress(tar({"inner.tar": tar({"main.tex": b"\\documentclass{a}"})})),
        "unreadable LaTeX",
        "no main",
    ),
    "symlink": (
        gzip.compress(tar({"main.tex": link("main.tex", tarfile.SYMTYPE, "/etc/passwd")})),
        *("unreadable LaTeX", "no main file"),
    ),
    "macro bomb": (
        paper(r"\def\a{\b\b\b\b}\def\b{\c\c\c\c}\def\c{\d\d\d\d}\def\d{" + "x" * 99_999 + r"}\a"),
        "unreadable LaTeX",
        "without bound",
    ),
    "only a PDF": (paper(r"\includepdf[pages=-]{figure.pdf}"), "no text in the source", "0 characters"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_costs_that_paper(tmp_path, monkeypatch, case):
    monkeypatch.setattr(arxiv, "UNPACKED_BYTES", 20 << 20)
    monkeypatch.setattr(arxiv, "TEXT_BYTES", 8 << 20)
    data, kind, words = BAD_SOURCES[case]
    metadata(tmp_path, *(record(f"2301.0000{n}") for n in (1, 2, 3)))
    archive = sources(
        tmp_path, {"2301/2301.00001.gz": paper(), "2301/2301.00002.gz": data, "2301/2301.00003.gz": paper()}
    )
    tracemalloc.start()
    documents, problems = read(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [document.id for document in documents] == ["arxiv:2301.00001", "arxiv:2301.00003"]
    assert problems.counts == {kind: 1}
    assert f"{archive}: 2301/2301.00002.gz: {kind}" in problems.lines[0]
    assert words in problems.lines[0]
    assert "\n" not in problems.lines[0]
    assert peak < 30 << 20
    with pytest.raises(ValueError, match=kind):
        read(tmp_path, strict=True)


def test_nothing_is_written_and_no_name_leads_out(tmp_path):
    inputs = r"\input{../../secret} \input{/etc/hostname} \input{sub/../ok}"
    metadata(tmp_path, record("2301.00001"))
    files = {
        "../../secret.tex": b"OUT",
        "/abs.tex": b"ABS",
        "ok.tex": b"fine",
        "evil.tex": link("evil.tex", tarfile.LNKTYPE, "../x"),
    }
    sources(tmp_path, {"2301/2301.00001.gz": paper(WORDS + inputs, **files)})
    before = sorted(tmp_path.rglob("*"))
    (document,), problems = read(tmp_path)
    assert document.text.rstrip().endswith("fine")
    assert not problems.counts
    assert sorted(tmp_path.rglob("*")) == before


def test_a_broken_archive_gives_what_it_has_and_the_next_is_read(tmp_path):
    metadata(tmp_path, *(record(f"2301.0000{n}") for n in range(1, 8)))
    archives = []
    for part in (1, 3, 5):
        members = {f"2301/2301.0000{part}.gz": paper(), f"2301/2301.0000{part + 1}.gz": paper(more=b"more" * 99)}
        archives.append(sources(tmp_path, members, f"arXiv_src_2301_00{part}.tar"))
    cut, damaged, noise = archives
    data = cut.read_bytes()
    cut.write_bytes(data[: data.index(b"2301/2301.00002.gz") + 600])
    data = damaged.read_bytes()
    start = data.index(b"2301/2301.00004.gz")
    damaged.write_bytes(data[:start] + b"\xff" * 512 + data[start + 512 :])
    noise.write_bytes(b"\xff" * 3000)
    sources(tmp_path, {"2301/2301.00007.gz": paper()}, "arXiv_src_2301_007.tar")
    documents, problems = read(tmp_path)
    assert [document.id for document in documents] == ["arxiv:2301.00001", "arxiv:2301.00003", "arxiv:2301.00007"]
    assert problems.counts == {"broken source": 1, "broken archive": 3}
    assert {line.partition(": ")[0] for line in problems.lines} == {str(path) for path in archives}


BAD_RECORDS = {
    "broken JSON": (b'{"id": "2301.00009", "categories": "cs.OS"\n', "broken record"),
    "no title": ({"id": "2301.00009", "categories": "cs.OS", "abstract": ""}, "broken record"),
    "no text": (record("2301.00009", title=7), "broken record"),
    "surrogate": (b'{"id": "1", "categories": "cs.OS", "title": "\\ud800", "abstract": ""}\n', "broken record"),
    "not UTF-8": (b'{"id": "1", "categories": "cs.OS", "title": "\xff", "abstract": ""}\n', "broken record"),
    "deep": (b'{"categories": "cs.OS", "x": ' + b"[" * 100_000 + b"\n", "broken record"),
    "array": (b'["cs.OS"]\n', "broken record"),
    "too long": (b'{"cs.OS": "' + b"x" * 3000 + b'"}\n', "line too long"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_bad_record_costs_that_record(tmp_path, monkeypatch, case):
    monkeypatch.setattr(arxiv, "LINE_BYTES", 200_000 if case == "deep" else 2000)
    line, kind = BAD_RECORDS[case]
    path = metadata(tmp_path, record("2301.00001"), line, record("2301.00002"))
    sources(tmp_path, {"2301/2301.00001.gz": paper(), "2301/2301.00002.gz": paper()})
    documents, problems = read(tmp_path)
    assert len(documents) == 2
    assert problems.counts == {kind: 1}
    assert f"{path}: line 2: {kind}" in problems.lines[0]


def test_metadata_that_breaks_off_gives_what_it_has(tmp_path):
    lines = [record(f"2301.{n:05d}", comments=str(n) * 50) for n in range(1, 200)]
    path = metadata(tmp_path, *lines, name="meta.json.gz")
    path.write_bytes(path.read_bytes()[:-200])
    sources(tmp_path, {"2301/2301.00001.gz": paper()})
    documents, problems = read(tmp_path)
    assert len(documents) == 1
    assert problems.counts == {"corrupt file": 1}


def test_parts_are_archives_and_read_alone(tmp_path):
    metadata(tmp_path, record("2301.00001"), record("2302.00001"))
    sources(tmp_path, {"2301/2301.00001.gz": paper()})
    sources(tmp_path, {"2302/2302.00001.gz": paper()}, "arXiv_src_2302_001.tar")
    source = Arxiv(str(tmp_path / "arxiv-metadata-oai-snapshot.json"), str(tmp_path / "src"))
    (tmp_path / ".arxiv.sqlite.partial").write_bytes(b"torn")
    for _ in range(2):
        source.prepare(tmp_path, Problems())
    parts = source.parts(tmp_path)
    assert parts == ["arXiv_src_2301_001.tar", "arXiv_src_2302_001.tar"]
    (document,) = source.read(parts[1], tmp_path, Problems(strict=True))
    assert document.id == "arxiv:2302.00001"


def test_the_settings_file_gives_every_argument_its_default():
    settings = OmegaConf.load(Path(__file__).parents[3] / "conf/source/arxiv.yaml")
    assert settings.pop("_target_") == f"{Arxiv.__module__}.{Arxiv.__name__}"
    assert list(settings) == [field.name for field in fields(Arxiv)]
    for field in fields(Arxiv):
        if not OmegaConf.is_missing(settings, field.name):
            assert settings[field.name] == (list(field.default) if isinstance(field.default, tuple) else field.default)


def test_mistakes_in_settings_name_the_key(tmp_path):
    metadata(tmp_path, record("2301.00001"))
    (path,) = tmp_path.glob("*.json")
    with pytest.raises(ValueError, match=r"^metadata=nowhere is not a file"):
        Arxiv("nowhere", str(tmp_path)).identity()
    with pytest.raises(ValueError, match=r"^sources=.*no \.tar in it"):
        Arxiv(str(path), str(tmp_path)).identity()
    with pytest.raises(ValueError, match=r"^categories=\[\]"):
        Arxiv(str(path), str(tmp_path), [])


def test_memory_does_not_grow_with_an_archive(tmp_path):
    peaks = []
    for times in (1, 4):
        folder = tmp_path / str(times)
        folder.mkdir()
        numbers = range(1, 40 * times)
        metadata(folder, *(record(f"2301.{n:05d}") for n in numbers), *[record("2302.00001", "math.AG")] * 1000 * times)
        sources(folder, {f"2301/2301.{n:05d}.gz": paper(WORDS * 5, other=bytes(100_000)) for n in numbers})
        tracemalloc.start()
        source = Arxiv(str(folder / "arxiv-metadata-oai-snapshot.json"), str(folder / "src"))
        assert sum(1 for _ in source.documents(Problems(strict=True), 1)) == len(numbers)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
