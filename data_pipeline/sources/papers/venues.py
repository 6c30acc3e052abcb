"""Papers of venues on a ranking list: bibliography from DBLP or Semantic Scholar, text from several kinds of files."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from common.settings import SettingError, check_number
from data_pipeline.documents import Document, Problems, Unreadable
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.sources.json_lines import lines, parse, records
from data_pipeline.sources.papers.dblp import dblp_records
from data_pipeline.sources.papers.paper_index import PaperIndex, VenueList, new_papers, open_papers
from data_pipeline.sources.papers.papers import paper_of, text_of, title_key
from data_pipeline.sources.papers.pdf import PDFPaper, read_pdf, running_text
from data_pipeline.sources.papers.tei import read_tei
from data_pipeline.sources.parts import SourceInParts
from data_pipeline.sources.paths import as_list, find_files
from data_pipeline.workers import available_processes

log = logging.getLogger(__name__)

INDEX = "venues.sqlite"
RECORDS = (".xml", ".xml.gz", ".jsonl", ".json", ".gz", ".zst")
FULL_TEXT = (*RECORDS, ".tei", ".pdf")
PREFERENCE = {"lines": 0, "tei": 1, "pdf": 2}  # among one paper's texts: the least noisy first
FILES_AT_ONCE = {"lines": 1, "tei": 256, "pdf": 32}  # per part; a shard of JSON lines is long by itself
FILES_MATCHED_AT_ONCE = 64
TITLE_LINES = 4  # a PDF's title is in its first lines, after a possible publisher's note
# Patterns that recognize a paper in a file's name with its folders, and the key that each gives.
NAMES: tuple[tuple[re.Pattern, str], ...] = (
    (re.compile(r".*\b(10\.\d{4,9})[/_-](\S+)"), r"doi:\1/\2"),
    (re.compile(r"(?:.*/)?(\d{7}\.\d{7})"), r"doi:10.1145/\1"),  # file names of ACM's library
    (re.compile(r".*\b(conf|journals)[/_-]([^/_-]+)[/_-]([^/]+)"), r"dblp:\1/\2/\3"),
    (re.compile(r"(?:.*/)?(\d{4}\.\d{4,5})(?:v\d+)?"), r"arxiv:\1"),
    (re.compile(r"(?:.*/)?(\d{7,10})"), r"corpusid:\1"),
    (re.compile(r"(?:.*/)?([0-9a-f]{40})"), r"s2:\1"),
)
Claim = tuple[Sequence[str], str | None, int | None]  # possible keys, title and year of a paper


@dataclass(frozen=True)
class Venues(SourceInParts):
    """Papers of the venues on a list, one document each: title, sections with Markdown headings, no bibliography.

    A text is matched to a paper by DBLP key, DOI, arXiv id or corpus id, in the file's name or inside, else by title
    and year, which may differ by one. Of several texts of a paper, JSON lines come before TEI, and TEI before PDF.

    Args:
        venues: short name -> {rank, area, dblp: [keys], names: [full names]}.
        ranks, areas: of the wanted venues (`areas` None: all).
        records: bibliographic records: dblp.xml(.gz), or JSON lines with title, venue, year, doi, ee, key, or Semantic
            Scholar's with externalids. A list of files, folders and globs.
        full_text: JSON lines of S2ORC or peS2o (list them in `records` too if they have DBLP keys or venues), TEI XML
            from GROBID (.xml, .tei), PDF. A list of files, folders and globs.
        minimum_characters: drop shorter texts (abstracts, failed extractions).
        pdf_seconds: time limit per PDF.
    """

    venues: dict
    records: list[str]
    full_text: list[str]
    ranks: Sequence[str] = ("A", "B")
    areas: list[str] | None = None
    category: str = "general_system"
    minimum_characters: int = 2000
    pdf_seconds: float = 120

    def __post_init__(self) -> None:
        object.__setattr__(self, "venues", {name: _plain_entry(name, entry) for name, entry in self.venues.items()})
        for name in ("records", "full_text", "ranks", "areas"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None and name == "areas" else as_list(value))
        check_number("pdf_seconds", self.pdf_seconds, above=0)
        self._venue_list()

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every file; raise ValueError for a path without files."""
        return {
            "venues": settings_identity(self, by, "records", "full_text"),
            "files": file_identity([*self._records(), *self._full_text()], by),
        }

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Write the index: the papers of the wanted venues, and the location of each one's best text.

        Raises:
            ValueError: no record belongs to a wanted venue, or no text to a wanted paper.
        """
        if (scratch / INDEX).exists():
            return
        with new_papers(scratch / INDEX) as index:
            self._index_papers(index, problems)
            if not index.papers:
                problem = f"has no paper of a venue of ranks {', '.join(self.ranks)}"
                raise SettingError("records", self.records, "widen ranks or areas, or give other records", problem)
            for path in self._full_text():
                if _kind(path) == "lines":
                    self._match_lines(index, path, problems)
            for kind in ("tei", "pdf"):
                self._match_files(index, kind, problems)
            texts = index.texts()
            log.info("%s papers of wanted venues, %s of them with a text", f"{index.papers:,}", f"{texts:,}")
            if not texts:
                problem = f"has no text of the {index.papers:,} papers that records has of wanted venues"
                raise SettingError("full_text", self.full_text, "name files by DOI or DBLP key", problem)

    def parts(self, scratch: Path) -> list[str]:
        """Return parts: a file of JSON lines, or a group of TEI or PDF files, named by its first and last number."""
        with open_papers(scratch / INDEX) as index:
            names: list[str] = []
            for kind, count in FILES_AT_ONCE.items():
                files = [file for file, _ in index.files(kind)]
                groups = (files[start : start + count] for start in range(0, len(files), count))
                names += (f"{kind}/{group[0]}-{group[-1]}" for group in groups)
        return names

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield the papers whose best text is in this part."""
        kind, _, numbers = part.partition("/")
        first, last = map(int, numbers.split("-"))
        with open_papers(scratch / INDEX) as index:
            for file, path in index.files(kind, first, last):
                if kind == "lines":
                    yield from self._read_lines(index, file, Path(path), problems)
                else:
                    for _, row in index.chosen(file):
                        yield from self._read_file(kind, Path(path), row, problems)

    def _venue_list(self) -> VenueList:
        return VenueList(self.venues, self.ranks, self.areas)

    def _records(self) -> list[Path]:
        return find_files("records", self.records, RECORDS)

    def _full_text(self) -> list[Path]:
        return find_files("full_text", self.full_text, FULL_TEXT)

    def _index_papers(self, index: PaperIndex, problems: Problems) -> None:
        """Add the papers of wanted venues; DBLP first, because it knows venues, then other records add their keys."""
        venues = self._venue_list()
        for path in sorted(self._records(), key=lambda path: (_kind(path) != "tei", path)):
            if _kind(path) == "tei":
                found = dblp_records(path, venues.may_have, problems)
            else:
                found = (record for _, record in records(path, problems))
            for record in found:
                paper = paper_of(record)
                index.add(paper, venues.find(paper))

    def _match_lines(self, index: PaperIndex, path: Path, problems: Problems) -> None:
        file = index.add_file(path, "lines")
        for number, record in records(path, problems):
            about = paper_of(record)
            paper = index.find(about.keys, about.title, about.year)
            if paper is not None and len(text_of(record)) >= self.minimum_characters:
                index.offer(paper, PREFERENCE["lines"], file, number)

    def _match_files(self, index: PaperIndex, kind: str, problems: Problems) -> None:
        """Match TEI or PDF files by name, and those without a telling name by content."""
        look = _look_into_tei if kind == "tei" else self._look_into_pdf
        paths = [path for path in self._full_text() if _kind(path) == kind]
        with ThreadPoolExecutor(available_processes()) as threads:  # each PDF is read in a separate process
            for start in range(0, len(paths), FILES_MATCHED_AT_ONCE):
                group = paths[start : start + FILES_MATCHED_AT_ONCE]
                named = [index.find(keys_in_name(path), None, None) for path in group]
                nameless = [path for path, paper in zip(group, named, strict=True) if paper is None]
                claims = dict(zip(nameless, threads.map(look, nameless), strict=True))
                for path, paper in zip(group, named, strict=True):
                    claim = claims.get(path, [])
                    if isinstance(claim, Unreadable):
                        problems.skip(str(path), claim.kind, claim.detail)
                        continue
                    found = paper or next(filter(None, (index.find(*names) for names in claim)), None)
                    if found is not None:
                        index.offer(found, PREFERENCE[kind], index.add_file(path, kind))

    def _look_into_pdf(self, path: Path) -> "list[Claim] | Unreadable":
        try:
            paper = read_pdf(path, pages=1, seconds=self.pdf_seconds)
        except Unreadable as error:
            return error
        keys = [f"doi:{paper.doi}"] if paper.doi else []  # possibly of a paper cited on the first page
        return [*(([], title, None) for title in _possible_titles(paper)), (keys, None, None)]

    def _read_lines(self, index: PaperIndex, file: int, path: Path, problems: Problems) -> Iterator[Document]:
        chosen = index.chosen(file)
        wanted, row = next(chosen)
        for number, line in lines(path, None):
            if number < wanted:
                continue
            place = f"{path}: line {number}"
            record = parse(place, line, problems)
            if record is not None:
                yield self._document(row, text_of(record), place, paper_of(record).licence)
            following = next(chosen, None)
            if following is None:
                return
            wanted, row = following

    def _read_file(self, kind: str, path: Path, row: dict, problems: Problems) -> Iterator[Document]:
        try:
            if kind == "tei":
                paper = read_tei(path)
                text, licence = paper.text, paper.licence
            else:
                text, licence = running_text(read_pdf(path, seconds=self.pdf_seconds).pages), None
        except Unreadable as error:
            return problems.skip(str(path), error.kind, error.detail)
        if len(text) < self.minimum_characters:
            return problems.skip(str(path), "no full text", f"{len(text):,} characters")
        yield self._document(row, text, str(path), licence)
        return None

    def _document(self, row: dict, text: str, origin: str, licence: str | None) -> Document:
        first_line, _, rest = text.partition("\n")
        if title_key(first_line) == title_key(row["title"]) and rest:
            text = rest.lstrip("\n")  # peS2o's texts start with the title
        metadata = {
            "source": "venues",
            "category": self.category,
            "origin": origin,
            "venue": row["venue"],
            "rank": row["rank"],
            "area": row["area"],
            "url": row["url"],
            # Bibliographies give only the year: use its first day.
            "date": row["date"] or (f"{row['year']}-01-01" if row["year"] else None),
            "licence": licence or row["licence"],
        }
        known = {name: value for name, value in metadata.items() if value}
        return Document(f"# {row['title']}\n\n{text}".replace("\0", ""), f"venues:{row['name']}", known)


