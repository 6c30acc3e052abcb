import pytest

from data_pipeline.documents import Unreadable
from data_pipeline.licences import licence_of_address, licence_of_text
from data_pipeline.markup.html.web_page import decode, extract, http_date

PROSE = "The scheduler picks the task with the least virtual runtime, and charges it for the time that it has run. "


def markdown(body, head="", elements=10_000):
    return extract(f"<html><head>{head}</head><body>{body}</body></html>", elements).markdown


def page(inner):
    return markdown(f"<main><h1>Title</h1><p>{PROSE * 3}</p>{inner}<p>{PROSE}</p></main>")


CODE = "def run(task):\n    if task.vruntime < least:\n\n        return task  # <here>\n    return None"
ESCAPED = CODE.replace("<", "&lt;").replace(">", "&gt;")
LINES = ESCAPED.split("\n")
HIGHLIGHTED = {
    "plain": f"<pre>{ESCAPED}</pre>",
    "spans in spans": '<pre><code><span class="k">def <b>run</b></span>'
    + ESCAPED[len("def run") :]
    + "\n</code></pre>",
    "line spans": "<pre>"
    + "".join(f'<span class="line"><span class="cl">{line}\n</span></span>' for line in LINES)
    + "</pre>",
    "numbers in spans": "<pre>"
    + "".join(f'<span class="lineno">{n} </span>{line}\n' for n, line in enumerate(LINES))
    + "</pre>",
    "breaks": f"<pre>{'<br>'.join(LINES)}</pre>",
    "divs": "<pre>" + "".join(f"<div>{line}</div>" for line in LINES) + "</pre>",
    "list": f'<pre><ol class="linenums">{"".join(f"<li>{line}</li>" for line in LINES)}</ol></pre>',
    "gutter table": '<table class="highlighttable"><tr><td class="linenos"><div class="linenodiv"><pre>1\n2</pre></div>'
    "</td>"
    f'<td class="code"><div><pre><span></span>{ESCAPED}\n</pre></div></td></tr></table>',
    "table without pre": '<table><tr><td class="gutter"><div class="line">1</div></td><td class="code"><div>'
    + "".join(f'<div class="line"><code>{line}</code></div>' for line in LINES)
    + "</div></td></tr></table>",
    "nested pre": f"<pre><pre>{ESCAPED}</pre></pre>",
    "copy button": f"<pre><button>Copy</button>{ESCAPED}</pre>",
    "in a quotation": f"<blockquote><div><p>So:</p><div><pre>{ESCAPED}</pre></div></div></blockquote>",
    "in a layout table": f"<table><tr><td>Note</td><td><pre>{ESCAPED}</pre></td></tr></table>",
    "in a definition": f"<dl><dt>run</dt><dd>Runs it:<pre>{ESCAPED}</pre></dd></dl>",
}


@pytest.mark.parametrize("kind", HIGHLIGHTED)
def test_code_keeps_every_line_and_indentation(kind):
    assert f"```\n{CODE}\n```\n" in page(HIGHLIGHTED[kind])


def test_code_in_a_list_keeps_its_place_and_indentation():
    text = page(f"<ol><li>First this:<pre>{ESCAPED}</pre>then that.</li><li>Second.</li></ol>")
    inner = "\n".join(f"   {line}" if line else "" for line in f"```\n{CODE}\n```".split("\n"))
    assert f"1. First this:\n\n{inner}\n\n   then that.\n2. Second." in text


@pytest.mark.parametrize(
    "block",
    [
        '<div class="highlight-python notranslate"><div class="highlight"><pre>x</pre></div></div>',
        '<pre><code class="language-python hljs">x</code></pre>',
        '<pre class="brush: python">x</pre>',
        '<pre data-lang="python">x</pre>',
        '<div class="highlight-source-python"><pre>x</pre></div>',
    ],
)
def test_the_language_of_code_is_what_the_markup_says(block):
    assert "```python\nx\n```" in page(block)


def test_a_fence_is_longer_than_those_in_the_code():
    assert "````\n```\nx\n```\n````" in page("<pre>```\nx\n```</pre>")


def test_tables_keep_their_cells_and_boxes_around_text_are_no_tables():
    rows = "<tr><th>Flag</th><th>Meaning</th></tr><tr><td><code>-a|-b</code></td><td>all_of <b>it</b></td></tr>"
    text = page(f"<table>{rows}</table><table><tr><td>Note</td><td>{PROSE}</td></tr></table>")
    assert "| Flag | Meaning |\n| --- | --- |\n| `-a\\|-b` | all_of **it** |" in text
    assert f"Note\n\n{PROSE.strip()}" in text


