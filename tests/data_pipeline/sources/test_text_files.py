import gzip
import json
import logging
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import Problems
from data_pipeline.sources.text_files import TextFiles, _pieces

pytestmark = pytest.mark.core


def read(path, strict=False, **settings):
    problems = Problems(strict)
    return list(TextFiles(str(path), **settings).documents(problems, 1)), problems


def json_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def test_every_format_gives_its_text(tmp_path):
    (tmp_path / "a.txt").write_text("plain é")
    (tmp_path / "b.md").write_text("# mark")
    (tmp_path / "c.jsonl").write_bytes(json_lines({"text": "lines"}))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(json_lines({"text": "gzip"})))
    (tmp_path / "e.jsonl.zst").write_bytes(zstandard.compress(json_lines({"text": "zstd"})))
    pq.write_table(pa.table({"text": ["parquet"], "other": [1]}), tmp_path / "f.parquet")
    (tmp_path / "g.png").write_bytes(b"\x89PNG")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "h.txt.gz").write_bytes(gzip.compress(b"deep"))
    documents, problems = read(tmp_path)
    assert [d.text for d in documents] == ["plain é", "# mark", "lines", "gzip", "deep", "zstd", "parquet"]
    assert not problems.counts
    assert {d.text for d in read(tmp_path / "**" / "*.gz")[0]} == {"gzip", "deep"}


def test_slimpajama_and_fineweb_shards_are_read_as_they_are(tmp_path):
    # Several zstd frames in one file, as SlimPajama's shards have.
    lines = [json_lines({"text": f"s{n}", "meta": {"redpajama_set_name": "RedPajamaC4"}}) for n in range(2)]
    (tmp_path / "s.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, lines)))
    fineweb = {"text": ["f"], "id": ["<urn:1>"], "url": ["http://x"], "date": ["2024-01-01"], "int_score": [4]}
    pq.write_table(pa.table(fineweb), tmp_path / "f.parquet")
    fine, *slim = read(tmp_path)[0]
    assert (fine.id, fine.metadata["url"], fine.metadata["date"]) == ("<urn:1>", "http://x", "2024-01-01")
    assert [d.text for d in slim] == ["s0", "s1"]
    assert slim[1].metadata["source"] == "RedPajamaC4"


@pytest.mark.parametrize("name", ["", "*.txt", "picture.png"])
def test_nothing_to_read_names_the_key(tmp_path, name):
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"^path=.*\.parquet"):
        TextFiles(str(tmp_path / name)).identity()


BROKEN = {
    "latin.txt": (b"caf\xe9", "byte 3: not UTF-8"),
    "nul.txt": (b"ab\0c", "byte 2: NUL byte"),
    "cut.jsonl.gz": (gzip.compress(json_lines({"text": "x" * 999}))[:-9], "corrupt file"),
    "noise.jsonl.gz": (b"this is no gzip file", "corrupt file"),
    "cut.jsonl.zst": (zstandard.compress(json_lines({"text": "x" * 999}))[:-9], "corrupt file"),
    "cut.txt.zst": (zstandard.compress(b"text " * 999)[:-3], "corrupt file"),
    "noise.parquet": (b"PAR1 this is not Parquet PAR1", "corrupt Parquet"),
    "broken.jsonl": (b'{"text": "a"\n', "line 1: broken JSON"),
    "array.jsonl": (b"[1]\n", "line 1: not a JSON object"),
    "other.jsonl": (b'{"content": "a"}\n', "line 1: no column 'text'"),
    "null.jsonl": (b'{"text": null}\n', "line 1: NoneType, not str, in column 'text'"),
    "bytes.jsonl": (b'{"text": "\xff"}\n', "line 1, byte 10: not UTF-8"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1: not UTF-8"),
    "nul.jsonl": (b'{"text": "a\\u0000"}\n', "line 1: NUL byte"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_skipped_and_counted_unless_strict(tmp_path, caplog, name):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("good")
    with caplog.at_level(logging.WARNING):
        documents, problems = read(tmp_path)
    assert [d.text for d in documents] == ["good"]
    assert problems.counts.total() == 1
    (line,) = caplog.messages
    assert line == problems.lines[0]
    assert "\n" not in line
    assert str(tmp_path / name) in line
    assert words in line
    with pytest.raises(ValueError, match=r"data\.strict=false") as error:
        read(tmp_path, strict=True)
    assert words in str(error.value)


def test_one_broken_line_costs_one_record(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines({"text": "1"}) + b'{"text": "2\n' + json_lines({"text": "3"}))
    documents, problems = read(tmp_path)
    assert [d.text for d in documents] == ["1", "3"]
    assert "a.jsonl: line 2: broken JSON" in problems.lines[0]


def test_parquet_without_the_column_names_the_columns_it_has(tmp_path):
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    assert "content: set text_key" in read(tmp_path)[1].lines[0]
    assert read(tmp_path, text_key="content")[0][0].text == "x"


def test_a_million_problems_do_not_drown_the_log(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b"{\n" * 5000)
    problems = read(tmp_path)[1]
    assert problems.counts["broken JSON"] == 5000
    assert len(caplog.messages) <= Problems.LOGGED + 1


def test_long_documents_are_cut_at_line_ends(tmp_path):
    text = "".join(f"line {n}\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(json_lines({"text": text, "id": "b"}))
    documents = read(tmp_path, max_document_bytes=1000)[0]
    for name in (str(tmp_path / "a.txt"), "b"):
        pieces = [d for d in documents if d.id.startswith(f"{name}#")]
        assert [d.id for d in pieces] == [f"{name}#{n}" for n in range(len(pieces))]
        assert "".join(d.text for d in pieces) == text
        assert all(d.text.endswith("\n") and len(d.text) <= 1000 for d in pieces)


def test_a_huge_line_is_read_in_little_memory(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(40):
            file.write("é日".encode() * 200_000)  # 40 MB without a line end
    size = (tmp_path / "a.txt").stat().st_size
    tracemalloc.start()
    read_bytes = sum(len(d.text.encode()) for d in TextFiles(str(tmp_path)).documents(Problems(), 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read_bytes == size
    assert peak < 16e6


@given(st.text(alphabet="aé日🜁\n", max_size=60), st.integers(4, 20))
def test_pieces_are_the_text_and_keep_to_the_limit(text, limit):
    pieces = list(_pieces(text.encode(), limit))
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)
