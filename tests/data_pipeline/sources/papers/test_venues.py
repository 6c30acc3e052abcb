import errno
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from data_pipeline.documents import Problems
from data_pipeline.sources.papers import paper_index
from data_pipeline.sources.papers.dblp import dblp_records
from data_pipeline.sources.papers.papers import paper_of, text_of
from data_pipeline.sources.papers.venues import FILES_AT_ONCE, Venues, keys_in_name

CONF = Path(__file__).parents[4] / "conf"
LIST = yaml.safe_load((CONF / "source/venue_list/ccf_2022.yaml").read_text())
PROSE = "Operating systems forget what their caches held a moment ago, and this costs them dearly. " * 30
HEAD = '<?xml version="1.0" encoding="ISO-8859-1"?>\n<!DOCTYPE dblp SYSTEM "dblp.dtd">\n<dblp>\n'


def dblp_entry(key, title, year=2021, venue="SOSP", doi=None, tag="inproceedings", extra=""):
    where = "journal" if key.startswith("journals/") else "booktitle"
    link = f'<ee type="oa">https://doi.org/{doi}</ee>' if doi else ""
    return (
        f'<{tag} mdate="2022-01-01" key="{key}"><author orcid="0">J&uuml;rgen &Ouml;st</author><title>{title}.</title>'
        f"<pages>1-9</pages><year>{year}</year><{where}>{venue}</{where}>{extra}{link}</{tag}>\n"
    )


DBLP = (
    dblp_entry("conf/sosp/Ost21", "Forgetting caches in &Uuml;nix &amp; &Auml;ndere <i>Kernels</i>", doi="10.1145/1.21")
    + dblp_entry("homepages/1", "Home Page", tag="www")
    + dblp_entry("conf/sosp/Ost21w", "A workshop paper on forgetful caches", venue="PLOS@SOSP")
    + dblp_entry("conf/sosp/2021", "Proceedings of everything that was said", tag="proceedings")
    + dblp_entry("conf/nowhere/Ost21", "A paper of no venue that is on the list", venue="NOWHERE")
    + dblp_entry("conf/icc/Ost21", "Caches that forget in communications", venue="ICC")
    + dblp_entry("journals/tocs/Ost22", "Caches that forget, at length and again", 2022, "ACM Trans. Comput. Syst.")
    + dblp_entry(
        "journals/pacmpl/Ost22", "Types of forgetting that programs need", 2022, "PACMPL", extra="<number>POPL</number>"
    )
)


def s2orc(corpus, title="", text=PROSE, doi=None, dblp=None, licence=None, bibliography="[1] Someone 1999"):
    header = f"{title}\nSome Affiliation\n"
    body = f"{header}Abstract words.\nIntroduction\n{text}See [12] and (Knuth).\nDetails\nSmall.\n"
    body += f"References\n{bibliography}"

    def span(words, **attributes):
        start = body.index(words, len(header) if words != title else 0)
        return {"start": start, "end": start + len(words)} | ({"attributes": attributes} if attributes else {})

    spans = {
        "title": [span(title)] if title else None,
        "abstract": [span("Abstract words.")],
        "sectionheader": [span("Introduction", n="1"), span("Details", n="1.1"), span("References")],
        "paragraph": [span(f"{text}See [12] and (Knuth)."), span("Small.")],
        "bibref": [span("[12]"), span("(Knuth)")],
    }
    annotations = {name: None if value is None else json.dumps(value) for name, value in spans.items()}
    names = {"arxiv": None, "mag": "1", "dblp": dblp, "doi": doi}
    return {
        "corpusid": corpus,
        "externalids": names,
        "openaccessinfo": {"license": licence, "status": "GOLD"},
        "content": {"source": {"pdfurls": None}, "text": body, "annotations": annotations},
    }


def s2_paper(corpus, title, year=2021, venue="", **identifiers):
    names = {"DBLP": None, "DOI": None, "ArXiv": None, "CorpusId": str(corpus), **identifiers}
    return {"corpusid": corpus, "externalids": names, "title": title, "year": year, "venue": venue}