def test_headings_stay_whatever_the_boxes_and_ids_around_them():
    sections = "".join(
        f'<div class="sect"><div class="meta-tags"><div><div><h2 class="t">{name}<a href="#x">¶</a></h2></div></div>'
        "</div>"
        f'<p>{PROSE}</p></div><section id="shared-{name.lower()}"><h3>On {name}</h3><p>{name}: {PROSE}</p></section>'
        for name in ("Menu", "Footers", "Tags")
    )
    text = markdown(f"<div><h1>Title</h1><p>{PROSE}</p>{sections}</div>")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Title", "## Menu", "### On Menu", "## Footers", "### On Footers", "## Tags", "### On Tags"]


def test_menus_and_headings_with_nothing_under_them_stay_out():
    links = "<ul>" + "".join(f'<li><a href="/{n}">Link number {n}</a></li>' for n in range(9)) + "</ul>"
    text = markdown(
        f"<nav>{links}</nav><h1>Title</h1><p>{PROSE * 4}</p><h2>See also</h2>{links}<h2>End</h2><p>{PROSE}</p>"
    )
    assert "Link number" not in text
    assert "See also" not in text
    assert "## End" in text


def test_names_are_written_as_they_are():
    name = "CONFIG_FOO_BAR[0] <none> *ptr C:\\_temp &amp;lt; 1. ~x"
    assert "CONFIG_FOO_BAR[0] <none> *ptr C:\\_temp &lt; 1. ~x" in page(
        f"<p>{name.replace('<none>', '&lt;none&gt;')} here</p>"
    )


def test_characters_that_xml_has_not_are_dropped():
    body = "<main><p>" + PROSE * 3 + "</p><div>a&#1;b&#x1f;c&#11;d\x02e &#123;&#x41;</div><pre>p&#8;q\x1br</pre></main>"
    found = extract(decode(f"<html><body>{body}</body></html>".encode(), ""), 99).markdown
    assert "abcde {A" in found
    assert "```\npqr\n```" in found


def test_loose_text_between_blocks_and_terms_stays():
    term = "<dl><dt><code>-d</code></dt><dd>Daemonize, exclusive with <code>-v</code> and <em>not</em> more.</dd></dl>"
    text = page(f"<p>{PROSE * 9}</p>{term}<div>Before <b>it</b><p>{PROSE}</p>after <code>it</code> all</div>")
    assert "`-d`\n\nDaemonize, exclusive with `-v` and *not* more.\n\nBefore **it**\n\n" in text
    assert "\n\nafter `it` all\n\n" in text


def test_a_title_outside_the_main_part_is_put_above_it():
    assert markdown(f"<main><p>{PROSE * 4}</p></main>", "<title>The title</title>").startswith("# The title\n\nThe sch")
    assert markdown(f"<header><h1>A b</h1></header><main><h2>B</h2><p>{PROSE * 4}</p></main>").count("A b") == 1


def test_a_page_that_quotes_our_mark_multiplies_nothing():
    text = page("<pre>the code</pre><p>" + "zqcode0zq zqcode7zq " * 50 + "</p>")
    assert text.count("the code") == 1
    assert "zqcode" not in text


@pytest.mark.parametrize(
    "body",
    [
        "<div>" * 50_000,
        "<b>" * 50_000,
        "<pre>" * 20_000 + "x",
        "<table><tr><td>" * 5000,
        "<ul><li>x" * 5000,
        "<!--" * 9999,
        "",
    ],
    ids=["div", "b", "pre", "table", "ul", "comment", "empty"],
)
def test_pages_nested_without_end_do_no_harm(body):
    assert len(markdown(body, elements=100_000)) < 100_000


@pytest.mark.parametrize("body", ["<p>x</p>" * 200, f"<p>{'<i>x</i>' * 6000}</p>"])
def test_pages_of_too_many_elements_are_refused(body):
    with pytest.raises(Unreadable, match="too many elements"):
        markdown(body, elements=100 if "<p>x" in body else 10_000)


