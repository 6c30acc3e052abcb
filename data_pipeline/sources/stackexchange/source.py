"""Stack Exchange's data dump: questions with their best answers."""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from common.atomic_files import replace_atomically
from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems
from data_pipeline.identity import EARLIER, SAMPLE, file_identity, settings_identity
from data_pipeline.markup.html.fragments import markdown
from data_pipeline.sources.parts import SourceInParts
from data_pipeline.sources.paths import as_list, plain
from data_pipeline.sources.stackexchange.dump import POSTS, BrokenDumpError, Row, read_dump, read_rows

log = logging.getLogger(__name__)

QUESTION, ANSWER = "1", "2"
# Answers are stored with their questions by question number; on the largest site this many numbers have 20 MB of posts.
NUMBERS_IN_A_PART = 16384
PENDING_BYTES = 32 << 20  # buffered in memory for all parts together
LARGEST_NUMBER = 1 << 31
# Licence of a post that states none, by its date (Stack Exchange's help page on licensing).
LICENCES = (("2011-04-08", "CC-BY-SA-2.5"), ("2018-05-02", "CC-BY-SA-3.0"), ("9", "CC-BY-SA-4.0"))
NO_ALTERNATIVE = 'alt="enter image description here"'  # the editor's default, if the author writes none


@dataclass(frozen=True)
class StackExchange(SourceInParts):
    """Questions with their accepted and best answers, from a dump's `Posts.xml`, plain or inside .7z.

    Deleted posts, closed questions, and questions without a remaining answer are dropped.

    Args:
        paths: folders named by site (`unix.stackexchange.com/Posts.xml`), folders of those, or archives
            (`unix.stackexchange.com.7z`, `stackoverflow.com-Posts.7z`).
        tags: keep questions with at least one of them; None for all.
        minimum_score: of a question, and of an answer that is not the accepted one.
        answers: the most answers to keep, the accepted one first.
    """

    paths: str | list[str]
    tags: list[str] | None = None
    minimum_score: int = 1
    answers: int = 3
    category: str = "debug"

    def __post_init__(self) -> None:
        check_number("answers", self.answers, least=1)
        object.__setattr__(self, "paths", plain(self.paths))
        if self.tags is not None:
            object.__setattr__(self, "tags", sorted(str(tag).lower() for tag in self.tags))

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every dump."""
        dumps = self.dumps()
        found = {"stackexchange": settings_identity(self, by, "paths"), "files": file_identity(dumps.values(), by)}
        if by != EARLIER:  # documents are named by their site, the name of a folder or an archive
            found["sites"] = list(dumps)
        return found

    def dumps(self) -> dict[str, Path]:
        """Return {site: file}; raise ValueError, naming `paths`, if it names no dump."""
        found: dict[str, Path] = {}
        for given in as_list(self.paths):
            path = Path(given).expanduser()
            if not path.exists():
                raise SettingError("paths", given, f"give folders with {POSTS}, or .7z archives", "does not exist")
            inside = (*path.rglob(POSTS), *path.rglob("*.7z")) if path.is_dir() else (path,)
            for file in sorted(inside):
                site = _site(file)
                if site is None:
                    continue  # another table of a dump: stackoverflow.com-Votes.7z
                if site in found:
                    problem = f"and {found[site]} are both of {site}"
                    raise SettingError("paths", file, "keep one of them", problem)
                found[site] = file
        if not found:
            raise SettingError("paths", self.paths, f"give a folder with {POSTS}, or a .7z archive", "has no dump")
        return dict(sorted(found.items()))

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Read each dump once and distribute its posts over files by question number.

        An answer may be hundreds of gigabytes after its question, and an archive cannot be read from the middle.
        """
        for site, path in self.dumps().items():
            if (scratch / site).exists():
                continue
            with replace_atomically(scratch / site) as folder:
                index = _Index(folder, None if self.tags is None else frozenset(self.tags), self.minimum_score)
                try:
                    read_dump(path, index.add, problems)
                except BrokenDumpError as error:
                    problems.skip(str(path), "broken dump", str(error))
                index.close()
            log.info("%s: %d posts, %d of them kept to be joined", site, index.seen, index.kept)

    def parts(self, scratch: Path) -> list[str]:
        """Return "site/number" for every range of question numbers that has questions."""
        names = [
            f"{site}/{file.name.partition('.')[0]}"
            for site in self.dumps()
            for file in sorted((scratch / site).glob("*.questions"))
        ]
        if not names:
            raise SettingError("paths", self.paths, "change tags or minimum_score", "has no question that matches")
        return names

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the questions of a part, in the dump's order; only the answers to keep are held in memory."""
        site, _, number = part.partition("/")
        origin = self.dumps()[site]
        questions, answers = (scratch / site / f"{number}.{kind}" for kind in ("questions", "answers"))
        accepted = {row["Id"]: row.get("AcceptedAnswerId", "") for row in read_rows(questions, problems)}
        kept = self._best(read_rows(answers, problems), accepted)
        for question in read_rows(questions, problems):
            best = kept.pop(question["Id"], None)  # pop: a duplicate question is yielded once
            if best:
                try:
                    yield self._document(site, origin, question, best)
                except ValueError as error:  # raised by the HTML converter
                    problems.skip(f"{origin}: question {question['Id']}", "unreadable post", str(error))

    def _best(self, rows: Iterable[Row], accepted: dict[str, str]) -> dict[str, list[Row]]:
        """Return each question's answers to keep: the accepted one, then by score, older ones first among equals."""
        kept: dict[str, dict[str, Row]] = {}
        for row in rows:
            question = row["ParentId"]
            if question not in accepted:
                continue
            if row["Id"] != accepted[question] and int(row["Score"]) < self.minimum_score:
                continue
            answers = kept.setdefault(question, {})
            answers[row["Id"]] = row
            if len(answers) > self.answers + 20:  # prune at intervals, so that no question can fill the memory
                kept[question] = {answer["Id"]: answer for answer in self._order(answers, accepted[question])}
        return {question: self._order(answers, accepted[question]) for question, answers in kept.items()}

    def _order(self, answers: dict[str, Row], accepted: str) -> list[Row]:
        ranked = sorted(answers.values(), key=lambda row: (row["Id"] != accepted, -int(row["Score"]), int(row["Id"])))
        return ranked[: self.answers]

    def _document(self, site: str, origin: Path, question: Row, answers: list[Row]) -> Document:
        title = " ".join(question.get("Title", "").split())
        sections = [f"# {title}" if title else "", _body(question)]
        for answer in answers:
            accepted = answer["Id"] == question.get("AcceptedAnswerId")
            sections += ["## Accepted answer" if accepted else "## Answer", _body(answer)]
        licences = sorted({_licence(post) for post in (question, *answers)} - {""})
        short = site.removesuffix(".stackexchange.com").removesuffix(".com")
        metadata = {
            "source": "stackexchange",
            "category": self.category,
            "origin": f"{origin}: question {question['Id']}",
            "url": f"https://{site}/questions/{question['Id']}",
            "date": question.get("CreationDate", "")[:19],
            "licence": " AND ".join(licences),  # an SPDX expression: the posts' licences may differ
        }
        text = "\n\n".join(section for section in sections if section)
        known = {key: value for key, value in metadata.items() if value}
        return Document(text, f"stackexchange:{short}/{question['Id']}", known)


