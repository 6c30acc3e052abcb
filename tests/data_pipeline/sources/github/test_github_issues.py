import gzip
import json
import random
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data_pipeline.documents import Problems
from data_pipeline.sources.github import github_events
from data_pipeline.sources.github.github_issues import GithubIssues
from data_pipeline.sources.github.issue_text import Namer, clean, fold, roles, says_nothing

REPOSITORY = "octo-org/engine"
BODY = "The engine stops after a while. " * 4


def user(login, kind="User"):
    return {"login": login, "id": 1, "type": kind}


def issue(number=1, body=BODY, login="alice-99", **changed):
    return {
        "number": number,
        "title": "Engine stops",
        "body": body,
        "user": user(login),
        "state": "open",
        "labels": [{"name": "bug"}, {"name": "gpu"}],
        "author_association": "NONE",
        "created_at": "2024-01-01T10:00:00Z",
        "updated_at": "2024-01-01T10:00:00Z",
        "html_url": f"https://github.com/{REPOSITORY}/issues/{number}",
        **changed,
    }


def event(kind, at="2024-01-01T10:00:00Z", repository=REPOSITORY, actor="alice-99", **payload):
    about = {"id": str(random.random()), "type": kind, "actor": {"login": actor}, "created_at": at}
    return {**about, "repo": {"id": 7, "name": repository}, "payload": payload}


def opened(*arguments, repository=REPOSITORY, **changed):
    return event("IssuesEvent", repository=repository, action="opened", issue=issue(*arguments, **changed))


def comment(number, text, login="bob", minute=1, action="created", of=None, repository=REPOSITORY, **changed):
    at = f"2024-01-01T11:{minute:02}:00Z"
    said = {"id": number, "body": text, "user": user(login), "author_association": "NONE", "created_at": at}
    said |= {"updated_at": at, **changed}
    about = of or issue()
    return event("IssueCommentEvent", said["updated_at"], repository, login, action=action, issue=about, comment=said)


def write(path, events):
    text = "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in events)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def read(folder, strict=False, **settings):
    problems = Problems(strict)
    return list(GithubIssues(paths=[str(folder)], **settings).documents(problems, 1)), problems


def thread(tmp_path, *events, **settings):
    write(tmp_path / "2024-01-01-10.json.gz", events)
    documents, problems = read(tmp_path, **settings)
    assert not problems.counts
    return documents


def test_a_thread_is_rebuilt_whatever_the_order_of_its_events_and_files(tmp_path):
    events = [opened()] + [comment(n, f"Comment number {n}.", minute=n) for n in range(1, 9)]
    texts = set()
    for seed in range(4):
        random.Random(seed).shuffle(events)
        folder = tmp_path / str(seed)
        folder.mkdir()
        for hour in range(3):
            write(folder / f"2024-01-01-{hour}.json.gz", events[hour::3])
        (document,) = read(folder)[0]
        texts.add(document.text)
    (text,) = texts
    assert text.startswith("# Engine stops\n\nLabels: bug, gpu  \nState: open\n\n**Author:**\n\nThe engine stops")
    places = [text.index(f"Comment number {n}.") for n in range(1, 9)]
    assert places == sorted(places)


def test_documents_say_where_they_come_from(tmp_path):
    (document,) = thread(tmp_path, opened(), comment(1, "It is the fan."))
    assert document.id == "github_issues:octo-org/engine#1"
    assert document.metadata == {
        "source": "github_issues",
        "category": "debug",
        "origin": f"{tmp_path}/2024-01-01-10.json.gz: line 1",
        "url": "https://github.com/octo-org/engine/issues/1",
        "date": "2024-01-01T10:00:00Z",
    }


def test_an_issue_opened_before_the_archive_begins_has_its_body_from_a_comment(tmp_path):
    (document,) = thread(tmp_path, comment(1, "It is the fan."))
    assert "The engine stops" in document.text


def test_an_edited_comment_is_its_last_version(tmp_path):
    later = {"updated_at": "2024-01-02T00:00:00Z"}
    for order in (1, -1):
        versions = [comment(1, "It is teh fan."), comment(1, "It is the fan.", action="edited", **later)]
        (document,) = thread(tmp_path, opened(), *versions[::order])
        assert "the fan" in document.text
        assert "teh fan" not in document.text