def test_entities_of_a_document_type_do_not_grow():
    bomb = '<!DOCTYPE html [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;"><!ENTITY c "&b;&b;&b;">]>'
    assert "aaaaaaaaaaaaa" not in extract(f"{bomb}<html><body><p>{PROSE * 3} &c;</p></body></html>", 999).markdown


@pytest.mark.parametrize(
    ("body", "charset"),
    [
        ("é日".encode(), ""),
        ("é日".encode(), "utf-8"),
        (b"\xef\xbb\xbf" + "é日".encode(), "latin-1"),
        ("é日".encode("utf-16"), ""),
        ('<meta charset="shift_jis">é日'.replace("é", "ｱ").encode("shift_jis"), ""),
        ("é日".encode("gb18030"), "gb2312"),
        ("é日".encode(), "no-such-charset"),
        ("é日".encode(), "hex"),
        ("é日".encode(), "us-ascii-broken"),
    ],
)
def test_a_page_is_decoded_by_mark_header_meta_or_utf8(body, charset):
    assert decode(body, charset).replace("ｱ", "é").endswith("é日")


def test_what_latin_1_pages_hold_is_what_browsers_show():
    assert decode(b"\x93quoted\x94 caf\xe9", "iso-8859-1") == "“quoted” café"


def test_one_broken_character_is_dropped_and_noise_is_refused():
    assert decode(b"a" * 2000 + b"\xff" + b"\0b", "utf-8") == "a" * 2000 + "b"
    with pytest.raises(Unreadable, match="undecodable text"):
        decode(bytes(range(128, 256)) * 50, "utf-8")


def test_date_and_licence_are_what_the_page_says():
    address = "https://creativecommons.org/licenses/by-sa/4.0/"
    head = (
        f'<meta property="article:published_time" content="2021-03-04T05:06:07Z"><link rel="license" href="{address}">'
    )
    found = extract(
        f"<html><head>{head}</head><body><p>{PROSE * 3}</p></body></html>",
        99,
    )
    assert (found.date, found.licence) == ("2021-03-04", "CC-BY-SA-4.0")
    nothing = extract(f"<html><head></head><body><p>On 3 May 2019 it was so. {PROSE * 3}</p></body></html>", 99)
    assert (nothing.date, nothing.licence) == ("", "")
    two = "".join(f'<a href="http://creativecommons.org/licenses/{kind}/3.0/">x</a>' for kind in ("by", "by-nc-nd"))
    assert extract(f"<html><body><p>{PROSE * 3}</p>{two}</body></html>", 99).licence == ""


def test_http_dates_become_iso_ones_and_others_nothing():
    assert http_date("Wed, 21 Oct 2015 07:28:00 GMT") == "2015-10-21T07:28:00Z"
    assert http_date("Wed, 21 Oct 2015 09:28:00 +0200") == "2015-10-21T07:28:00Z"
    assert [http_date(wrong) for wrong in ("", "yesterday", "Wed, 99 Oct 2015 07:28:00 GMT")] == ["", "", ""]


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (
            "MIT License\n\nCopyright\n\nPermission is hereby granted, free of charge, to any\nperson obtaining a copy",
            "MIT",
        ),
        ("  Apache License\n   Version 2.0, January 2004\n", "Apache-2.0"),
        ("Attribution 4.0 International\n\n=====\n\nCreative Commons Corporation", "CC-BY-4.0"),
        ("Creative Commons Attribution-ShareAlike 4.0 International Public License", "CC-BY-SA-4.0"),
        ("GNU LESSER GENERAL PUBLIC LICENSE\n Version 3, 29 June 2007", "LGPL-3.0-only"),
        ("GNU GENERAL PUBLIC LICENSE\n Version 3, 29 June 2007 ... GNU Lesser General Public License", "GPL-3.0-only"),
        ("Redistribution and use in source and binary forms, ... Neither the name of", "BSD-3-Clause"),
        ("All rights reserved.", None),
    ],
)
def test_licences_are_known_by_their_first_words(text, licence):
    assert licence_of_text(text) == licence


@pytest.mark.parametrize(
    ("address", "licence"),
    [
        ("https://creativecommons.org/licenses/by-nc-sa/3.0/us/", "CC-BY-NC-SA-3.0"),
        ("//creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
        ("http://www.gnu.org/licenses/fdl-1.3.html", "GFDL-1.3-or-later"),
        ("https://creativecommons.org/about", None),
    ],
)
def test_licences_are_known_by_their_addresses(address, licence):
    assert licence_of_address(address) == licence
