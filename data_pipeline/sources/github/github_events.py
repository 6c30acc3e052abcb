"""GH Archive's issue events, reduced to what threads need, in buckets on disk; a thread is in one bucket."""

import gzip
import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.atomic_files import replace_atomically
from data_pipeline.documents import Problems
from data_pipeline.sources.json_lines import COMPRESSED, lines, parse

TYPES = (b'"IssuesEvent"', b'"IssueCommentEvent"', b'"PullRequestEvent"')
BUCKET_BYTES = 32 * 1024 * 1024  # of reduced events: held in memory at once when threads are rebuilt
COMPRESSION = 8  # approximate compression ratio of the archive's files
ISSUE_SHARE = 0.2  # approximate share of reduced issue events in the uncompressed bytes
BUCKETS = 4096  # at most; a bucket larger than BUCKET_BYTES is read in several passes
BUFFER_BYTES = 32 * 1024 * 1024
REMEMBERED = 100_000  # issues and repositories whose last state is kept, to avoid writing it again
BODY_CHARACTERS = 256 * 1024  # the site accepts 65,536
NO_ACCOUNT = "ghost"  # the site's name for deleted users
SIZES, REPOSITORIES = "sizes.json", "repositories.sqlite"


def bucket_count(files: list[Path]) -> int:
    """Return the number of buckets for the events of these files, estimated from the files' size."""
    total = sum(path.stat().st_size * (COMPRESSION if path.suffix.lower() in COMPRESSED else 1) for path in files)
    return min(BUCKETS, max(1, -(-int(total * ISSUE_SHARE) // BUCKET_BYTES)))


def hash_of(repository: str, number: int) -> int:
    """Return the hash that selects a thread's bucket, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{repository}#{number}".encode(), digest_size=8).digest(), "big")


class Buckets:
    """Gzip files of lines in a folder, written by appending members; all buffers together hold BUFFER_BYTES."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._buffers = [bytearray() for _ in range(count)]
        self._pending = 0
        self.sizes = [0] * count

    def add(self, number: int, line: bytes) -> None:
        """Add a line, which must end in a newline."""
        self._buffers[number] += line
        self.sizes[number] += len(line)
        self._pending += len(line)
        if self._pending >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffers."""
        for number, buffer in enumerate(self._buffers):
            if buffer:
                with (self._folder / f"{number:05d}.jsonl.gz").open("ab") as file:
                    file.write(gzip.compress(buffer, 1))
                buffer.clear()
        self._pending = 0


class Repositories:
    """Licence and stars of repositories, as far as events contain them, in an SQLite file."""

    def __init__(self, path: Path, write: bool = False) -> None:
        mode = "" if write else "?mode=ro&immutable=1"
        self._database = sqlite3.connect(f"{path.resolve().as_uri()}{mode}", uri=True, isolation_level=None)
        self._remembered: set[tuple[str, str | None, int]] = set()
        if write:
            self._database.execute("PRAGMA journal_mode=OFF")
            self._database.execute("PRAGMA synchronous=OFF")
            table = "CREATE TABLE repositories (name TEXT PRIMARY KEY, licence TEXT, stars INTEGER) WITHOUT ROWID"
            self._database.execute(table)

    def note(self, name: str, licence: str | None, stars: int) -> None:
        """Store the licence, and the highest number of stars."""
        row = (name, licence, stars)
        if row in self._remembered:
            return
        if len(self._remembered) >= REMEMBERED:
            self._remembered.clear()
        self._remembered.add(row)
        self._database.execute(
            "INSERT INTO repositories VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "licence = coalesce(excluded.licence, licence), stars = max(excluded.stars, stars)",
            row,
        )

    def find(self, name: str) -> tuple[str | None, int]:
        """Return the licence (None if unknown) and the stars (0 if unknown) of a repository."""
        query = "SELECT licence, stars FROM repositories WHERE name = ?"
        return self._database.execute(query, (name,)).fetchone() or (None, 0)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def write_buckets(
    files: list[Path], folder: Path, wanted: Callable[[str], bool], pull_requests: bool, problems: Problems
) -> None:
    """Fill `folder` with the buckets of the events of wanted repositories, atomically."""
    import orjson

    with replace_atomically(folder) as beside:
        buckets = Buckets(beside, bucket_count(files))
        repositories = Repositories(beside / REPOSITORIES, write=True)
        for entry in _entries(files, wanted, pull_requests, repositories, problems):
            line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
            buckets.add(hash_of(*entry["thread"]) % len(buckets.sizes), line)
        buckets.flush()
        repositories.close()
        sizes = {f"{number:05d}": size for number, size in enumerate(buckets.sizes) if size}
        (beside / SIZES).write_text(json.dumps(sizes))


def _entries(
    files: list[Path],
    wanted: Callable[[str], bool],
    pull_requests: bool,
    repositories: Repositories,
    problems: Problems,
) -> Iterator[dict]:
    last_state: dict[tuple[str, int], int] = {}
    for path in files:
        old = 0
        for number, line in lines(path, problems):
            if not any(kind in line for kind in TYPES):
                continue
            place = f"{path}: line {number}"
            event = parse(place, line, problems)
            if event is None:
                continue
            if isinstance(event.get("actor"), str) or "repository" in event:
                old += 1
                continue
            try:
                entry = _entry(event, wanted, pull_requests, repositories)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                problems.skip(place, "incomplete event", f"{type(error).__name__}: {error}"[:200])
                continue
            if entry is None:
                continue
            # Every comment event repeats the whole issue.
            issue = entry["issue"]
            key = tuple(entry["thread"])
            state = hash((issue["title"], issue["body"], issue["state"], issue["association"], *issue["labels"]))
            if last_state.get(key) == state:
                entry["issue"] = None
            elif len(last_state) >= REMEMBERED:
                last_state.clear()
            last_state[key] = state
            yield {**entry, "place": place}
        if old:
            problems.skip(str(path), "event layout of before 2015", f"{old:,} events")


def _entry(event: dict, wanted: Callable[[str], bool], pull_requests: bool, repositories: Repositories) -> dict | None:
    """Return the fields of an event that a thread needs, or None; errors of missing or malformed fields pass."""
    kind, payload, name = event["type"], event["payload"], _string(event["repo"]["name"])
    if kind not in ("IssuesEvent", "IssueCommentEvent", "PullRequestEvent") or not wanted(name):
        return None
    if kind == "PullRequestEvent":
        _note_repository(name, payload["pull_request"], repositories)
        if not pull_requests:
            return None
        issue = payload["pull_request"]
    else:
        issue = payload["issue"]
        if issue.get("pull_request") and not pull_requests:
            return None
    thread = [name, _number(issue["number"])]
    action = payload.get("action")
    entry: dict[str, Any] = {
        "thread": thread,
        "at": _string(event.get("created_at")),
        "issue": _issue(issue),
        "comment": None,
    }
    if kind == "IssuesEvent" and action in ("deleted", "transferred"):
        entry["gone"] = True
    if kind == "IssueCommentEvent":
        comment = payload["comment"]
        entry["comment"] = {"id": _number(comment["id"]), "deleted": action == "deleted", **_post(comment)}
    return entry


def _note_repository(name: str, pull_request: dict, repositories: Repositories) -> None:
    repository = (pull_request.get("base") or {}).get("repo") or {}
    licence = _string((repository.get("license") or {}).get("spdx_id"))
    stars = _number(repository.get("stargazers_count") or 0)
    if licence or stars:
        repositories.note(name, licence if licence not in ("", "NOASSERTION") else None, stars)


def _post(post: dict) -> dict:
    """Return the fields that issues and comments share. The user of a deleted account is null."""
    user = post.get("user") or {"login": NO_ACCOUNT}
    created = _string(post.get("created_at"))
    return {
        "body": _string(post.get("body"))[:BODY_CHARACTERS],
        "login": _string(user["login"]) or NO_ACCOUNT,
        "bot": user.get("type") == "Bot",
        "association": _string(post.get("author_association")),
        "created": created,
        "updated": _string(post.get("updated_at")) or created,
    }


def _issue(issue: dict) -> dict:
    state = "merged" if issue.get("merged") or issue.get("merged_at") else issue.get("state_reason")
    return {
        **_post(issue),
        "title": _string(issue["title"]),
        "state": state if state in ("merged", "not_planned") else _string(issue.get("state")),
        "labels": [_string(label["name"]) for label in issue.get("labels") or ()],
        "url": _string(issue.get("html_url")),
    }


def _string(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text should be")
    return value or ""


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError(f"{str(value)[:40]} where a number should be")
    return value


def bucket_turns(folder: Path) -> dict[str, int]:
    """Return the names of the non-empty buckets, and the number of passes to read each."""
    sizes = json.loads((folder / SIZES).read_text())
    return {name: -(-size // BUCKET_BYTES) for name, size in sizes.items()}


def read_bucket(folder: Path, name: str, turn: int, turns: int) -> Iterator[dict]:
    """Yield the entries of a bucket whose threads belong to this pass."""
    import orjson

    with gzip.open(folder / f"{name}.jsonl.gz") as stream:
        for line in stream:
            entry = orjson.loads(line)
            if (hash_of(*entry["thread"]) >> 32) % turns == turn:  # other bits than those that selected the bucket
                yield entry
