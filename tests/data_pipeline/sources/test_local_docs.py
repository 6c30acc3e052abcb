import gzip
import sys

import pytest

from data_pipeline.documents import Problems
from data_pipeline.markup.roff import plain_text
from data_pipeline.sources.local_docs import LocalDocs, docstrings

PROSE = "This sentence is long enough to be kept as a document by itself, for it has over one hundred bytes in all."


@pytest.fixture
def docs(tmp_path):
    man, doc = tmp_path / "man", tmp_path / "doc"
    for folder in (man / "man1", man / "fr" / "man1", doc / "tool"):
        folder.mkdir(parents=True)
    page = f".TH TOOL 1\n.SH NAME\ntool \\- a tool\n.SH DESCRIPTION\n.B tool\n{PROSE}\n".encode()
    (man / "man1" / "tool.1.gz").write_bytes(gzip.compress(page))
    (man / "man1" / "alias.1").write_text(".so man1/tool.1\n")
    (man / "man1" / "bad.1.gz").write_bytes(b"no gzip")
    (man / "fr" / "man1" / "tool.1").write_text(PROSE + " en français")
    (doc / "tool" / "README").write_text(PROSE + " read me")
    (doc / "tool" / "copyright").write_text(PROSE + " rights")
    (doc / "tool" / "changelog.gz").write_bytes(gzip.compress((PROSE + "\n").encode() * 5000))
    (doc / "tool" / "NEWS.html").write_text(PROSE)
    return LocalDocs(packages=[], man_pages=str(man), doc_folder=str(doc))


def test_documents_say_where_they_come_from_and_boilerplate_stays_out(docs):
    problems = Problems()
    found = {d.id.rpartition("/")[2]: d for d in docs.documents(problems, 1)}
    assert set(found) == {"tool.1.gz", "README", "changelog.gz"}
    assert found["tool.1.gz"].metadata["source"] == "man"
    assert found["tool.1.gz"].metadata["origin"].endswith("man1/tool.1.gz")
    assert len(found["changelog.gz"].text) <= 16 * 1024
    assert problems.counts == {"corrupt gzip": 1}


def test_a_machine_without_man_pages_simply_has_fewer(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    assert list(LocalDocs([], nowhere, nowhere).documents(Problems(), 1)) == []


def test_packages_are_parsed_and_never_imported():
    source = LocalDocs(["import-linter"], None, None)
    documents = list(source.documents(Problems(), 1))
    assert documents
    assert documents[0].metadata["origin"].startswith("import-linter ")
    assert "importlinter" not in sys.modules


def test_max_bytes_takes_the_same_documents_whatever_the_processes():
    source = LocalDocs(["networkx"], None, None, max_bytes=200_000)
    one = list(source.documents(Problems(), 1))
    assert one == list(source.documents(Problems(), 2))
    assert 150_000 < sum(len(d.text.encode()) for d in one) <= 200_000


def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match=r"^packages=no-such-thing is not installed"):
        LocalDocs(["no-such-thing"]).identity()


def test_identity_changes_with_a_file_and_not_with_time(docs, tmp_path):
    before = docs.identity()
    assert docs.identity() == before
    (tmp_path / "doc" / "tool" / "README").write_text("changed")
    assert docs.identity() != before


def test_docstrings_walk_bodies_only():
    source = '''"""Top."""
class A:
    """Of A."""
    def method(self):
        """Of method."""
        def inner():
            """Of inner."""
value = """not a docstring"""
'''
    assert docstrings(source) == "Top.\n\nA\n\nOf A.\n\nA.method\n\nOf method.\n\nA.method.inner\n\nOf inner."


def test_roff_becomes_readable_text():
    page = r""".\" a comment
.TH LS 1
.ie n \{\
.ds x y
.\}
.SH NAME
ls \- list \fIdirectory\fR contents
.SH "SEE ALSO"
Full
.BR stat (2)
documentation,
.I "by name" .
.PP
It\(aqs \s-1GNU\s0 \[bu] \*(lqquoted\*(rq.
.nf
  kept \e as
    it is
.fi
.TS
l l.
a	b
.TE
"""
    assert plain_text(page).split("\n\n") == [
        "NAME",
        "ls - list directory contents",
        "SEE ALSO",
        "Full stat(2) documentation, by name .",
        "It's GNU • “quoted”.",
        "kept \\ as\n    it is",
        "a  b",
    ]
    assert plain_text(".so man1/other.1\n") == ""
    assert plain_text(".Dt CAT 1\n.Sh NAME\n.Nm cat\n.Nd print files\n.Op Fl n Ar file\n") == (
        "NAME\n\ncat - print files -n file"
    )