def test_an_issue_is_its_last_version(tmp_path):
    closed = issue(body="Solved: the fan.", state="closed", updated_at="2024-01-03T00:00:00Z")
    for events in ([comment(1, "Yes.", of=closed), opened()], [opened(), comment(1, "Yes.", of=closed)]):
        (document,) = thread(tmp_path, *events)
        assert "Solved: the fan." in document.text
        assert "State: closed" in document.text


def test_deleted_comments_and_threads_are_left_out_whatever_the_order(tmp_path):
    pair = [comment(1, "A secret."), comment(1, "A secret.", action="deleted")]
    for order in (1, -1):
        (document,) = thread(tmp_path, opened(), comment(2, "It is the fan."), *pair[::order])
        assert "secret" not in document.text
    moved = event("IssuesEvent", action="transferred", issue=issue())
    for events in ([moved, comment(2, "The fan.")], [comment(2, "The fan."), moved]):
        assert thread(tmp_path, *events) == []


def test_duplicated_events_give_one_comment(tmp_path):
    (document,) = thread(tmp_path, opened(), opened(), comment(1, "It is the fan."), comment(1, "It is the fan."))
    assert document.text.count("It is the fan.") == 1


def test_bots_and_their_threads_are_left_out(tmp_path):
    robots = [
        comment(1, "Build passed.", user=user("ci", "Bot")),
        comment(2, "Coverage fell.", login="codecov[bot]"),
        comment(3, "Please sign.", login="CLAssistant"),
    ]
    (document,) = thread(tmp_path, opened(), *robots, comment(4, "It is the fan."), bots=["classistant"])
    assert not any(word in document.text for word in ("passed", "Coverage", "sign"))
    opened_by_bot = issue(2, user=user("renovate[bot]", "Bot"))
    assert thread(tmp_path, comment(5, "It is the fan.", of=opened_by_bot)) == []
    assert thread(tmp_path, opened(), *robots, bots=["classistant"]) == []


def test_comments_that_say_nothing_do_not_count(tmp_path):
    for text in ("", "+1", "  :+1: ", "👍👍", "Me too!", "same here", "any update on this?", "I have the same issue."):
        assert says_nothing(text), text
    for text in ("+1, and it needs a reset", "same here with CUDA 12.4", "No."):
        assert not says_nothing(text), text
    events = [opened(), comment(1, "+1"), comment(2, "Me too", minute=2), comment(3, "Reset it.", minute=3)]
    assert "+1" not in thread(tmp_path, *events)[0].text
    assert thread(tmp_path, *events, minimum_comments=2) == []


def test_no_login_remains(tmp_path):
    first = issue(
        body="cc @bob-b and @stranger, see https://github.com/alice-99/engine. @Override stays in `@Override`."
    )
    events = [
        comment(
            1, "Thanks alice-99! @Alice-99 is right, bob-b wrote it.", "maint1", of=first, author_association="OWNER"
        ),
        comment(2, "```\n@alice-99 in a log of bob-b\n@decorator\n```", "bob-b", 2, of=first),
        comment(3, "Mail me: someone@example.com; npm i @angular/core", "carol7", 3, of=first),
    ]
    (document,) = thread(tmp_path, *events)
    text = document.text
    for login in ("alice-99", "Alice-99", "bob-b", "maint1", "carol7", "stranger"):
        assert login not in text, login
    assert "cc Commenter 1 and someone, see https://github.com/author/engine." in text
    assert "Thanks Author! Author is right, Commenter 1 wrote it." in text
    assert "**Maintainer 1:**" in text
    assert "**Commenter 2:**" in text
    for kept in ("`@Override`", "@decorator", "someone@example.com", "@angular/core"):
        assert kept in text


def test_roles_follow_the_association_and_the_order():
    posts = [("a", "OWNER"), ("b", "NONE"), ("c", "MEMBER"), ("b", "NONE"), ("d", "CONTRIBUTOR"), ("a", "OWNER")]
    assert roles(posts) == {"a": "Author", "b": "Commenter 1", "c": "Maintainer 1", "d": "Commenter 2"}


