"""The comparison's page in a real browser: figures, tables, keyboard, screen reader, dark, and no network."""

from pathlib import Path

import pytest

from evaluation.compare.comparison import compare_runs
from evaluation.compare.finding import find_runs
from evaluation.compare.job import write
from evaluation.compare.reading import read_run
from tests.evaluation.compare.browser import Page, find_browser, opened
from tests.evaluation.compare.written_runs import write_run, write_sweep

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")

SIZES = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])"
ROWS = "[...document.querySelectorAll('table')].map(t => t.tBodies[0].rows.length)"
COLOR = "getComputedStyle(document.querySelector('{}')).{}"
SCHEME = "prefers-color-scheme"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("compared")
    write_sweep(folder / "sweep", {"true": [3.0, 3.1, 3.05], "false": [3.5, 3.62, 3.54]})
    odd = {"model.mixers": "a<b&\"'|"}
    run = write_run(folder / "odd", 3.3, changes=odd)
    (run / "wandb").mkdir()
    (run / "wandb" / "run-id.txt").write_text("abcd1234")
    (run / "wandb" / "run-url.txt").write_text("https://wandb.ai/us/palimpsest/runs/abcd1234")
    write(compare_runs([read_run(each) for each in find_runs([str(folder)])]), folder / "out")
    with opened(folder / "out" / "compare.html", BROWSER) as found:
        yield found


def test_it_loads_nothing_and_complains_of_nothing(page):
    asked = [event["request"]["url"] for event in page.of("Network.requestWillBeSent")]
    assert [Path(url).name for url in asked if not url.startswith("data:")] == ["compare.html"]
    assert all(url.startswith(("file:", "data:")) for url in asked)
    for kind in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert page.of(kind) == []


def test_what_would_load_something_is_blocked(page):
    page.value("new Promise(done => {const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.1:9/x.png'})")
    blocked = [event["entry"]["text"] for event in page.of("Log.entryAdded")]
    assert any("Content Security Policy" in text for text in blocked)
    page.events.clear()


def test_every_figure_has_a_size_and_a_line_for_each_setting(page):
    sizes = page.value(SIZES.format("figure > svg"))
    assert len(sizes) == 5  # final, by tokens, by time, of training, by position
    assert all(width > 300 and height > 60 for width, height in sizes)
    names = "[...document.querySelectorAll('figure > svg')].map(s => s.textContent.match(/output_gate=true/g).length)"
    assert all(number >= 1 for number in page.value(names))
    paths = "[...document.querySelectorAll('#held_out path')].filter(p => p.getBoundingClientRect().width > 100).length"
    assert page.value(paths) >= 3  # of three settings
    assert page.value("[...document.querySelectorAll('[id]')].length == new Set([...document.querySelectorAll('[id]')]"
                      ".map(e => e.id)).size")  # fmt: skip


def test_tables_have_their_rows_and_text_is_shown_as_it_is(page):
    rows = page.value(ROWS)
    assert rows[0] == 3  # settings
    assert rows[-1] == 7  # runs
    text = page.value("document.querySelector('table').innerText")
    assert "a<b&\"'|" in text
    assert "baseline" in text
    link = "[...document.querySelectorAll('td a')].map(a => a.href)"
    assert page.value(link) == ["https://wandb.ai/us/palimpsest/runs/abcd1234"]


def test_a_screen_reader_finds_figures_tables_and_headings_by_name(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in nodes:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    images = [name for role in ("image", "img") for name in named.get(role, [])]
    assert sum("Held-out loss against tokens. " in name for name in images) == 1
    assert all(images)
    assert "Settings, the lowest held-out loss first" in named["table"]
    assert {"columnheader", "rowheader", "main"} <= set(named)
    assert "Comparison of 7 runs" in named["heading"]


def test_the_keyboard_reaches_tables_numbers_and_links(page):
    page.value("document.body.focus()")
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.value("document.activeElement.className || document.activeElement.tagName"))
    assert seen[0] == "skip"
    assert {"scroll", "SUMMARY", "A"} <= set(seen)
    assert page.value("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex == 0)")
    page.value("document.querySelector('summary').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('details').open")
    assert page.value(SIZES.format("details[open] table"))[0][1] > 50


@pytest.mark.parametrize(("scheme", "is_dark"), [("dark", True), ("light", False)])
def test_text_of_page_and_figures_contrasts_with_the_background(page, scheme, is_dark):
    page.call("Emulation.setEmulatedMedia", features=[{"name": SCHEME, "value": scheme}])
    background = luminance(page.value(COLOR.format("body", "backgroundColor")))
    assert (background < 0.1) == is_dark
    for selector, color in (
        ("body", "color"),
        ("figcaption", "color"),
        ("td a", "color"),
        ("figure > svg text", "fill"),
    ):
        low, high = sorted((background, luminance(page.value(COLOR.format(selector, color)))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector  # WCAG 2.1, level AA


def luminance(color: str) -> float:
    """Return the relative luminance of rgb(...), by WCAG 2.1."""
    parts = [float(part) / 255 for part in color.strip("rgba()").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_narrow_window_scrolls_tables_and_not_the_page(page):
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    assert page.value("document.documentElement.scrollWidth") <= 400
