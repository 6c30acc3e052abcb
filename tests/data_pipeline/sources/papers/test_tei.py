import gzip

import pytest

from data_pipeline.documents import Unreadable
from data_pipeline.sources.papers.tei import read_tei

HEADER = """<teiHeader>
 <fileDesc>
  <titleStmt><title level="a" type="main">Decaying attention in operating systems</title></titleStmt>
  <publicationStmt><publisher/><availability status="unknown">
   <licence target="https://creativecommons.org/licenses/by/4.0/"/></availability></publicationStmt>
  <sourceDesc><biblStruct>
   <analytic><author><persName><forename>Some</forename></persName></author></analytic>
   <monogr><imprint><date type="published" when="2021-10-26"/></imprint></monogr>
   <idno type="DOI">10.1145/3477132.3483541</idno><idno type="arXiv">arXiv:2110.12345v2[cs.OS]</idno>
  </biblStruct></sourceDesc>
 </fileDesc>
 <profileDesc><abstract><div><p>We present a decaying cache.</p></div></abstract></profileDesc>
</teiHeader>"""
BODY = """<text xml:lang="en"><body>
 <div><head n="1">Introduction</head>
  <p>Caches forget <ref type="bibr" target="#b0">[1,</ref><ref type="bibr" target="#b1">2]</ref>. As in
   <ref type="bibr" target="#b2">(Knuth, 1973)</ref>, <hi rend="italic">r&amp;d</hi> helps<note>aside</note>.</p>
  <formula xml:id="f0">E = m c<label>(1)</label></formula>
  <p>See <formula>x^2</formula> and <ref type="figure" target="#fig_0">Figure 1</ref>:</p>
  <list><item>first <list><item>inner</item></list></item><item><p>second</p></item></list>
 </div>
 <div><head n="2.1.">Design</head><p>é, 日本.</p></div>
 <figure xml:id="fig_0"><head>Figure 1</head><figDesc>A cache.</figDesc></figure>
 <figure type="table"><head>Table 1</head><table><row><cell>7</cell></row></table></figure>
</body>
<back>
 <div type="acknowledgement"><div><head>Acknowledgements</head><p>We thank.</p></div></div>
 <div type="annex"><div><head>A Proof</head><p>It holds.</p></div><div><head>Empty</head></div></div>
 <div type="references"><listBibl><biblStruct><title>Cited work</title></biblStruct></listBibl></div>
</back></text>"""


def tei(header=HEADER, body=BODY, namespace=' xmlns="http://www.tei-c.org/ns/1.0"', prolog=""):
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{prolog}<TEI{namespace}>{header}{body}</TEI>'


@pytest.mark.parametrize("namespace", [' xmlns="http://www.tei-c.org/ns/1.0"', ""])
def test_a_paper_is_its_sections_without_formulae_figures_notes_and_references(tmp_path, namespace):
    (tmp_path / "a.tei.xml").write_text(tei(namespace=namespace))
    paper = read_tei(tmp_path / "a.tei.xml")
    assert paper.text == (
        "## Abstract\n\nWe present a decaying cache.\n\n"
        "## Introduction\n\nCaches forget. As in (Knuth, 1973), r&d helps.\n\n"
        "See and Figure 1:\n\n- first inner\n\n- second\n\n### Design\n\né, 日本.\n\n## A Proof\n\nIt holds."
    )


def test_the_header_says_which_paper_it_is(tmp_path):
    (tmp_path / "a.xml.gz").write_bytes(gzip.compress(tei().encode()))
    paper = read_tei(tmp_path / "a.xml.gz", with_text=False)
    assert paper.title == "Decaying attention in operating systems"
    assert (paper.year, paper.licence, paper.text) == (2021, "CC-BY-4.0", "")
    assert paper.keys == ("doi:10.1145/3477132.3483541", "arxiv:2110.12345")


def test_a_paper_may_lack_everything_but_words(tmp_path):
    (tmp_path / "a.xml").write_text(tei("<teiHeader/>", "<text><body><div><p>Words.</p></div></body></text>"))
    paper = read_tei(tmp_path / "a.xml")
    assert (paper.title, paper.year, paper.keys, paper.licence, paper.text) == ("", None, (), None, "Words.")


BOMB = '<!DOCTYPE TEI [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
OUTSIDE = '<!DOCTYPE TEI [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
REFUSED = {
    "bomb": (tei(prolog=BOMB).replace("cache", "&b;").encode(), "refused XML"),
    "outside": (tei(prolog=OUTSIDE).replace("cache", "&x;").encode(), "refused XML"),
    "hidden": (tei(prolog=OUTSIDE).replace("cache", "&x;").replace("UTF-8", "UTF-16").encode("utf-16"), "refused XML"),
    "large": (tei(body="<p>" + "x" * (33 * 1024 * 1024) + "</p>").encode(), "refused XML"),
    "cut": (tei()[:-20].encode(), "broken XML"),
    "deep": (tei(body="<div>" * 5000 + "</div>" * 5000).encode(), "broken XML"),
    "latin": (tei().encode("latin-1", "ignore").replace(b"cache", b"\xe9"), "broken XML"),
    "nul": (tei().replace("cache", "\0").encode(), "broken XML"),
    "empty": (b"", "broken XML"),
    "html": (b"<html><body>Not found</body></html>", "not TEI"),
    "headless": (b"<TEI><text/></TEI>", "not TEI"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_and_broken_files_are_refused_by_kind(tmp_path, name):
    content, kind = REFUSED[name]
    (tmp_path / "a.xml").write_bytes(content)
    with pytest.raises(Unreadable) as error:
        read_tei(tmp_path / "a.xml")
    assert error.value.kind == kind
    assert "\n" not in error.value.detail


def test_a_truncated_or_exploding_gzip_is_refused(tmp_path):
    (tmp_path / "cut.xml.gz").write_bytes(gzip.compress(tei().encode())[:-9])
    (tmp_path / "bomb.xml.gz").write_bytes(gzip.compress(b" " * (64 * 1024 * 1024)))
    for name, kind in (("cut", "corrupt file"), ("bomb", "refused XML")):
        with pytest.raises(Unreadable) as error:
            read_tei(tmp_path / f"{name}.xml.gz")
        assert error.value.kind == kind