def cleaned(body, previous="", log_lines=10, trace_lines=8):
    return clean(body, previous, Namer({"alice": "Author"}), log_lines, trace_lines)


def test_templates_images_and_trailers_are_removed():
    body = (
        "<!-- Please fill in\n```\nthe form\n```\n-->\n## What happened\r\n\r\nIt broke <!-- when? --> here "
        "![screen](https://x/y.png).\n<img width=3 src='a.png'>\n### Version\n\n_No response_\n"
        "<details><summary>More</summary>\nhidden\n</details>\nSigned-off-by: A B <a@b.c>\nEnd\0."
    )
    assert cleaned(body) == "## What happened\n\nIt broke  here .\n\nMore\nhidden\n\nEnd."


def test_comments_within_code_stay_and_an_open_one_ends_nothing():
    assert cleaned("```html\n<!-- kept -->\n```") == "```html\n<!-- kept -->\n```"
    assert cleaned("Use `<!--` to begin.\nAnd then?") == "Use `<!--` to begin.\nAnd then?"


def test_quotes_of_the_post_before_are_removed_and_others_stay():
    previous = "Does **it** work with `CUDA 12`?\nI doubt it."
    quote = "On Mon, Jan 1, 2024 Someone wrote:\n> Does it work with CUDA 12?\n>\n\n"
    body = f"{quote}It does.\n\n> From the manual: never.\n\nSee."
    assert cleaned(body, previous) == "It does.\n\n> From the manual: never.\n\nSee."


def test_a_reply_loses_the_quote_of_the_comment_before_it_only(tmp_path):
    texts = ("Is it the fan?", "> Is it the fan?\n\nNo.", "Hm.", "> Is it the fan?\n\nYes, in the end.")
    (document,) = thread(tmp_path, opened(), *(comment(n, text, minute=n) for n, text in enumerate(texts)))
    posts = document.text.split("**Commenter 1:**\n\n")[1:]
    assert [post.strip() for post in posts] == [texts[0], "No.", *texts[2:]]


def test_long_logs_keep_head_tail_and_stack_traces():
    log = [f"2024-01-01 10:00:{n % 60:02} INFO step {n}" for n in range(300)]
    log[150:150] = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", "KeyError: 'x'"]
    for body in ("```\n" + "\n".join(log) + "\n```", "See:\n" + "\n".join(log)):
        text = cleaned(body)
        assert "INFO step 4\n[... 145 lines left out ...]\nTraceback" in text
        assert "g()\nKeyError: 'x'\n[... 145 lines left out ...]\n2024-01-01 10:00:55 INFO step 295" in text
        assert text.rstrip("`\n").endswith("INFO step 299")


def test_stack_traces_are_kept_within_their_limit():
    frames = [f"    at com.example.Engine.run(Engine.java:{n})" for n in range(500)]
    folded = fold(["x"] * 20 + frames + ["y"] * 20, 10, 30)
    assert sum("Engine.run" in line for line in folded) == 30
    assert [line for line in folded if "left out" in line] == [
        "[... 15 lines left out ...]",
        "[... 485 lines left out ...]",
    ]


def test_backticks_that_end_on_their_line_begin_no_block():
    assert cleaned("```x``` and @stranger\n![a](b)") == "```x``` and someone"
    assert cleaned("~~~\n@stranger") == "~~~\n@stranger\n~~~"


def test_short_blocks_and_code_are_not_folded():
    code = "```python\n" + "\n".join(f"x{n} = {n}" for n in range(150)) + "\n```"
    assert cleaned(code) == code
    assert "left out" in cleaned(code.replace("python", ""))
    assert cleaned("```\n" + "x\n" * 10 + "```") == "```\n" + "x\n" * 10 + "```"
    assert cleaned("a" * 5000) == "a" * 1000 + " [... 4,000 characters left out ...]"


