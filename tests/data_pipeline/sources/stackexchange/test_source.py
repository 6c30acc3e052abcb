import tracemalloc
from dataclasses import fields
from pathlib import Path
from xml.sax.saxutils import quoteattr

import py7zr
import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from data_pipeline.documents import Problems
from data_pipeline.sources.stackexchange.source import StackExchange

HEAD = '\ufeff<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n'
TAIL = "</posts>"


def post(kind, identity, body="<p>text</p>", **attributes):
    """Return one line of Posts.xml in the dump's format."""
    given = {
        "Id": identity,
        "PostTypeId": kind,
        "CreationDate": "2019-05-01T10:20:30.123",
        "Score": 5,
        "ViewCount": 7,
        "Body": body,
        "OwnerUserId": 3,
        "LastActivityDate": "2020-01-01T00:00:00.000",
        "CommentCount": 0,
        "ContentLicense": "CC BY-SA 4.0",
    } | attributes
    values = " ".join(f"{name}={quoteattr(str(value))}" for name, value in given.items() if value is not None)
    return f"  <row {values} />\r\n"


def question(identity, title="How?", body="<p>question</p>", tags="<linux><bash>", **attributes):
    return post(1, identity, body, Title=title, Tags=tags, AnswerCount=1, **attributes)


def answer(identity, parent, body=None, **attributes):
    return post(2, identity, body or f"<p>answer {identity}</p>", ParentId=parent, **attributes)


def dump(folder, *rows, site="unix.stackexchange.com", tail=TAIL):
    path = folder / site / "Posts.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + "".join(rows) + tail, encoding="utf-8", newline="")
    return path


def archive(path, **members):
    """Write a .7z with each text under its name (`a__b` for a/b.xml)."""
    with py7zr.SevenZipFile(path, "w") as file:
        for name, text in members.items():
            file.writestr(text, f"{name.replace('__', '/')}.xml")
    return path


def read(paths, strict=False, **settings):
    problems = Problems(strict)
    paths = [str(path) for path in paths] if isinstance(paths, list) else str(paths)
    return list(StackExchange(paths, **settings).documents(problems, 1)), problems


def answers_of(document):
    return [line for line in document.text.splitlines() if line.startswith("answer")]


def test_a_question_has_its_accepted_answer_and_then_the_best(tmp_path):
    dump(
        tmp_path,
        question(
            1,
            "Why does `grep -c` &amp; wc differ?",
            "<p>They <b>do</b>:</p>\n<pre><code>a &lt; b\n  c</code></pre>\n",
            AcceptedAnswerId=4,
        ),
        answer(2, 1, Score=9),
        answer(3, 1, Score=30),
        answer(4, 1, Score=-2),
        answer(5, 1, Score=9),
        answer(6, 1, Score=0),
    )
    (document,), problems = read(tmp_path)
    assert document.text == (
        "# Why does `grep -c` &amp; wc differ?\n\nThey **do**:\n\n```\na < b\n  c\n```\n\n"
        "## Accepted answer\n\nanswer 4\n\n## Answer\n\nanswer 3\n\n## Answer\n\nanswer 2"
    )
    assert document.id == "stackexchange:unix/1"
    assert document.metadata == {
        "source": "stackexchange",
        "category": "debug",
        "origin": f"{tmp_path}/unix.stackexchange.com/Posts.xml: question 1",
        "url": "https://unix.stackexchange.com/questions/1",
        "date": "2019-05-01T10:20:30",
        "licence": "CC-BY-SA-4.0",
    }
    assert not problems.counts
    assert answers_of(read(tmp_path, answers=1)[0][0]) == ["answer 4"]
    assert answers_of(read(tmp_path, answers=9, minimum_score=-5)[0][0])[-1] == "answer 6"


