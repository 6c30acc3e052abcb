from pathlib import Path

import pytest
import yaml

from data_pipeline.sources.papers.paper_index import VenueList
from data_pipeline.sources.papers.papers import licence_of, paper_of

LIST = yaml.safe_load((Path(__file__).parents[4] / "conf/source/venue_list/ccf_2022.yaml").read_text())


def find(**record):
    venue = VenueList(LIST, ["A", "B", "C"], None).find(paper_of({"title": "x", **record}))
    return venue and venue.name


def test_venues_are_found_by_their_names_however_they_are_written():
    for name in (
        "SOSP",
        "Symposium on Operating Systems Principles",
        "Proceedings of the 28th ACM Symposium on Operating Systems Principles (SOSP '21)",
    ):
        assert find(venue=name) == "SOSP"
    assert find(venue="Proc. of the VLDB Endowment") == "VLDB"
    assert find(venue="IEEE Transactions on Computers") == "TC"
    assert find(venue="ACM Transactions on Computer Systems") == "TOCS"
    for name in ("", "IS", "IEEE Micro", "Symposium on Principles", "Journal of Operating Systems Principles"):
        assert find(venue=name) is None


def test_a_dblp_key_decides_and_workshops_do_not_count():
    assert find(key="conf/hotos/A21", venue="HotOS") == "HotOS"
    assert find(key="conf/pepm/A21", venue="PEPM@POPL") == "PEPM"
    assert find(key="conf/corr/A21", venue="SOSP") is None
    assert find(key="conf/icse/A21", venue="ICSE (Companion Volume)") is None
    assert find(key="conf/sosp/A21", venue="KISV@SOSP") is None
    assert find(key="journals/pacmpl/A21", venue="x", number="OOPSLA2") == "OOPSLA"
    assert find(key="journals/pacmpl/A21", venue="x", number="HASKELL") is None


def test_the_shipped_list_is_sound_and_has_the_five_areas():
    VenueList(LIST, ["A", "B", "C"], ["architecture", "networks", "security", "software", "databases"])
    rank = {name: entry["rank"] for name, entry in LIST.items()}
    assert {rank[name] for name in ("SOSP", "OSDI", "NSDI", "FAST", "ASPLOS", "SIGMOD", "TOCS", "EuroSys")} == {"A"}
    assert {rank[name] for name in ("SoCC", "HotOS", "IMC", "ICDCS", "DSN", "Middleware")} == {"B"}
    assert {rank[name] for name in ("HotNets", "CCGRID", "SYSTOR", "ICC", "MSR")} == {"C"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"X": {"rank": "A", "dblp": None, "names": []}}, "X: give rank"),
        ({"X": {"rank": "E", "area": "a", "dblp": [], "names": []}}, "X: give rank"),
        ({"X": {"rank": "A", "area": "a", "dblp": ["conf/sosp"], "names": []}}, "X has the DBLP key conf/sosp"),
        (
            {"X": {"rank": "A", "area": "a", "dblp": [], "names": ["Symposium on Operating Systems Principles"]}},
            "X has the name",
        ),
    ],
)
def test_a_list_that_contradicts_itself_names_the_venue(change, words):
    with pytest.raises(ValueError, match=f"^venues={words}"):
        VenueList({**LIST, **change}, ["A"], None)


def test_licences_are_spdx_where_they_are_determined():
    assert licence_of("https://creativecommons.org/licenses/by-nc-sa/4.0/") == "CC-BY-NC-SA-4.0"
    assert licence_of("CCBYNC") == licence_of("cc-by-nc") == "CC-BY-NC"
    assert licence_of("publisher-specific") == "publisher-specific"
    assert licence_of("") is None