def _site(file: Path) -> str | None:
    """Return the site in a dump file's name, or None if the file is another table of the dump."""
    if file.name == POSTS:
        return file.resolve().parent.name
    if file.suffix != ".7z":
        return None
    name = file.stem
    host, _, table = name.rpartition("-")
    if host and table[:1].isupper():  # site names are lower case: stackoverflow.com-Posts
        return host if table == "Posts" else None
    return name


def _body(post: Row) -> str:
    return markdown(post.get("Body", "").replace(NO_ALTERNATIVE, ""), heading_offset=2)


def _licence(post: Row) -> str:
    if stated := post.get("ContentLicense", "").strip():
        return stated.replace(" ", "-")  # "CC BY-SA 4.0"
    date = post.get("CreationDate", "")[:10]
    return next(licence for end, licence in LICENCES if date < end) if date else ""


class _Index:
    """Files of posts by question number, under `folder`: zstd frames of the original rows.

    Answers to a rejected question that was already read are dropped; one bit per post number remembers it.
    """

    def __init__(self, folder: Path, tags: frozenset[str] | None, minimum_score: int) -> None:
        self.folder, self.tags, self.minimum_score = folder, tags, minimum_score
        self.seen = self.kept = 0
        self._unwanted = bytearray()
        self._pending: dict[str, bytearray] = {}
        self._pending_bytes = 0

    def add(self, row: Row, xml: bytes) -> None:
        """Take a post; raise ValueError or KeyError if an attribute is missing or not a number."""
        self.seen += 1
        if not xml.startswith(b"<row "):  # the mark by which rows are separated when read again
            raise ValueError("not written as a dump writes it")
        kind = row["PostTypeId"]
        if kind not in (QUESTION, ANSWER):
            return
        identity, _ = _number(row["Id"]), int(row["Score"])
        if kind == QUESTION:
            if not self._wants(row):
                self._unwanted.extend(bytes(max(0, identity // 8 + 1 - len(self._unwanted))))
                self._unwanted[identity // 8] |= 1 << identity % 8
                return
            self._write(identity, "questions", xml)
        elif "DeletionDate" not in row:
            question = _number(row["ParentId"])
            byte = self._unwanted[question // 8] if question // 8 < len(self._unwanted) else 0
            if not byte >> question % 8 & 1:
                self._write(question, "answers", xml)

    def _wants(self, row: Row) -> bool:
        if row.get("DeletionDate") or row.get("ClosedDate") or int(row["Score"]) < self.minimum_score:
            return False
        return self.tags is None or not self.tags.isdisjoint(re.findall(r"[^<>|]+", row.get("Tags", "").lower()))

    def _write(self, question: int, kind: str, xml: bytes) -> None:
        self.kept += 1
        self._pending.setdefault(f"{question // NUMBERS_IN_A_PART:06d}.{kind}", bytearray()).extend(xml)
        self._pending_bytes += len(xml)
        if self._pending_bytes > PENDING_BYTES:
            # The largest first: old questions get few answers at a time, and small frames compress badly.
            for name in sorted(self._pending, key=lambda name: -len(self._pending[name])):
                if self._pending_bytes < PENDING_BYTES // 2:
                    break
                self._flush(name)

    def _flush(self, name: str) -> None:
        xml = bytes(self._pending.pop(name))
        self._pending_bytes -= len(xml)
        with (self.folder / name).open("ab") as file:
            file.write(pa.compress(xml, codec="zstd", asbytes=True))

    def close(self) -> None:
        """Write the buffers."""
        for name in list(self._pending):
            self._flush(name)


def _number(text: str) -> int:
    number = int(text)
    if not 0 <= number < LARGEST_NUMBER:
        raise ValueError(f"{text[:20]} is not a post number")
    return number
