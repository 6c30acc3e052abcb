import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from data_pipeline.card import write_card
from tests.data_pipeline.card.conftest import document, sample, step

Write = Callable[..., Path]
PNG = b"\x89PNG"


def page(folder: Path) -> str:
    write_card(folder, "A corpus", 4.0)
    return (folder / "corpus.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables' rows, without headers."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = [number for number, line in enumerate(lines) if set(line) <= set("|-:")]
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


@pytest.fixture(autouse=True)
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures without rendering them, which is slow."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: file.write(PNG))


def test_the_composition_names_kinds_once_and_sums_up(corpus: Write) -> None:
    documents = [document(n, source="stackexchange", category="debug", length=320_000) for n in range(10)]
    documents += [document(n, source="arxiv", category="general_system", length=500_000) for n in range(8)]
    documents += [document(n, source="venues", category="general_system", length=1_000_000) for n in range(2)]
    text = page(corpus(documents))
    assert rows(section(text, "Composition")) == [
        ["**General System**", "arxiv", "8", "4.0 MB", "1.0 M", "43.5%"],
        ["", "venues", "2", "2.0 MB", "500.0 K", "21.7%"],
        ["**Debug Capability**", "stackexchange", "10", "3.2 MB", "800.0 K", "34.8%"],
        ["**Total**", "", "20", "9.2 MB", "2.3 M", "100%"],
    ]
    assert "20 documents, 9.2 MB of text in UTF-8, about 2.3 M tokens (estimated, at 4 bytes a token)" in text


def test_a_corpus_of_nothing_has_a_card_that_says_which_step_removed_it(corpus: Write) -> None:
    text = page(corpus([], [step("quality", (5, 500), (0, 0), {"short": {"man": (5, 500)}})]))
    assert "holds no document" in text
    assert ["quality", "5", "5", "100%", "500 B", "500 B", "0 B", "0 B", "100%"] in rows(section(text, "By step"))


def test_what_is_cut_is_told_apart_from_what_is_dropped(corpus: Write) -> None:
    spans = step("exact_spans", (100, 10_000), (90, 6_000), {"exact_spans": {"man": (7, 700), "web": (3, 300)}})
    grew = step("masks", (90, 6_000), (90, 6_050), {}, counts={"masked_email": 1234})
    text = section(page(corpus([document(1)], [spans, grew])), "By step")
    assert rows(text) == [
        ["exact_spans", "100", "10", "10.0%", "10.0 kB", "1.0 kB", "3.0 kB", "6.0 kB", "40.0%"],
        ["masks", "90", "0", "0%", "6.0 kB", "0 B", "-50 B", "6.0 kB", "-0.83%"],
        ["**exact_spans**", "exact_spans", "10", "10.0%", "1.0 kB", "man 7, web 3"],
    ]
    assert "masked_email 1,234" in text


def test_reasons_beyond_the_table_are_summed(corpus: Write) -> None:
    reasons = {f"language {n:03d}": {"web": (1, 10)} for n in range(100)}
    text = section(page(corpus([document(1)], [step("language", (200, 2000), (100, 1000), reasons)])), "By step")
    assert ["", "80 more reasons", "80", "40.0%", "800 B", ""] in rows(text)


def test_quantiles_are_within_the_width_of_a_bin(corpus: Write) -> None:
    text = page(corpus([document(n, length=n * 1000) for n in range(1, 1001)]))
    [name, documents, shortest, *quantiles, longest, mean] = rows(section(text, "Lengths"))[0]
    assert (name, documents, shortest, longest, mean) == ("Commands", "1,000", "1.0 kB", "1.0 MB", "500.5 kB")
    read = [float(quantile.removesuffix(" kB")) for quantile in quantiles]
    assert read == pytest.approx([50, 250, 500, 750, 950], rel=0.012)


def test_dates_are_told_by_month_or_by_year(corpus: Write) -> None:
    short = [document(n, date=f"2024-{n:02d}-03T10:00:00Z", length=10) for n in (2, 3, 3)]
    undated = [document(7), document(8, date="yesterday")]
    text = section(page(corpus(short + undated)), "By month")
    assert rows(text) == [["2024-02", "1", "10 B", "1"], ["2024-03", "2", "20 B", "2"]]
    assert "1 document (20.0%) without a date. 1 document (20.0%) with a date that cannot be read." in text


def test_twenty_years_and_fifteen_sources_are_told_by_year_and_the_smaller_sources_together(corpus: Write) -> None:
    documents = [
        document(20 * s + y, source=f"source {s:02d}", date=f"{2005 + y}-06", length=100 - s)
        for s in range(15)
        for y in range(20)
    ]
    folder = corpus(documents)
    text = section(page(folder), "By month")
    assert rows(text)[0] == ["2005", "15", "1.4 kB", *["1"] * 6, "9"]
    assert len(rows(text)) == 20
    assert "source 05 | others |" in text


def test_a_mistaken_date_does_not_stretch_the_years(corpus: Write) -> None:
    documents = [document(n, date="2020-01-01") for n in range(20)] + [document(99, date="0001-01-01")]
    text = page(corpus(documents))
    assert "1 document dated over 30 years from the median date: not shown." in text
    assert [row[0] for row in rows(section(text, "By month"))] == ["2020-01"]
    assert "Dates are of 2020-01." in text


def test_licences_are_told_by_category_and_unknown_ones_named(corpus: Write) -> None:
    documents = [document(n, licence="CC-BY-SA-4.0", category="debug") for n in range(3)]
    documents += [document(7, licence="MIT"), document(8, licence="", category="debug")]
    text = section(page(corpus(documents)), "Licences")
    assert rows(text) == [
        ["CC-BY-SA-4.0", "3", "3.0 kB", "60.0%", "3.0 kB", ""],
        ["MIT", "1", "1.0 kB", "20.0%", "", "1.0 kB"],
        ["unknown", "1", "1.0 kB", "20.0%", "1.0 kB", ""],
    ]
    assert "80.0% says" in text


def test_more_licences_than_there_is_room_for_are_summed(corpus: Write) -> None:
    text = section(page(corpus([document(n, licence=f"licence {n}") for n in range(1500)])), "Licences")
    assert len(rows(text)) == 42
    assert ["over 960 more", "1,460", "1.5 MB", "97.3%", "1.5 MB"] in rows(text)


def test_without_licences_the_page_says_so(corpus: Write) -> None:
    assert section(page(corpus([document(1)])), "Licences").strip() == "No document says what licence it is under."


def test_qualities_are_counted_where_there_are_labels(corpus: Write) -> None:
    documents = [document(n, quality=quality) for n, quality in enumerate([0.2, 3.1, 2.9, 4.0, None])]
    text = section(page(corpus(documents)), "Quality")
    assert rows(text) == [["Commands", "4", "2.50", "25.0%", "50.0%", "25.0%"]]


def test_sixty_categories_have_a_row_each(corpus: Write) -> None:
    documents = [document(n, category=f"topic_{n:02d}", length=100 + n) for n in range(60)]
    text = page(corpus(documents))
    assert len(rows(section(text, "Composition"))) == 61
    assert rows(section(text, "Lengths"))[-1][:2] == ["**All**", "60"]


def test_no_name_breaks_a_table(corpus: Write) -> None:
    name = "a|b `c`\n<b>*d*</b> $x$ 日本 \x1b[31m\u202e"
    removed = step("quality", (3, 300), (1, 100), {name: {name: (2, 200)}}, counts={name: 1})
    text = page(corpus([document(1, source=name, category=name, licence=name, date="2024-01")], [removed]))
    shown = r"a\|b \`c\` &lt;b&gt;\*d\*&lt;/b&gt; \$x\$ 日本 ␛\[31m\\u202e"
    assert rows(section(text, "Composition"))[0][1] == shown
    assert rows(section(text, "By step"))[1][1] == shown
    assert rows(section(text, "Licences"))[0][0] == shown
    assert "<b>" not in text
    assert "\x1b" not in text


def test_no_text_of_a_sample_ends_its_block(corpus: Write) -> None:
    hostile = "```\n</details>\n`````python\r\n\x00\x1b[31m\u202e\ud800\rend\n" + "x" * 5000 + "\n" + "line\n" * 500
    dropped = [sample(hostile, reason="short", id="`|\n" + "y" * 500)]
    text = section(
        page(corpus([document(1)], [step("quality", (2, 2), (1, 1), {}, dropped_samples=dropped)])), "Samples"
    )
    fences = re.findall(r"^`{3,}.*$", text, re.MULTILINE)
    assert fences == ["``````text", "```", "`````python", "``````"]
    assert "␀␛[31m\\u202e\\ud800␍end" in text
    assert max(map(len, text.split("\n"))) < 400
    assert len(text.split("\n")) < 40


def test_samples_show_every_reason_before_one_twice(corpus: Write) -> None:
    dropped = [sample(f"text {n}", reason="a" if n < 18 else f"r{n}") for n in range(20)]
    kept = [sample(f"kept {n}") for n in range(20)]
    recorded = step("quality", (40, 400), (20, 200), {}, dropped_samples=dropped, kept_samples=kept)
    text = section(page(corpus([document(1)], [recorded])), "Samples")
    assert re.findall(r"^\*\*(\w+)\*\*", text, re.MULTILINE) == ["a", "r18", "r19", "a", "a", "a", "a", "a"]
    assert text.count("kept ") == 4
    assert "<summary>quality: dropped 20 documents</summary>" in text


def test_problems_are_counted_over_tasks_and_the_first_are_quoted(corpus: Write) -> None:
    folder = corpus([document(1)])
    (folder / "problems").mkdir()
    for task in range(3):
        content = {
            "counts": {"broken record": 1000, "truncated": 1},
            "lines": [f"{task}.xml: line {n}" for n in range(9)],
        }
        (folder / "problems" / f"read-{task:05d}.json").write_text(json.dumps(content))
    text = section(page(folder), "Problems")
    assert rows(text) == [["read", "broken record", "3,000"], ["read", "truncated", "3"]]
    assert text.count(".xml") == 20
    assert "2.xml: line 1\n" in text


def test_the_report_on_labels_is_taken_in_with_its_pictures(corpus: Write) -> None:
    folder = corpus([document(1)])
    report = folder / "labels" / "report"
    report.mkdir(parents=True)
    (report / "agreement.md").write_text("# Agreement\n\nKappa 0.7\n\n![of categories](confusion.png)\n")
    for name in ("confusion.png", "quality.png"):
        (report / name).write_bytes(PNG)
    text = section(page(folder), "Labels")
    assert "### Agreement\n\nKappa 0.7" in text
    assert "![of categories](labels/report/confusion.png)" in text
    assert text.count("](labels/report/quality.png)") == 1
    assert text.count("confusion.png") == 1