def test_repositories_are_names_or_globs(tmp_path):
    events = [
        e
        for name in ("Torch/core", "torch/text", "other/core")
        for e in (opened(repository=name), comment(1, "The fan.", repository=name))
    ]
    write(tmp_path / "a.json", events)
    ids = {d.id for d in read(tmp_path, repositories=["torch/*"])[0]}
    assert ids == {"github_issues:Torch/core#1", "github_issues:torch/text#1"}
    assert len(read(tmp_path, repositories=["OTHER/core"])[0]) == 1
    with pytest.raises(ValueError, match=r"^repositories=torch: give owner/name"):
        GithubIssues([str(tmp_path)], repositories=["torch"])
    with pytest.raises(ValueError, match=r"^paths=.*no event of an issue of repositories"):
        read(tmp_path, repositories=["no/where"])


def pull_request(repository=REPOSITORY, stars=5, licence="MIT", number=9):
    base = {"repo": {"stargazers_count": stars, "license": {"key": "x", "spdx_id": licence}}}
    about = {**issue(number, body="Adds a fan."), "base": base, "merged": True}
    return event("PullRequestEvent", repository=repository, action="closed", pull_request=about)


def test_licence_and_stars_are_what_pull_requests_say(tmp_path):
    events = [opened(), comment(1, "The fan."), pull_request(stars=5), pull_request(stars=7)]
    other = "a/b"
    events += [opened(repository=other), comment(2, "The fan.", repository=other)]
    by_id = {d.id: d for d in thread(tmp_path, *events)}
    assert by_id[f"github_issues:{REPOSITORY}#1"].metadata["licence"] == "MIT"
    assert "licence" not in by_id["github_issues:a/b#1"].metadata
    assert len(thread(tmp_path, *events, minimum_stars=7)) == 1
    assert thread(tmp_path, *events, minimum_stars=8) == []


def test_threads_of_pull_requests_are_read_when_asked_for(tmp_path):
    of = issue(9, body="Adds a fan.", pull_request={"url": "x"})
    events = [opened(), comment(1, "The fan."), pull_request(), comment(2, "Approved, thank you.", of=of)]
    assert [d.id for d in thread(tmp_path, *events)] == [f"github_issues:{REPOSITORY}#1"]
    documents = thread(tmp_path, *events, pull_requests=True)
    assert len(documents) == 2
    assert any("Adds a fan." in d.text and "Approved" in d.text for d in documents)


def test_events_of_before_2015_are_counted_once_per_file(tmp_path):
    old = {"type": "IssuesEvent", "actor": "bob", "repository": {"name": "x"}, "payload": {"issue": 7, "number": 1}}
    for hour in range(2):
        write(tmp_path / f"2013-01-01-{hour}.json.gz", [old] * 5)
    write(tmp_path / "2024-01-01-1.json.gz", [opened(), comment(1, "The fan.")])
    documents, problems = read(tmp_path)
    assert len(documents) == 1
    assert problems.counts == {"event layout of before 2015": 2}
    assert "2013-01-01-0.json.gz: event layout of before 2015 (5 events)" in problems.lines[0]


