"""Index on disk of the wanted papers and their full texts, and the ranking list of venues that selects them."""

import hashlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.settings import SettingError
from data_pipeline.sources.index_file import new_index, open_index
from data_pipeline.sources.papers.papers import Paper, title_key

RANKS = ("A", "B", "C")
# Words that some bibliographies write and others omit.
IDLE = re.compile(
    r"acm|ieee|usenix|ifip|isoc|sig(?:plan|ops|soft|act|arch|mobile|da|bed|art)|annual|international|intl|"
    r"the|a|of|on|in|and|for|proceedings|proc"
)
ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)?|(?:19|20)\d\d")
ACRONYM_LENGTH = 4  # shorter ones ("IS", "CC") are too ambiguous to identify a venue without its key
SIDE_EVENT = re.compile(r"@|\bworkshops?\b|\bcompanion\b|\bdoctoral\b", re.IGNORECASE)
SCHEMA = """
CREATE TABLE papers (paper INTEGER PRIMARY KEY, name TEXT, title TEXT, venue TEXT, rank TEXT, area TEXT, year INTEGER,
                     url TEXT, date TEXT, licence TEXT);
CREATE TABLE keys (key TEXT PRIMARY KEY, paper INTEGER) WITHOUT ROWID;
CREATE TABLE titles (title BLOB, year INTEGER, paper INTEGER, PRIMARY KEY (title, paper)) WITHOUT ROWID;
CREATE TABLE files (file INTEGER PRIMARY KEY, path TEXT, kind TEXT);
CREATE TABLE texts (paper INTEGER PRIMARY KEY, preference INTEGER, file INTEGER, line INTEGER);
"""


@dataclass(frozen=True, slots=True)
class Venue:
    """A venue's short name, rank and area."""

    name: str
    rank: str
    area: str


class VenueList:
    """Venues of a ranking list with the wanted ranks and areas.

    `venues` maps a short name to {rank, area, dblp: [keys], names: [full names]}.

    Raises:
        ValueError: the list is malformed, or repeats a key or name; the line names the key.
    """

    def __init__(self, venues: dict, ranks: Iterable[str], areas: Iterable[str] | None) -> None:
        self._by_key: dict[str, Venue | None] = {}
        self._by_issue: dict[str, list[tuple[str, Venue | None]]] = {}
        self._by_name: dict[str, Venue | None] = {}
        ranks, known = set(ranks), {str(entry.get("area")) for entry in venues.values()}
        if not ranks or not ranks <= set(RANKS):
            raise SettingError("ranks", sorted(ranks), f"give some of {', '.join(RANKS)}")
        if areas is not None and not set(areas) <= known:
            missing = sorted(set(areas) - known)
            raise SettingError("areas", missing, f"give some of {', '.join(sorted(known))}", "is of no venue")
        for name, entry in venues.items():
            self._add(name, entry, ranks, areas)

    def _add(self, name: str, entry: dict, ranks: set[str], areas: Iterable[str] | None) -> None:
        keys, names = entry.get("dblp"), entry.get("names")
        if entry.get("rank") not in RANKS or not isinstance(keys, list) or not isinstance(names, list):
            raise SettingError("venues", name, "give rank (A, B or C), area, dblp (a list) and names (a list)")
        venue = Venue(name, entry["rank"], str(entry.get("area")))
        wanted = venue if venue.rank in ranks and (areas is None or venue.area in areas) else None
        for key in keys:
            prefix, _, issue = key.partition("#")
            if issue:
                self._by_issue.setdefault(prefix, []).append((issue, wanted))
            elif prefix in self._by_key:
                raise SettingError("venues", name, "take one off", f"has the DBLP key {key} of another venue")
            else:
                self._by_key[prefix] = wanted
        forms = {_plain(full) for full in names} | ({name} if len(name) >= ACRONYM_LENGTH else set())
        for form in forms:
            if form in self._by_name:
                raise SettingError("venues", name, "take one off", f"has the name {form!r} of another venue")
            self._by_name[form] = wanted

    def may_have(self, key: str) -> bool:
        """Return whether a DBLP key belongs to a wanted venue, or to a journal with wanted issues."""
        return self._by_key.get(_prefix(key)) is not None or _prefix(key) in self._by_issue

    def find(self, paper: Paper) -> Venue | None:
        """Return the wanted venue of a paper: by its DBLP key, or without one by the venue's name.

        Workshops, companion volumes and the like, which share the key of their host venue, do not count.
        """
        if paper.dblp:
            venue = self._by_key.get(_prefix(paper.dblp))
            for issue, candidate in self._by_issue.get(_prefix(paper.dblp), ()):
                if paper.number.startswith(issue):
                    venue = candidate
            side = SIDE_EVENT.search(paper.venue)
            own = venue is not None and (not side or self._named(paper.venue.split("@")[0]) == venue)
            return venue if own else None
        return self._named(paper.venue)

    def _named(self, name: str) -> Venue | None:
        return self._by_name.get(name) or self._by_name.get(_plain(name)) if name else None


