"""Threads of GitHub issues, rebuilt from the hourly event files of GH Archive."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.sources.github.github_events import (
    BUCKET_BYTES,
    NO_ACCOUNT,
    REPOSITORIES,
    Repositories,
    bucket_turns,
    read_bucket,
    write_buckets,
)
from data_pipeline.sources.github.issue_text import Namer, clean, roles, says_nothing
from data_pipeline.sources.parts import SourceInParts
from data_pipeline.sources.paths import as_list, find_files

EVENTS = (".json.gz", ".json", ".jsonl", ".jsonl.gz", ".json.zst", ".jsonl.zst")
FOLDER = "issue-events"
THREAD_CHARACTERS = BUCKET_BYTES // 4  # a longer thread is a bot's, or an attack


@dataclass(frozen=True)
class GithubIssues(SourceInParts):
    """Threads of issues, one document each: title, labels, the opening post, the comments in order.

    Users are replaced by roles. An edited comment appears in its last version; a deleted one is dropped.

    Args:
        paths: GH Archive's files (2024-01-01-15.json.gz), folders or globs of them, in any order; events before 2015
            have another layout, and are only counted.
        repositories: names or globs ("pytorch/*"); None for all.
        minimum_comments: drop threads with fewer, not counting bots' and empty ones.
        minimum_stars: drop threads of repositories with fewer, as far as pull request events contain the number.
        pull_requests: also read their threads.
        bots: logins in addition to those that the site marks as bots.
        log_lines, trace_lines: fold logs to `log_lines`, plus up to `trace_lines` of stack traces.
    """

    paths: list[str]
    repositories: list[str] | None = None
    minimum_comments: int = 1
    minimum_stars: int = 0
    pull_requests: bool = False
    bots: list[str] = field(default_factory=list)
    log_lines: int = 40
    trace_lines: int = 80
    category: str = "debug"

    def __post_init__(self) -> None:
        for name in ("paths", "bots"):
            object.__setattr__(self, name, as_list(getattr(self, name)))
        if self.repositories is not None:
            object.__setattr__(self, "repositories", as_list(self.repositories))
            for pattern in self.repositories:
                if "/" not in pattern:
                    raise SettingError("repositories", pattern, f"give owner/name, or a glob such as {pattern}/*")
        for name in ("minimum_comments", "minimum_stars", "trace_lines"):
            check_number(name, getattr(self, name), least=0)
        check_number("log_lines", self.log_lines, least=2)  # one for the head and one for the tail

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every file; raise ValueError for a path without files."""
        return {"github_issues": settings_identity(self, by, "paths"), "files": file_identity(self._files(), by)}

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Distribute the events of wanted repositories over buckets, by thread."""
        if not (scratch / FOLDER).exists():
            write_buckets(self._files(), scratch / FOLDER, self._wanted(), self.pull_requests, problems)

    def parts(self, scratch: Path) -> list[str]:
        """Return the buckets' names; raise ValueError if there is no event of a wanted issue."""
        names = sorted(bucket_turns(scratch / FOLDER))
        if not names:
            among = "" if self.repositories is None else f" of repositories={self.repositories}"
            problem = f"has no event of an issue{among} in {len(self._files())} files"
            raise SettingError("paths", self.paths, "give files of other hours, or other repositories", problem)
        return names

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the threads of a bucket, by repository and number (within each pass over a large bucket)."""
        turns = bucket_turns(scratch / FOLDER)[part]
        repositories = Repositories(scratch / FOLDER / REPOSITORIES)
        try:
            for turn in range(turns):
                for thread in _threads(read_bucket(scratch / FOLDER, part, turn, turns), problems):
                    licence, stars = repositories.find(thread.repository)
                    document = self._document(thread, licence) if stars >= self.minimum_stars else None
                    if document is not None:
                        yield document
        finally:
            repositories.close()

    def _files(self) -> list[Path]:
        return find_files("paths", self.paths, EVENTS)

    def _wanted(self) -> Callable[[str], bool]:
        if self.repositories is None:
            return lambda name: True
        allowed = re.compile("|".join(fnmatch.translate(pattern.lower()) for pattern in self.repositories))
        return lambda name: allowed.match(name.lower()) is not None

    def _is_bot(self, post: dict) -> bool:
        login = post["login"].lower()
        return post["bot"] or login.endswith("[bot]") or login in {bot.lower() for bot in self.bots}

    def _document(self, thread: "_Thread", licence: str | None) -> Document | None:
        issue = thread.issue
        if issue is None or self._is_bot(issue):
            return None
        comments = [comment for comment in thread.ordered() if not self._is_bot(comment)]
        names = roles([(post["login"], post["association"]) for post in (issue, *comments)])
        namer = Namer({login: role for login, role in names.items() if login != NO_ACCOUNT})
        written, previous = [], issue["body"]
        for comment in comments:
            text = clean(comment["body"], previous, namer, self.log_lines, self.trace_lines)
            previous = comment["body"]
            if not says_nothing(text):
                written.append(f"**{names[comment['login']]}:**\n\n{text}")
        if len(written) < self.minimum_comments:
            return None
        opening = clean(issue["body"], "", namer, self.log_lines, self.trace_lines)
        head = [f"# {namer.prose(' '.join(issue['title'].split()))}", _about(issue)]
        text = "\n\n".join(filter(None, (*head, f"**Author:**\n\n{opening}" if opening else "", *written)))
        metadata = {
            "source": "github_issues",
            "category": self.category,
            "origin": thread.place,
            "url": issue["url"],
            "date": issue["created"],
            "licence": licence,
        }
        known = {key: value for key, value in metadata.items() if value}
        return Document(text, f"github_issues:{thread.repository}#{thread.number}", known)


def _about(issue: dict) -> str:
    labels = ", ".join(issue["labels"])
    state = issue["state"].replace("_", " ")
    return "  \n".join(filter(None, (f"Labels: {labels}" if labels else "", f"State: {state}" if state else "")))


class _Thread:
    """State of one thread, built from its events in any order."""

    def __init__(self, repository: str, number: int, place: str) -> None:
        self.repository, self.number, self.place = repository, number, place
        self.issue: dict | None = None
        self.gone = self.full = False
        self._issue_version = ("", "")
        self._comments: dict[int, tuple[tuple[str, str], dict]] = {}
        self._characters = 0

    def add(self, entry: dict) -> bool:
        """Apply an entry; return False the first time that the thread exceeds its size limit."""
        issue, comment = entry["issue"], entry["comment"]
        self.gone = self.gone or "gone" in entry
        if issue is not None and (version := (issue["updated"], entry["at"])) >= self._issue_version:
            self.issue, self._issue_version = issue, version
        if comment is None:
            return True
        # Of a deleted comment only the id is kept, as its last version.
        version = ("~" if comment["deleted"] else comment["updated"], entry["at"])
        if comment["id"] in self._comments and self._comments[comment["id"]][0] >= version:
            return True
        self._characters += len(comment["body"])
        if self._characters > THREAD_CHARACTERS:
            first, self.full = not self.full, True
            return not first
        self._comments[comment["id"]] = (version, {} if comment["deleted"] else comment)
        return True

    def ordered(self) -> list[dict]:
        """Return the comments in the order of writing."""
        comments = [comment for _, comment in self._comments.values() if comment]
        return sorted(comments, key=lambda comment: (comment["created"], comment["id"]))


def _threads(entries: Iterable[dict], problems: Problems) -> Iterator[_Thread]:
    """Yield the threads that still exist, by repository and number."""
    threads: dict[tuple[str, int], _Thread] = {}
    for entry in entries:
        repository, number = entry["thread"]
        thread = threads.setdefault((repository, number), _Thread(repository, number, entry["place"]))
        if not thread.add(entry):
            problems.skip(entry["place"], "thread too long", f"comments of {repository}#{number} from there on")
    for key in sorted(threads):
        thread = threads.pop(key)
        if not thread.gone:
            yield thread
