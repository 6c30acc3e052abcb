import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.rewriting.sections import blocks, cut, prose, title_of

LINES = st.sampled_from(["# One", "## Two", "words that say something. And more!", "", "```sh", "```", "~~~", "    x"])


@given(st.lists(LINES, max_size=40).map("\n".join), st.integers(20, 200))
def test_the_parts_are_the_text_and_no_code_block_is_cut(text, characters):
    parts = cut(text, characters, 50)
    assert "".join(part.text for part in parts) == text
    assert [part.number for part in parts] == list(range(len(parts)))
    for code in (block.text for block in blocks(text) if block.kind == "code"):
        assert any(code in part.text for part in parts)


@given(st.text(alphabet="ab .\n", max_size=400), st.integers(20, 60))
def test_prose_alone_keeps_to_the_length_asked_for(text, characters):
    assert all(len(part.text) <= characters for part in cut(text, characters, 0))
    assert "".join(part.text for part in cut(text, characters, 0)) == text


def test_parts_begin_at_headings_and_know_their_path():
    text = "intro\n\n# A\n\n" + "a " * 30 + "\n\n## B\n\n" + "b " * 30 + "\n\n## C\n\n" + "c " * 30 + "\n\n# D\n\nd\n"
    parts = cut(text, 90, 20)
    assert [part.text.split("\n", 1)[0] for part in parts] == ["intro", "## B", "## C"]
    assert [part.section for part in parts] == ["", "A > B", "A > C"]
    assert parts[1].before == ("a " * 30).strip()[-20:]


def test_short_sections_share_a_part():
    assert len(cut("# A\n\na\n\n# B\n\nb\n", 100, 0)) == 1


def test_a_heading_stays_with_what_is_under_it():
    parts = cut("# A\n\n" + "word " * 20 + "\n\n" + "more " * 20 + "\n", 104, 0)
    assert parts[0].text.startswith("# A\n\nword")
    assert [part.section for part in parts] == ["A", "A"]


@pytest.mark.parametrize(
    "code",
    [
        "```sh\n# no heading\n\necho\n```\n",
        "~~~\n```\n# no heading\n~~~\n",
        "````md\n```\n# no heading\n```\n````\n",
        "   ```\n# no heading\n   ```\n",
        "> ```\n> # no heading\n> ```\n",
        "```\n# never closed\n",
    ],
)
def test_what_looks_like_a_heading_in_code_is_none(code):
    text = f"# A\n\nwords\n\n{code}"
    assert [block.kind for block in blocks(text)] == ["heading", "paragraph", "code"]
    assert prose(text) == "# A\n\nwords\n\n"


def test_inline_code_of_three_ticks_opens_no_block():
    assert [block.kind for block in blocks("```x``` is code\n\n# A\n")] == ["paragraph", "heading"]


def test_a_paragraph_that_is_too_long_is_cut_at_lines_then_at_sentences():
    assert [p.text for p in cut("one two\nthree four\nfive six\n", 20, 0)] == ["one two\nthree four\n", "five six\n"]
    assert [p.text for p in cut("One two three. Four five six.", 20, 0)] == ["One two three. ", "Four five six."]


def test_the_title_is_the_first_heading():
    assert title_of("words\n\n## The *title* ##\n\n# other\n") == "The *title*"
    assert title_of("none") == ""