def pes2o(corpus, text, source="s2orc/train"):
    return {"id": str(corpus), "text": text, "source": source, "created": "2021-10-01", "version": "v2", "added": "x"}


TEI = """<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><titleStmt><title>{title}</title></titleStmt>
<sourceDesc><biblStruct><monogr><imprint><date when="{year}"/></imprint></monogr></biblStruct></sourceDesc></fileDesc>
</teiHeader><text><body><div><head>Introduction</head><p>{text}</p></div></body></text></TEI>"""


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def inputs(tmp_path):
    """Return folders for records (with the DBLP entries above) and full text, and a function that reads them."""
    for name in ("records", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "records" / "dblp.xml.gz").write_bytes(gzip.compress(f"{HEAD}{DBLP}</dblp>".encode("latin-1")))

    def read(strict=False, **settings):
        problems = Problems(strict)
        defaults = {"venues": LIST, "records": [str(tmp_path / "records")], "full_text": [str(tmp_path / "texts")]}
        return {d.id: d for d in Venues(**{**defaults, **settings}).documents(problems, 1)}, problems

    return tmp_path, read


def test_dblp_is_read_with_its_named_characters_and_without_its_dtd(tmp_path):
    (tmp_path / "dblp.xml").write_bytes(f"{HEAD}{DBLP}</dblp>".encode("latin-1"))
    problems = Problems()
    found = list(dblp_records(tmp_path / "dblp.xml", lambda key: "nowhere" not in key, problems))
    assert not problems.counts
    assert len(found) == 5
    assert found[0] == {
        "key": "conf/sosp/Ost21",
        "title": "Forgetting caches in Ünix & Ändere Kernels",
        "venue": "SOSP",
        "year": "2021",
        "number": "",
        "links": ["https://doi.org/10.1145/1.21"],
    }


def test_an_entity_reference_may_be_cut_by_any_chunk_end(tmp_path, monkeypatch):
    (tmp_path / "dblp.xml").write_bytes(f"{HEAD}{DBLP * 3}</dblp>".encode("latin-1"))
    whole = list(dblp_records(tmp_path / "dblp.xml", bool, Problems()))
    for size in (97, 101, 128, 211):
        monkeypatch.setattr("data_pipeline.sources.papers.dblp.CHUNK_BYTES", size)
        problems = Problems()
        assert list(dblp_records(tmp_path / "dblp.xml", bool, problems)) == whole
        assert not problems.counts


BOMB = '<?xml version="1.0"?>\n<!DOCTYPE dblp [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>\n<dblp>'
BROKEN_DUMPS = {
    "bomb.xml": (BOMB.encode() + dblp_entry("conf/sosp/X", "&b;").encode(), "refused XML (it declares entities"),
    "cut.xml": ((HEAD + DBLP)[:-30].encode(), "broken XML"),
    "cut.xml.gz": (gzip.compress((HEAD + DBLP * 50).encode())[:-9], "corrupt file"),
    "endless.xml": (HEAD.encode() + b"<article>" + b"<author>A</author>" * 1_000_000, "refused XML (no record ends"),
    "gone.xml.gz": (
        gzip.compress((HEAD + f"<www/><!-- {' ' * 2**20} -->" * 70).encode()),
        "refused XML (it expands too far",
    ),
    "text.xml": (HEAD.encode() + b"<article><title>" + b"x" * 18_000_000, "XML ("),
}


@pytest.mark.parametrize("name", BROKEN_DUMPS)
def test_a_broken_or_hostile_dump_is_named_and_what_came_before_stays(inputs, name):
    folder, read = inputs
    content, words = BROKEN_DUMPS[name]
    (folder / "records" / name).write_bytes(content)
    (folder / "texts" / "a.jsonl").write_bytes(lines(s2orc(7, doi="10.1145/1.21")))
    documents, problems = read()
    assert list(documents) == ["venues:conf/sosp/Ost21"]
    assert problems.counts.total() == 1
    assert f"records/{name}: near byte" in problems.lines[0]
    assert words in problems.lines[0]
    with pytest.raises(ValueError, match=name):
        read(strict=True)