BROKEN = {
    "cut.json.gz": (gzip.compress(json.dumps(opened()).encode() * 99)[:-20], "corrupt file"),
    "noise.json.gz": (b"no gzip", "corrupt file"),
    "half.json": (b'{"type":"IssuesEvent", "pay\n', "line 1: broken JSON"),
    "latin.json": (b'{"type":"IssuesEvent","x":"\xff"}\n', "line 1: broken JSON"),
    "list.json": (b'["IssuesEvent"]\n', "line 1: not a JSON object"),
    "no_payload.json": (b'{"type":"IssuesEvent","repo":{"name":"a/b"}}\n', "line 1: incomplete event"),
    "no_number.json": (json.dumps(opened(number=None)).encode(), "line 1: incomplete event"),
    "huge_number.json": (json.dumps(opened(number=10**30)).encode(), "line 1: incomplete event"),
    "dict_name.json": (json.dumps(opened(repository={})).encode(), "line 1: incomplete event"),
    "dict_date.json": (json.dumps({**opened(), "created_at": {}}).encode(), "line 1: incomplete event"),
    "number_body.json": (json.dumps(opened(body=7)).encode(), "line 1: incomplete event"),
    "no_user_login.json": (json.dumps(opened(user={"id": 1})).encode(), "line 1: incomplete event"),
    "bomb.json.gz": (gzip.compress(b"x" * (80 * 1024 * 1024)), "line 1: decompression bomb"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_is_named_and_stepped_over_unless_strict(tmp_path, name):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    write(tmp_path / "z.json.gz", [opened(), comment(1, "The fan.")])
    documents, problems = read(tmp_path)
    assert len(documents) == 1
    assert problems.counts.total() == 1
    assert str(tmp_path / name) in problems.lines[0]
    assert words in problems.lines[0]
    with pytest.raises(ValueError, match=words.rpartition(": ")[2]):
        read(tmp_path, strict=True)


def test_a_user_whose_account_is_gone_does_not_break_a_thread(tmp_path):
    (document,) = thread(tmp_path, comment(1, "It is the ghost.", user=None, of=issue(user=None)))
    assert "**Author:**\n\nIt is the ghost." in document.text


def test_a_bucket_larger_than_planned_is_read_in_turns_and_gives_the_same(tmp_path, monkeypatch):
    events = [opened(n) for n in range(60)] + [comment(n, f"The fan {n}.", of=issue(n)) for n in range(60)]
    whole = {d.id: d for d in thread(tmp_path, *events)}
    assert len(whole) == 60
    monkeypatch.setattr(github_events, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(github_events, "bucket_count", lambda files: 2)
    documents = read(tmp_path)[0]
    assert len(documents) == 60
    assert {d.id: d for d in documents} == whole
    source = GithubIssues([str(tmp_path)])
    (tmp_path / "scratch").mkdir()
    source.prepare(tmp_path / "scratch", Problems())
    assert len(source.parts(tmp_path / "scratch")) == 2
    assert min(github_events.bucket_turns(tmp_path / "scratch" / "issue-events").values()) > 1


def test_an_issue_that_every_event_repeats_is_stored_once(tmp_path):
    write(tmp_path / "a.json", [opened(), *(comment(n, "The fan.", minute=n) for n in range(20))])
    GithubIssues([str(tmp_path / "a.json")]).prepare(tmp_path, Problems())
    (bucket,) = (tmp_path / "issue-events").glob("*.jsonl.gz")
    assert gzip.decompress(bucket.read_bytes()).decode().count(BODY) == 1


def test_a_thread_without_end_is_cut_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.sources.github.github_issues.THREAD_CHARACTERS", 10_000)
    write(tmp_path / "a.json", [opened(), *(comment(n, f"{n} " + "word " * 200, minute=n % 60) for n in range(50))])
    (document,), problems = read(tmp_path)
    assert problems.counts == {"thread too long": 1}
    assert 5_000 < len(document.text) < 15_000


def test_a_stopped_preparation_leaves_nothing_and_a_finished_one_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "a.json.gz", [opened(), comment(1, "The fan.")])
    source, scratch = GithubIssues([str(tmp_path)]), tmp_path / "scratch"
    scratch.mkdir()
    with monkeypatch.context() as broken:
        broken.setattr(github_events.Buckets, "flush", lambda self: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(OSError, match="disk full"):
            source.prepare(scratch, Problems())
    assert list(scratch.iterdir()) == []
    source.prepare(scratch, Problems())
    monkeypatch.setattr(github_events, "Buckets", None)
    source.prepare(scratch, Problems())
    assert len(list(source.read(source.parts(scratch)[0], scratch, Problems()))) == 1


def test_the_configuration_has_every_argument_with_its_default():
    config = OmegaConf.load(Path(__file__).parents[4] / "conf/source/github_issues.yaml")
    assert config.pop("_target_") == "data_pipeline.sources.github.github_issues.GithubIssues"
    config.paths = ["x"]
    built, plain = GithubIssues(**config), GithubIssues(["x"])
    assert set(config) == set(GithubIssues.__dataclass_fields__)
    assert {n for n in config if getattr(built, n) != getattr(plain, n)} == {"bots"}
    assert json.dumps(built.__dict__)