def test_an_accepted_answer_that_is_missing_is_no_loss_of_the_others(tmp_path):
    dump(tmp_path, question(1, AcceptedAnswerId=99), answer(2, 1), question(3), answer(4, 3))
    assert [answers_of(document) for document in read(tmp_path)[0]] == [["answer 2"], ["answer 4"]]


def test_answers_are_found_wherever_they_lie(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.sources.stackexchange.source.NUMBERS_IN_A_PART", 2)
    monkeypatch.setattr("data_pipeline.sources.stackexchange.source.PENDING_BYTES", 1500)
    monkeypatch.setattr("data_pipeline.sources.stackexchange.dump.BLOCK_BYTES", 700)
    before = [answer(100 + number, number) for number in range(1, 10)]
    after = [answer(200 + number, number) for number in range(9, 0, -1)]
    dump(tmp_path, *before, *(question(number) for number in range(1, 10)), *after)
    scratch = tmp_path / "scratch"
    source = StackExchange(str(tmp_path / "unix.stackexchange.com"))
    problems = Problems()
    source.prepare(scratch, problems)
    parts = source.parts(scratch)
    assert len(parts) == 5
    found = {
        document.id: answers_of(document)
        for part in reversed(parts)
        for document in source.read(part, scratch, problems)
    }
    assert found == {f"stackexchange:unix/{n}": [f"answer {100 + n}", f"answer {200 + n}"] for n in range(1, 10)}
    assert not problems.counts


def test_deleted_closed_unanswered_and_low_posts_are_left_out(tmp_path):
    day = "2020-01-01T00:00:00.000"
    dump(
        tmp_path,
        *(question(1, DeletionDate=day), answer(2, 1)),
        *(question(3, ClosedDate=day), answer(4, 3)),
        question(5),
        *(question(7, Score=0), answer(8, 7)),
        *(question(9), answer(10, 9, DeletionDate=day), answer(11, 9, Score=0)),
        *(question(12), answer(13, 12), answer(14, 12, DeletionDate=day)),
        *(answer(15, 777), post(5, 16), post(4, 17, Score=None)),
        *(question(12, "again"), answer(13, 12)),
    )
    documents, problems = read(tmp_path)
    assert [(document.id, answers_of(document)) for document in documents] == [("stackexchange:unix/12", ["answer 13"])]
    assert "# How?" in documents[0].text
    assert not problems.counts


@pytest.mark.parametrize("written", ["<linux><c++>", "|linux|c++|"])
def test_tags_choose_questions_in_both_ways_of_writing(tmp_path, written):
    dump(tmp_path, question(1, tags=written), answer(2, 1), question(3, tags="<linux-kernel>"), answer(4, 3))
    assert [document.id for document in read(tmp_path, tags=["C++", "gdb"])[0]] == ["stackexchange:unix/1"]
    with pytest.raises(ValueError, match=r"^paths=.*tags"):
        read(tmp_path, tags=["c"])


def test_a_licence_not_stated_follows_from_the_date(tmp_path):
    dates = {
        1: "2011-04-07T23:59:59.999",
        3: "2011-04-08T00:00:00.000",
        5: "2018-05-01T00:00:00.000",
        7: "2018-05-02T00:00:00.000",
    }
    rows = [question(n, ContentLicense=None, CreationDate=date) for n, date in dates.items()]
    dump(
        tmp_path, *rows, *(answer(n + 1, n, CreationDate="2018-04-01T00:00:00.000", ContentLicense=None) for n in dates)
    )
    assert [document.metadata["licence"] for document in read(tmp_path)[0]] == [
        "CC-BY-SA-2.5 AND CC-BY-SA-3.0",
        "CC-BY-SA-3.0",
        "CC-BY-SA-3.0",
        "CC-BY-SA-3.0 AND CC-BY-SA-4.0",
    ]


def test_code_in_lists_and_images_without_words_come_out_right(tmp_path):
    code = '<pre class="lang-sh prettyprint-override"><code>if x; then\n    y &amp;&amp; z\nfi\n</code></pre>'
    image = '<p><img src="https://i.stack.imgur.com/x.png" alt="enter image description here"></p>'
    body = f"<ul>\n<li><p>Run</p>\n\n{code}</li>\n</ul>\n{image}\n<h1>Then</h1>"
    dump(tmp_path, question(1, body=body), answer(2, 1))
    assert read(tmp_path)[0][0].text == (
        "# How?\n\n- Run\n\n  ```sh\n  if x; then\n      y && z\n  fi\n  ```\n\n### Then\n\n## Answer\n\nanswer 2"
    )


BAD_ROWS = {
    "control character": (question(3).replace("question", "que\x03stion"), "broken XML"),
    "unknown entity": (question(3).replace("question", "&lol;"), "broken XML"),
    "missing quote": (question(3).replace('Title="How?"', 'Title="How?'), "broken XML"),
    "bad UTF-8": (question(3).replace("question", "quest\udcffion"), "broken XML"),
    "no Id": (post(1, None), "broken row"),
    "no number": (question("three"), "broken row"),
    "huge number": (question(10**18), "broken row"),
    "no parent": (post(2, 3), "broken row"),
    "too long": (question(3, body="x" * 2_500_000), "post too long"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_costs_that_row(tmp_path, case):
    row, kind = BAD_ROWS[case]
    path = dump(tmp_path, *(question(1), answer(2, 1)))
    before, after = HEAD + question(1) + answer(2, 1), question(5) + answer(6, 5) + TAIL
    path.write_bytes((before + row + after).encode(errors="surrogateescape"))
    documents, problems = read(tmp_path)
    assert [document.id for document in documents] == ["stackexchange:unix/1", "stackexchange:unix/5"]
    assert problems.counts == {kind: 1}
    place = "row Id=" if kind == "broken row" else f"byte {len(before.encode()) + 2}: {kind}"
    assert f"{path}: {place}" in problems.lines[0]
    with pytest.raises(ValueError, match=kind):
        read(tmp_path, strict=True)


def test_a_thousand_bad_rows_cost_no_good_one(tmp_path):
    rows = [
        question(n) + answer(n + 10_000, n) if n % 2 else question(n).replace("question", "&bad;")
        for n in range(1, 2001)
    ]
    dump(tmp_path, *rows)
    documents, problems = read(tmp_path)
    assert len(documents) == problems.counts["broken XML"] == 1000


def test_a_file_that_breaks_off_gives_what_it_has(tmp_path):
    dump(tmp_path, question(1), answer(2, 1), question(3)[:150], tail="")
    documents, problems = read(tmp_path)
    assert [document.id for document in documents] == ["stackexchange:unix/1"]
    assert problems.counts == {"truncated file": 1}


BOMB = '<!DOCTYPE posts [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;">]>\n<posts>\n'
BAD_FILES = {
    "entity bomb": (BOMB + question(1).replace("question", "&b;") + TAIL, "document type"),
    "another table": (HEAD.replace("posts", "votes") + '<row Id="1" />' + "</votes>", "its root is votes, not posts"),
    "no XML": ("hello " * 400_000, "no row in its first"),
    "short nonsense": ("hello", "no XML"),
    "empty": ("", "no XML"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_dump_is_named_and_the_others_read(tmp_path, case):
    text, words = BAD_FILES[case]
    dump(tmp_path, question(1), answer(2, 1))
    bad = dump(tmp_path, site="bad.stackexchange.com")
    bad.write_text(text, encoding="utf-8")
    documents, problems = read(tmp_path)
    assert len(documents) == 1
    assert problems.counts == {"broken dump": 1}
    assert str(bad) in problems.lines[0]
    assert words in problems.lines[0]


def test_archives_are_read_as_folders_are(tmp_path):
    rows = [question(n) + answer(n + 1, n) for n in range(1, 4000, 2)]
    text = HEAD + "".join(rows) + TAIL
    plain = dump(tmp_path / "plain", *rows)
    archive(tmp_path / "unix.stackexchange.com.7z", Badges="<badges/>", Posts=text, Votes="<votes/>")
    packed, problems = read(tmp_path / "unix.stackexchange.com.7z")
    assert [(d.id, d.text) for d in packed] == [(d.id, d.text) for d in read(plain)[0]]
    assert len(packed) == 2000
    assert not problems.counts


def test_the_largest_sites_archives_are_known_by_their_table(tmp_path):
    archive(tmp_path / "stackoverflow.com-Posts.7z", Posts=HEAD + question(4) + answer(7, 4) + TAIL)
    archive(tmp_path / "stackoverflow.com-Votes.7z", Votes="<votes/>")
    (document,), problems = read(tmp_path)
    assert (document.id, document.metadata["url"]) == (
        "stackexchange:stackoverflow/4",
        "https://stackoverflow.com/questions/4",
    )
    assert not problems.counts


def bad_archives(folder):
    good = archive(folder / "good.7z", Posts=HEAD + question(1) + answer(2, 1) * 500 + TAIL)
    data = good.read_bytes()
    good.unlink()
    (folder / "cut.com.7z").write_bytes(data[: len(data) // 2])
    (folder / "flipped.com.7z").write_bytes(data[:60] + bytes(byte ^ 0x55 for byte in data[60:90]) + data[90:])
    (folder / "noise.com.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(200))
    archive(folder / "other.com.7z", Votes="<votes/>")
    archive(folder / "two.com.7z", Posts="<posts/>", more__Posts="<posts/>")
    with py7zr.SevenZipFile(folder / "secret.com.7z", "w", password="x") as file:
        file.writestr(HEAD + TAIL, "Posts.xml")
    with py7zr.SevenZipFile(folder / "hidden.com.7z", "w", password="x", header_encryption=True) as file:
        file.writestr(HEAD + TAIL, "Posts.xml")
    with py7zr.SevenZipFile(folder / "nested.com.7z", "w") as file:
        file.writestr(data, "inner.7z")
    (folder / "Posts.xml").symlink_to("/etc/passwd")
    with py7zr.SevenZipFile(folder / "link.com.7z", "w") as file:
        file.write(folder / "Posts.xml", "Posts.xml")
    (folder / "Posts.xml").unlink()


def test_bad_archives_are_named_and_the_good_one_read(tmp_path):
    bad_archives(tmp_path)
    archive(tmp_path / "unix.stackexchange.com.7z", Posts=HEAD + question(1) + answer(2, 1) + TAIL)
    documents, problems = read(tmp_path)
    assert [document.id for document in documents] == ["stackexchange:unix/1"]
    said = {Path(line.split(".com.7z")[0]).name: line for line in problems.lines}
    assert problems.counts == {"broken dump": 9}
    for name in ("cut", "flipped", "noise"):
        assert "corrupt or truncated archive" in said[name]
    for name in ("secret", "hidden"):
        assert "the archive is encrypted" in said[name]
    for name in ("other", "nested", "link"):
        assert "no Posts.xml" in said[name]
    assert "2 Posts.xml" in said["two"]
    assert not any("\n" in line for line in problems.lines)
    with pytest.raises(ValueError, match="broken dump"):
        read(tmp_path, strict=True)


def test_answers_to_questions_that_are_not_wanted_take_no_disk(tmp_path):
    rows = [question(1, tags="<c>"), question(2, tags="<java>"), question(3, tags="<java>")]
    dump(tmp_path, *rows, *(answer(n, 1 + n % 3) for n in range(4, 40)))
    scratch = tmp_path / "scratch"
    StackExchange(str(tmp_path / "unix.stackexchange.com"), tags=["c"]).prepare(scratch, Problems())
    kept = pa.CompressedInputStream(str(scratch / "unix.stackexchange.com" / "000000.answers"), "zstd").read().decode()
    assert {line.split('ParentId="')[1][0] for line in kept.splitlines()} == {"1"}


def test_an_unfinished_index_is_made_again_and_a_finished_one_kept(tmp_path):
    dump(tmp_path, question(1), answer(2, 1))
    scratch = tmp_path / "scratch"
    (scratch / ".unix.stackexchange.com.partial").mkdir(parents=True)
    (scratch / ".unix.stackexchange.com.partial" / "000000.answers").write_bytes(b"torn")
    source = StackExchange(str(tmp_path / "unix.stackexchange.com"))
    for _ in range(2):
        source.prepare(scratch, Problems())
        assert len(list(source.read("unix.stackexchange.com/000000", scratch, Problems(strict=True)))) == 1
    assert [path.name for path in scratch.iterdir()] == ["unix.stackexchange.com"]


def test_the_settings_file_gives_every_argument_its_default():
    settings = OmegaConf.load(Path(__file__).parents[4] / "conf/source/stackexchange.yaml")
    assert settings.pop("_target_") == f"{StackExchange.__module__}.{StackExchange.__name__}"
    assert list(settings) == [field.name for field in fields(StackExchange)]
    for field in fields(StackExchange):
        if not OmegaConf.is_missing(settings, field.name):
            assert settings[field.name] == field.default


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"paths": "nowhere"}, r"^paths=nowhere does not exist"),
        ({"paths": ".", "answers": 0}, r"^answers=0"),
    ],
)
def test_mistakes_in_settings_name_the_key(settings, words):
    with pytest.raises(ValueError, match=words):
        StackExchange(**settings).identity()


def test_folders_without_a_dump_and_two_dumps_of_a_site_name_the_key(tmp_path):
    with pytest.raises(ValueError, match=r"^paths=.*Posts\.xml"):
        StackExchange([str(tmp_path)]).identity()
    dump(tmp_path, question(1), answer(2, 1))
    archive(tmp_path / "unix.stackexchange.com.7z", Posts="<posts/>")
    with pytest.raises(ValueError, match=r"^paths=.* both of unix\.stackexchange\.com"):
        StackExchange(str(tmp_path)).parts(tmp_path)


def test_the_identity_follows_settings_and_files(tmp_path):
    path = dump(tmp_path, question(1), answer(2, 1))
    first = StackExchange(str(tmp_path)).identity()
    assert StackExchange(str(tmp_path)).identity() == first
    assert StackExchange(str(tmp_path), answers=2).identity() != first
    path.write_text(HEAD + TAIL)
    assert StackExchange(str(tmp_path)).identity() != first


def test_memory_does_not_grow_with_a_dump(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.sources.stackexchange.source.NUMBERS_IN_A_PART", 100)
    monkeypatch.setattr("data_pipeline.sources.stackexchange.source.PENDING_BYTES", 100_000)
    monkeypatch.setattr("data_pipeline.sources.stackexchange.dump.BLOCK_BYTES", 100_000)
    peaks = []
    for times in (1, 4):
        rows = (question(n, body="word " * 400) + answer(n + 1, n, "word " * 400) for n in range(1, 800 * times, 2))
        path = dump(tmp_path / str(times), *rows)
        tracemalloc.start()
        count = sum(1 for _ in StackExchange(str(path)).documents(Problems(strict=True), 1))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == 400 * times
    assert peaks[1] < 1.3 * peaks[0]


def test_one_question_with_a_multitude_of_answers_holds_a_few(tmp_path):
    rows = (answer(n, 1, "<p>word</p>" * 300, Score=n % 50) for n in range(2, 4000))
    path = dump(tmp_path, question(1), *rows)
    source, scratch = StackExchange(str(path), answers=2), tmp_path / "scratch"
    source.prepare(scratch, Problems())
    tracemalloc.start()
    (document,) = source.read("unix.stackexchange.com/000000", scratch, Problems(strict=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert document.text.count("## Answer") == 2
    assert peak < path.stat().st_size / 2