def _prefix(key: str) -> str:
    return "/".join(key.split("/", 2)[:2])


def _plain(name: str) -> str:
    """Return a venue's name without sponsors, ordinals, years, an acronym in parentheses, and stop words."""
    words = re.findall(r"[^\W_]+", re.sub(r"\([^)]*\)", " ", name).replace("&", " ").casefold())
    return " ".join(word for word in words if not (IDLE.fullmatch(word) or ORDINAL.fullmatch(word))) or name.casefold()


class PaperIndex:
    """Papers by key and title, and the best full text of each, in an SQLite file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._database = connection
        self.papers = 0

    def add(self, paper: Paper, venue: Venue | None) -> None:
        """Add a paper of a venue, or add what this record knows to a paper that is already indexed.

        A record with a DBLP key is matched by keys alone: the article that extends a paper often has its title.
        """
        number = self.find(paper.keys, None if paper.dblp else paper.title, paper.year)
        if number is None:
            if venue is None or not paper.title:
                return
            number = self.papers = self.papers + 1
            name = next(iter(paper.keys), None) or f"title:{_digest(paper.title.casefold()).hex()}"
            known = (paper.year, paper.url, paper.date, paper.licence)
            row = (number, name.removeprefix("dblp:"), paper.title, venue.name, venue.rank, venue.area, *known)
            self._database.execute(f"INSERT INTO papers VALUES ({','.join('?' * len(row))})", row)
        else:
            update = "UPDATE papers SET date = coalesce(date, ?), licence = coalesce(licence, ?) WHERE paper = ?"
            self._database.execute(update, (paper.date, paper.licence, number))
        keys = [(key, number) for key in paper.keys]
        self._database.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?)", keys)
        if title := title_key(paper.title):
            named = (_digest(title), paper.year, number)
            self._database.execute("INSERT OR IGNORE INTO titles VALUES (?, ?, ?)", named)

    def find(self, keys: Sequence[str], title: str | None, year: int | None) -> int | None:
        """Return the number of the paper with the first known key, else with the title and year.

        The year may differ by one; a title without a year must be unique.
        """
        if keys:
            query = f"SELECT key, paper FROM keys WHERE key IN ({','.join('?' * len(keys))})"
            if found := dict(self._database.execute(query, keys).fetchall()):
                return next(found[key] for key in keys if key in found)
        plain = title_key(title) if title else None
        if plain is None:
            return None
        named = self._database.execute("SELECT year, paper FROM titles WHERE title = ?", (_digest(plain),)).fetchall()
        if year is None:
            return named[0][1] if len(named) == 1 else None
        near = [(abs(other - year), paper) for other, paper in named if other is not None and abs(other - year) <= 1]
        return min(near)[1] if near else None

    def add_file(self, path: Path, kind: str) -> int:
        """Add a full-text file and return its number."""
        row = (str(path), kind)
        number = self._database.execute("INSERT INTO files (path, kind) VALUES (?, ?)", row).lastrowid
        assert number is not None  # of the row that was inserted
        return number

    def offer(self, paper: int, preference: int, file: int, line: int = 0) -> None:
        """Record the location of a paper's text, unless one of lower or equal `preference` is known."""
        self._database.execute(
            "INSERT INTO texts VALUES (?, ?, ?, ?) ON CONFLICT (paper) DO UPDATE SET preference = excluded.preference, "
            "file = excluded.file, line = excluded.line WHERE excluded.preference < texts.preference",
            (paper, preference, file, line),
        )

    def texts(self) -> int:
        """Return the number of papers with a text."""
        return self._database.execute("SELECT count(*) FROM texts").fetchone()[0]

    def files(self, kind: str, first: int = 0, last: int = 2**62) -> list[tuple[int, str]]:
        """Return (number, path) of the files of a kind with a chosen text, numbered `first` to `last`."""
        query = "SELECT DISTINCT file, path FROM texts JOIN files USING (file) WHERE kind = ? AND file BETWEEN ? AND ?"
        return self._database.execute(f"{query} ORDER BY file", (kind, first, last)).fetchall()

    def chosen(self, file: int) -> Iterator[tuple[int, dict]]:
        """Yield (line, the paper's row) of a file's chosen texts, in line order."""
        query = "SELECT line, papers.* FROM texts JOIN papers USING (paper) WHERE file = ? ORDER BY line"
        cursor = self._database.execute(query, (file,))
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield row[0], dict(zip(names, row, strict=True))


def _digest(title: str) -> bytes:
    return hashlib.blake2b(title.encode(errors="surrogatepass"), digest_size=12).digest()


@contextmanager
def new_papers(path: Path) -> Iterator[PaperIndex]:
    """Yield an empty index to fill, as `index_file.new_index` does."""
    with new_index(path) as database:
        database.executescript(SCHEMA)
        yield PaperIndex(database)
        database.execute("CREATE INDEX texts_of_file ON texts (file, line)")


@contextmanager
def open_papers(path: Path) -> Iterator[PaperIndex]:
    """Open a finished index for reading."""
    with open_index(path) as database:
        yield PaperIndex(database)
