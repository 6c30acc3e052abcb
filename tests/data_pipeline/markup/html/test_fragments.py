import time

import pytest

from data_pipeline.markup.html.fragments import markdown

CODE = '#!/bin/sh\nfor f in *; do\n\t\techo "$f"  # two  spaces\n\n    done\n'
ESCAPED = CODE.replace('"', "&quot;")


@pytest.mark.parametrize(
    ("html", "language"),
    [
        ("<pre><code>{}</code></pre>", ""),
        ('<pre class="lang-sh prettyprint-override"><code>{}</code></pre>', "sh"),
        ('<pre><code class="language-C++ hljs">{}</code></pre>', "c++"),
        ('<div class="highlight highlight-source-shell"><pre>{}</pre></div>', "shell"),
        ('<div class="language-bash highlighter-rouge"><div class="highlight"><pre>{}</pre></div></div>', "bash"),
        ('<div class="sourceCode"><pre class="sourceCode python"><code>{}</code></pre></div>', "python"),
        ('<pre class="brush: js; toolbar: false">{}</pre>', "js"),
        ("<!-- language: lang-js -->\n\n<pre><code>{}</code></pre>", "js"),
        ('<pre class="lang-none"><code>{}</code></pre>', ""),
        ('<div class="highlight notranslate"><pre>{}</pre></div>', ""),
    ],
)
def test_code_blocks_stay_as_they_are_with_their_language(html, language):
    text = markdown(f"<p>before</p>{html.format(ESCAPED)}<p>after</p>")
    assert text == f"before\n\n```{language}\n{CODE.rstrip()}\n```\n\nafter"


def test_highlighting_and_line_numbers_leave_the_code_alone():
    gutter = '<td class="linenos"><pre>1\n2</pre></td>'
    code = '<td class="code"><pre><span class="k">if</span> x:<br>    <span class="n">y</span>()\n</pre></td>'
    assert markdown(f"<table><tr>{gutter}{code}</tr></table>") == "```\nif x:\n    y()\n```"
    assert markdown('<pre><span class="lineno">1 </span>a = 1</pre>') == "```\na = 1\n```"


def test_a_fence_is_longer_than_any_in_the_code():
    assert markdown("<pre>```sh\nls\n```</pre>") == "````\n```sh\nls\n```\n````"
    assert markdown("<p><code>a`b</code> and <code>`c</code></p>") == "``a`b`` and `` `c ``"


def test_code_in_lists_in_lists_is_indented_under_its_item():
    html = """<ol><li><p>First:</p><pre><code>a
  b
</code></pre></li><li><p>Then</p><ul><li>deep <pre>x\n\n y</pre></li></ul></li></ol>"""
    assert markdown(html).splitlines() == [
        *("1. First:", "", "   ```", "   a", "     b", "   ```", ""),
        *("2. Then", "", "   - deep", "", "     ```", "     x", "", "      y", "     ```"),
    ]


def test_lists_keep_their_numbers_and_nesting():
    assert markdown("<ol start=3><li>c</li><li>d</li></ol>") == "3. c\n4. d"
    assert markdown("<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>") == "- a\n  - b\n- c"
    assert markdown("<ul><li>a</li><ul><li>wrong, but common</li></ul></ul>") == "- a\n  - wrong, but common"


def test_tables_keep_rows_columns_and_bars():
    html = """<table><caption>Signals</caption><thead><tr><th>Name</th><th>No</th></tr></thead>
    <tr><td><code>a|b</code></td><td>two<br>lines</td></tr><tr><td colspan=2>wide</td></tr></table>"""
    rows = ["| Name | No |", "| --- | --- |", r"| `a\|b` | two lines |", "| wide |  |"]
    assert markdown(html) == "Signals\n\n" + "\n".join(rows)


def test_entities_come_out_once():
    assert markdown("<p>&lt;b&gt; &amp;lt; &amp;amp; &eacute; &#x1F600; &hellip; a&nbsp;b &nosuch;</p>") == (
        "<b> &lt; &amp; é 😀 … a b &nosuch;"
    )
    assert markdown("<pre>a &lt; b &amp;&amp; c&nbsp;d</pre>") == "```\na < b && c d\n```"


def test_inline_marks_keep_their_space_outside():
    assert markdown("<p>a<b> bold </b>and <i>it</i>, 2<sup>10</sup>, x<sub>i+1</sub><b></b></p>") == (
        "a **bold** and *it*, 2^10, x_(i+1)"
    )
    assert markdown("<p>Press <kbd>Ctrl</kbd>+<kbd>C</kbd><br>now</p>") == "Press `Ctrl`+`C`\nnow"


def test_links_that_lead_somewhere_are_kept():
    assert markdown('<a href="https://x.org/a_(b)">see <code>b</code></a>') == "[see `b`](<https://x.org/a_(b)>)"
    assert markdown('<a href="https://x.org/">https://x.org</a>') == "https://x.org/"
    assert markdown('<a href="/questions/1">rel</a> <a href="javascript:x()">js</a>') == "rel js"
    assert markdown('<img src="data:image/png;base64,AAAA" alt="a graph">') == "a graph"


def test_headings_move_down_and_stop_at_six():
    assert markdown("<h1>A <code>b</code></h1><h5>C</h5>", heading_offset=2) == "### A `b`\n\n###### C"


def test_scripts_and_empty_pages_give_nothing():
    assert markdown("<script>x</script><style>y</style><p> </p>") == markdown("") == markdown("<!-- c -->") == ""
    assert markdown("\0a\x08b\ud800c") == "abc"
    assert markdown(b"\xff<p>caf\xc3\xa9") == "\ufffd\n\ncafé"
    assert markdown('<?xml version="1.0" encoding="utf-16"?><p>x</p>') == "x"


def test_code_keeps_the_indentation_of_its_first_line():
    assert markdown("<pre><code>\n    x\n  y\n</code></pre>") == "```\n    x\n  y\n```"


@pytest.mark.parametrize("html", ["<b>" * 1500, "<div>" * 1500, "<ul><li>" * 750, "<table><tr><td>" * 500])
def test_text_under_deep_elements_is_kept(html):
    assert markdown(f"<p>a</p>{html}x").strip("*").endswith("x")


@pytest.mark.parametrize("html", ["<div>" * 100_000, "<b><i>" * 50_000, "<blockquote><p>" * 30_000])
def test_elements_too_deep_for_the_parser_are_refused(html):
    with pytest.raises(ValueError, match="nested too deep"):
        markdown(f"<p>a</p>{html}x")


@pytest.mark.parametrize(
    "html", ["<p><" * 50_000, "<table><tr><td>x<td colspan=99999999>y", "<table><tr><td colspan=99999><td>" * 200]
)
def test_hostile_pages_take_bounded_time_and_space(html):
    start = time.process_time()
    assert len(markdown(html)) < 1000 + 10 * len(html)
    assert time.process_time() - start < 5