PEAK = """
import resource, sys
from pathlib import Path
from data_pipeline.documents import Problems
from data_pipeline.sources.papers.dblp import dblp_records
count = sum(1 for _ in dblp_records(Path(sys.argv[1]), bool, Problems()))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_long_dump_takes_no_more_memory_than_a_short_one(tmp_path):
    peaks = []
    for times in (2, 20):
        path = tmp_path / f"{times}.xml.gz"
        with gzip.open(path, "wt", encoding="latin-1", compresslevel=1) as file:
            file.write(HEAD)
            for _ in range(times):
                file.write(DBLP * 600)
            file.write("</dblp>")
        child = subprocess.run(
            [sys.executable, "-c", PEAK, str(path)], capture_output=True, check=True, cwd=CONF.parent
        )
        count, peak = map(int, child.stdout.split())
        assert count == times * 600 * 6
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 8 * 1024  # KiB; the longer one has 25 MB more


def test_a_paper_is_its_sections_with_title_and_without_bibliography(inputs):
    folder, read = inputs
    record = s2orc(7, doi="10.1145/1.21", licence="CCBY")
    (folder / "texts" / "s2orc_00.gz").write_bytes(gzip.compress(lines(s2orc(1), record)))
    (document,) = read()[0].values()
    assert document.text == (
        "# Forgetting caches in Ünix & Ändere Kernels\n\nAbstract words.\n\n## Introduction\n\n"
        f"{PROSE.strip()} See and (Knuth).\n\n### Details\n\nSmall."
    )
    assert document.metadata == {
        "source": "venues",
        "category": "general_system",
        "origin": f"{folder}/texts/s2orc_00.gz: line 2",
        "venue": "SOSP",
        "rank": "A",
        "area": "software",
        "url": "https://doi.org/10.1145/1.21",
        "date": "2021-01-01",
        "licence": "CC-BY",
    }


def test_a_text_is_matched_by_dblp_key_doi_arxiv_corpus_id_or_title_and_year(inputs):
    folder, read = inputs
    (folder / "records" / "papers.jsonl").write_bytes(
        lines(
            s2_paper(11, "Another name for it", DOI="10.1145/1.21"),
            s2_paper(
                12,
                "An arXiv paper at a symposium",
                venue="ACM Symposium on Operating Systems Principles",
                ArXiv="2110.00001",
            ),
            {"title": "Memory that fades in networks", "venue": "NSDI", "year": 2020, "ee": "https://x.org/a"},
        )
    )
    (folder / "texts" / "a.jsonl").write_bytes(
        lines(
            s2orc(0, dblp="journals/tocs/Ost22"),
            pes2o(11, f"Forgetting caches\n{PROSE}\nReferences\n[1] Cited work"),
            {**s2orc(0), "externalids": {"ArXiv": "2110.00001v3"}},
            {"title": "MEMORY that fades -- in Networks!", "year": 2021, "text": PROSE},
            {"title": "Types of forgetting that programs need", "year": 2024, "text": PROSE},
        )
    )
    documents = read()[0]
    symposium, network = "venues:arxiv:2110.00001", next(name for name in documents if name.startswith("venues:title:"))
    assert set(documents) == {"venues:journals/tocs/Ost22", "venues:conf/sosp/Ost21", symposium, network}
    assert "Cited work" not in documents["venues:conf/sosp/Ost21"].text
    assert documents[network].metadata["venue"] == "NSDI"
    assert documents[network].metadata["url"] == "https://x.org/a"


def test_every_text_is_in_one_part_and_parts_may_be_read_in_any_order(inputs, monkeypatch):
    folder, _ = inputs
    monkeypatch.setitem(FILES_AT_ONCE, "tei", 2)
    keys = ("conf/sosp/Ost21", "conf/icc/Ost21", "journals/pacmpl/Ost22")
    for key in keys:
        (folder / "texts" / f"{key.replace('/', '_')}.xml").write_text(TEI.format(title="x", year=1, text=PROSE))
    (folder / "texts" / "a.jsonl").write_bytes(lines(s2orc(0, dblp="journals/tocs/Ost22")))
    source = Venues(LIST, [str(folder / "records")], [str(folder / "texts")], ranks=["A", "B", "C"])
    source.prepare(folder, Problems())
    parts = source.parts(folder)
    assert [part.split("/")[0] for part in parts] == ["lines", "tei", "tei"]
    ids = [d.id for part in reversed(parts) for d in source.read(part, folder, Problems())]
    assert sorted(ids) == sorted(f"venues:{key}" for key in (*keys, "journals/tocs/Ost22"))


def test_a_title_without_a_year_must_be_that_of_one_paper(inputs):
    folder, read = inputs
    twice = "A title that two papers have in common"
    records = [{"title": twice, "venue": "SOSP", "year": year, "key": f"conf/sosp/{year}"} for year in (2001, 2011)]
    (folder / "records" / "more.jsonl").write_bytes(lines(*records))
    once = {"title": "Types of forgetting that programs need", "text": PROSE}
    (folder / "texts" / "a.jsonl").write_bytes(lines({"title": twice, "text": PROSE}, once))
    assert set(read()[0]) == {"venues:journals/pacmpl/Ost22"}
    (folder / "texts" / "a.jsonl").write_bytes(lines({"title": twice, "text": PROSE, "year": 2010}))
    assert set(read()[0]) == {"venues:conf/sosp/2011"}


def test_records_of_any_layout_say_what_they_are():
    paper = paper_of({"title": "x", "year": "2021", "key": "conf/a/b", "ee": ["http://arxiv.org/abs/2110.00001v2"]})
    assert paper.keys == ("dblp:conf/a/b", "arxiv:2110.00001")
    within = {"content": {"source": {"oainfo": {"license": "CCBY", "status": "GOLD"}}, "text": "x"}}
    assert paper_of(within).licence == "CC-BY"
    assert paper_of(s2orc(3, title="A title in a span")).title == "A title in a span"
    assert paper_of({"title": 7, "year": [], "externalids": "none", "doi": {}, "venue": None}).keys == ()


def test_ranks_and_areas_choose_the_venues(inputs):
    folder, read = inputs
    keys = ("conf/sosp/Ost21", "conf/sosp/Ost21w", "conf/icc/Ost21", "journals/pacmpl/Ost22", "conf/nowhere/Ost21")
    (folder / "texts" / "a.jsonl").write_bytes(lines(*(s2orc(n, dblp=key) for n, key in enumerate(keys))))
    assert set(read()[0]) == {"venues:conf/sosp/Ost21", "venues:journals/pacmpl/Ost22"}
    assert set(read(ranks=["C"])[0]) == {"venues:conf/icc/Ost21"}
    with pytest.raises(ValueError, match=r"^records=.* no paper of a venue of ranks A, B"):
        read(areas=["databases"])
    with pytest.raises(ValueError, match=r"^venues=X: give rank"):
        read(venues={"X": "A"})
    with pytest.raises(ValueError, match=r"^ranks=.*D.*: give some of A, B, C"):
        read(ranks=["D"])
    with pytest.raises(ValueError, match=r"^areas=.*cooking.* is of no venue: give some of architecture, databases"):
        read(areas=["cooking"])


def test_of_several_texts_json_lines_come_before_tei_and_tei_before_pdf(inputs):
    folder, read = inputs
    tei = TEI.format(title="x", year=1, text=PROSE)
    (folder / "texts" / "10.1145_1.21.pdf").write_bytes(b"not even a PDF")
    (folder / "texts" / "conf_sosp_Ost21.grobid.tei.xml").write_text(tei)
    (document,) = read()[0].values()
    assert document.metadata["origin"].endswith("tei.xml")
    (folder / "texts" / "z.jsonl").write_bytes(lines(s2orc(1, doi="10.1145/1.21"), s2orc(2, doi="10.1145/1.21")))
    (document,) = read()[0].values()
    assert document.metadata["origin"].endswith("z.jsonl: line 1")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a/10.1145%2F3477132.3483541.pdf", "doi:10.1145/3477132.3483541"),
        ("a/10.1145_3477132.3483541.grobid.tei.xml", "doi:10.1145/3477132.3483541"),
        ("10.1145/3477132.3483541.PDF", "doi:10.1145/3477132.3483541"),
        ("acm/3477132.3483541.pdf", "doi:10.1145/3477132.3483541"),
        ("conf/sosp/Ost21.pdf", "dblp:conf/sosp/Ost21"),
        ("x/journals_tocs_Ost-22.tei.xml.gz", "dblp:journals/tocs/Ost-22"),
        ("x/2110.00001v3.pdf", "arxiv:2110.00001"),
        ("x/254640939.pdf", "corpusid:254640939"),
    ],
)
def test_a_files_name_may_say_which_paper_it_holds(name, key):
    assert key in keys_in_name(Path("/data") / name)


def test_a_name_that_says_nothing_is_no_key():
    assert keys_in_name(Path("/data/papers/final.pdf")) == []
    assert keys_in_name(Path("/data/2021/12.pdf")) == []


def test_files_whose_names_say_nothing_are_matched_by_what_is_in_them(inputs):
    folder, read = inputs
    by_title = TEI.format(title="Types of forgetting that programs need", year=2021, text=PROSE)
    (folder / "texts" / "one.tei.xml").write_text(by_title)
    (folder / "texts" / "two.tei.xml").write_text(TEI.format(title="A paper nobody listed", year=2021, text=PROSE))
    (folder / "texts" / "three.tei.xml").write_text("<TEI>")
    documents, problems = read()
    assert list(documents) == ["venues:journals/pacmpl/Ost22"]
    assert problems.counts == {"broken XML": 1}
    assert "three.tei.xml" in problems.lines[0]


def test_a_pdf_is_matched_by_the_first_lines_of_its_first_page(inputs, monkeypatch):
    from data_pipeline.sources.papers.pdf import PDFPaper

    folder, read = inputs
    (folder / "texts" / "final.pdf").write_bytes(b"%PDF")
    first = "Proceedings of the symposium\nTypes of Forgetting\nThat Programs Need\nA. Writer\n"
    paper = PDFPaper("Microsoft Word - final.doc", "10.9999/of.somewhere.else", [first + PROSE.replace(". ", ".\n")])
    monkeypatch.setattr("data_pipeline.sources.papers.venues.read_pdf", lambda *arguments, **settings: paper)
    (document,) = read()[0].values()
    assert document.id == "venues:journals/pacmpl/Ost22"
    assert "Operating systems forget" in document.text
    cites = PDFPaper("", "10.1145/1.21", paper.pages)  # the title says more than a DOI on the page
    monkeypatch.setattr("data_pipeline.sources.papers.venues.read_pdf", lambda *arguments, **settings: cites)
    assert list(read()[0]) == ["venues:journals/pacmpl/Ost22"]
    nameless = PDFPaper("", "10.1145/1.21", [PROSE])
    monkeypatch.setattr("data_pipeline.sources.papers.venues.read_pdf", lambda *arguments, **settings: nameless)
    assert list(read()[0]) == ["venues:conf/sosp/Ost21"]


def test_texts_too_short_to_be_papers_are_left_out(inputs):
    folder, read = inputs
    short = s2orc(1, text="Short. ", doi="10.1145/1.21")
    abstract = {**pes2o(2, PROSE, "s2ag/train"), "title": "Forgetting caches in Unix & Andere Kernels"}
    (folder / "texts" / "a.jsonl").write_bytes(lines(short, abstract))
    with pytest.raises(ValueError, match=r"^full_text=.*no text of the 3 papers"):
        read()
    (folder / "texts" / "conf_sosp_Ost21.xml").write_text(TEI.format(title="x", year=1, text="Short."))
    documents, problems = read()
    assert not documents
    assert problems.counts == {"no full text": 1}


def test_broken_lines_are_named_once_and_stepped_over(inputs):
    folder, read = inputs
    good = lines(s2orc(1, doi="10.1145/1.21"))
    (folder / "texts" / "a.jsonl").write_bytes(b'{"corpusid": \n[1]\n\n{"a": "\xff"}\n' + good + b"{")
    documents, problems = read()
    assert len(documents) == 1
    assert problems.counts == {"broken JSON": 3, "not a JSON object": 1}
    assert "texts/a.jsonl: line 1: broken JSON" in problems.lines[0]


def test_spans_that_lie_are_ignored():
    record = s2orc(1)
    for lie in ("[", "[1, null]", '[{"start": 5, "end": 1}]', '[{"start": 0, "end": 99999999}]', "[" * 100_000, 7):
        record["content"]["annotations"]["sectionheader"] = lie
        assert text_of(record).startswith("Abstract words.")
    record["content"]["annotations"] = None
    assert PROSE in text_of(record)
    assert "Someone 1999" not in text_of(record)
    assert text_of({"content": {"text": None}}) == text_of({"text": 7}) == ""


def test_paths_with_nothing_to_read_name_the_key(inputs):
    folder, read = inputs
    with pytest.raises(ValueError, match=r"^full_text=.*texts has no file that ends in"):
        read()
    with pytest.raises(ValueError, match=r"^records=.*nowhere does not exist"):
        read(records=[str(folder / "nowhere")])


def test_a_stopped_preparation_leaves_nothing(inputs, monkeypatch):
    folder, _ = inputs
    (folder / "texts" / "a.jsonl").write_bytes(lines(s2orc(7, doi="10.1145/1.21")))
    source = Venues(LIST, [str(folder / "records")], [str(folder / "texts")])
    scratch = folder / "scratch"
    scratch.mkdir()
    with monkeypatch.context() as broken:
        broken.setattr(
            "data_pipeline.sources.papers.venues.text_of", lambda record: (_ for _ in ()).throw(OSError("full"))
        )
        with pytest.raises(OSError, match="full"):
            source.prepare(scratch, Problems())
    assert list(scratch.iterdir()) == []
    source.prepare(scratch, Problems())
    assert source.parts(scratch) == ["lines/1-1"]


def test_a_full_disk_is_said_to_be_one_and_leaves_nothing(inputs, monkeypatch):
    folder, _ = inputs
    (folder / "texts" / "a.jsonl").write_bytes(lines(s2orc(7, doi="10.1145/1.21")))
    schema = f"PRAGMA max_page_count = 10; {paper_index.SCHEMA}"
    monkeypatch.setattr(paper_index, "SCHEMA", schema)
    more = "".join(dblp_entry(f"conf/sosp/A{n}", f"A paper of a long title, number {n}") for n in range(999))
    (folder / "records" / "more.xml").write_text(f"{HEAD}{more}</dblp>")
    scratch = folder / "scratch"
    scratch.mkdir()
    with pytest.raises(OSError, match="disk is full") as error:
        Venues(LIST, [str(folder / "records")], [str(folder / "texts")]).prepare(scratch, Problems())
    assert error.value.errno == errno.ENOSPC
    assert list(scratch.iterdir()) == []


def test_the_configuration_composes_with_the_list_and_every_default(inputs):
    folder, _ = inputs
    (folder / "texts" / "a.jsonl").write_bytes(lines(s2orc(7, doi="10.1145/1.21")))
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        overrides = [f"source.records={folder}/records", f"source.full_text=[{folder}/texts]"]
        config = compose("source/venues", overrides=overrides).source
    assert set(config) - {"_target_"} == set(Venues.__dataclass_fields__)
    built, plain = instantiate(config), Venues(LIST, [f"{folder}/records"], [f"{folder}/texts"])
    assert json.dumps(built.identity()) == json.dumps(plain.identity())
