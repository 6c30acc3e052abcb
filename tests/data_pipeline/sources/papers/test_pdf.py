import io
import random
import zlib

import pytest
from pypdf import PdfReader, PdfWriter

from data_pipeline.documents import Unreadable
from data_pipeline.sources.papers.pdf import read_pdf, running_text


def pdf(pages, title="", encoding="cp1252"):
    """Return a PDF of pages of lines, each page one content stream in Helvetica."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        shown = " T* ".join("({}) Tj".format(line.replace("(", r"\(").replace(")", r"\)")) for line in lines)
        stream = f"BT /F1 10 Tf 12 TL 50 750 Td {shown} ET".encode(encoding)
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        font = "/Resources << /Font << /F1 3 0 R >> >> /MediaBox [0 0 612 792]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {font} /Contents {len(objects)} 0 R >>".encode())
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    objects.append(f"<< /Title ({title}) >>".encode())
    out, places = io.BytesIO(b"%PDF-1.4\n"), []
    out.seek(0, 2)
    for number, content in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    table = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    root = b"/Size %d /Root 1 0 R /Info %d 0 R" % (len(objects) + 1, len(objects))
    out.write(b"trailer << %s >>\nstartxref\n%d\n%%%%EOF\n" % (root, table))
    return out.getvalue()


def encrypted(content, password):
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(content)))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_a_pdf_says_its_title_and_doi_and_gives_its_pages(tmp_path):
    lines = ["A Cache That Forgets", "https://doi.org/10.1145/1234567.7654321.", "Words (in brackets)"]
    (tmp_path / "a.pdf").write_bytes(pdf([lines, ["Second page"], ["Third page"]], "A Cache"))
    paper = read_pdf(tmp_path / "a.pdf", pages=2)
    assert (paper.title, paper.doi) == ("A Cache", "10.1145/1234567.7654321")
    assert paper.pages == ["\n".join(lines), "Second page"]


def test_a_pdf_that_only_its_owner_may_change_is_read(tmp_path):
    (tmp_path / "a.pdf").write_bytes(encrypted(pdf([["Words"]]), ""))
    assert read_pdf(tmp_path / "a.pdf").pages == ["Words"]


REFUSED = {
    "locked": (encrypted(pdf([["Words"]]), "secret"), "encrypted PDF"),
    "noise": (b"this is no PDF at all", "broken PDF"),
    "empty": (b"", "broken PDF"),
    "cut": (pdf([["Words"]] * 3)[:200], "broken PDF"),
    "scanned": (pdf([[""], [""]]), "no text in PDF"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_encrypted_broken_and_scanned_files_are_refused_by_kind(tmp_path, name):
    content, kind = REFUSED[name]
    (tmp_path / "a.pdf").write_bytes(content)
    with pytest.raises(Unreadable) as error:
        read_pdf(tmp_path / "a.pdf")
    assert error.value.kind == kind
    assert "\n" not in error.value.detail


def test_a_file_that_has_gone_is_refused(tmp_path):
    with pytest.raises(Unreadable, match="unreadable file"):
        read_pdf(tmp_path / "nowhere.pdf")


def test_a_pdf_that_takes_too_long_is_stopped(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf([["Words " * 20] * 3000] * 100))
    with pytest.raises(Unreadable) as error:
        read_pdf(tmp_path / "a.pdf", seconds=0.1)
    assert error.value.kind == "PDF takes too long"


def test_a_pdf_that_unpacks_without_end_is_stopped(tmp_path):
    stream = zlib.compress(zlib.compress(b" " * (256 * 1024 * 1024), 1), 9)
    plain = b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%s\nendstream" % (len(stream), stream)
    content = pdf([["Words"]])
    start, end = content.index(b"<< /Length"), content.index(b"endstream") + len(b"endstream")
    (tmp_path / "a.pdf").write_bytes(content[:start] + plain + content[end:])
    with pytest.raises(Unreadable) as error:
        read_pdf(tmp_path / "a.pdf")
    assert error.value.kind in ("broken PDF", "PDF takes too much")


def page(number, *body):
    return "\n".join([f"SOSP '21, October 2021 A. Writer et al. {number}", *body, f"- {number} -"])


LONG = "This is a line of the usual length, as wide as a column of text is in print,"


def lines_of(seed, count):
    rng = random.Random(seed)
    return [" ".join(rng.choice(LONG.split()) for _ in range(14)) for _ in range(count)]


def test_pages_become_one_text_without_furniture():
    bodies = [[*lines_of(n, 4), f"{lines_of(n, 1)[0][:40]}."] for n in range(1, 7)]
    text = running_text([page(n, *body) for n, body in enumerate(bodies, 1)])
    assert text.split("\n\n") == [" ".join(body) for body in bodies]


def test_a_line_that_two_pages_share_in_their_midst_stays():
    pages = [page(n, *lines_of(n, 3), "ONE LINE, ON EVERY PAGE 7", *lines_of(-n, 3)) for n in range(1, 5)]
    assert running_text(pages).count("ONE LINE, ON EVERY PAGE 7") == 4


def test_words_broken_at_a_lines_end_are_made_whole():
    lines = [
        "We describe an implemen-",
        "tation of state-of-",
        "the-art log-",
        "structured storage, a log-structured one, with a write-",
        "Ahead log and a 10-",
        "20% gain.",
    ]
    text = running_text(["\n".join(lines)])
    assert "an implementation of state-of-the-art log-structured storage" in text
    assert "write- Ahead log and a 10- 20% gain." in text


def test_headings_are_marked_and_the_bibliography_is_cut_up_to_the_appendix():
    lines = ["Abstract", LONG, "1 Introduction", LONG, "2.1 Design of the Cache", LONG, "3 out of 4 runs fail."]
    lines += ["References", "[1] Someone. Something. 1999.", "Appendix A: Proofs", LONG]
    text = running_text(["\n".join(lines)])
    assert "## Abstract\n\nThis is" in text
    assert "## 1 Introduction\n\nThis is" in text
    assert "## 2.1 Design of the Cache\n\nThis is" in text
    assert "## 3 out" not in text
    assert "Someone" not in text
    assert "Appendix A: Proofs" in text