def _plain_entry(name: str, entry: Mapping) -> dict:
    """Return an entry of the list in plain types, instead of Hydra's."""
    if not isinstance(entry, Mapping):
        raise SettingError("venues", name, "give rank (A, B or C), area, dblp (a list) and names (a list)")
    lists = {
        key: [*value] for key, value in entry.items() if isinstance(value, Sequence) and not isinstance(value, str)
    }
    return {**entry, **lists}


def _kind(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return "tei" if name.endswith((".xml", ".tei")) else "pdf" if name.endswith(".pdf") else "lines"


def keys_in_name(path: Path) -> list[str]:
    """Return the keys that a file's name, with its last two folders, may contain."""
    name = re.sub(r"(\.(pdf|tei|xml|grobid|gz|zst))+$", "", unquote("/".join(path.parts[-3:])), flags=re.IGNORECASE)
    matches = ((pattern.fullmatch(name), key) for pattern, key in NAMES)
    keys = [match.expand(key) for match, key in matches if match]
    return [key.lower() if key.startswith("doi:") else key for key in keys]


def _look_into_tei(path: Path) -> list[Claim] | Unreadable:
    try:
        paper = read_tei(path, with_text=False)
    except Unreadable as error:
        return error
    return [(paper.keys, paper.title, paper.year)]


def _possible_titles(paper: PDFPaper) -> Iterator[str]:
    """Yield possible titles: the file's title property, then runs of the first lines."""
    yield paper.title
    first = [line for line in paper.pages[0].splitlines() if line.strip()][: 2 * TITLE_LINES]
    for start in range(TITLE_LINES):
        for end in range(start + 1, min(start + TITLE_LINES, len(first)) + 1):
            yield " ".join(first[start:end])
