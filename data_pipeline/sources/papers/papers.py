"""Records of papers in one form: DBLP-style, Semantic Scholar (S2ORC, S2AG) and peS2o."""

import json
import re
import unicodedata
from dataclasses import dataclass

from data_pipeline.licences import licence_of_address
from data_pipeline.sources.papers.dblp import arxiv_in, doi_in

TITLE_CHARACTERS = 20  # shorter ones ("Introduction", "Message from the chairs") identify no paper
LICENCES = {  # Semantic Scholar's terms, which omit the version
    "CCBY": "CC-BY",
    "CCBYSA": "CC-BY-SA",
    "CCBYND": "CC-BY-ND",
    "CCBYNC": "CC-BY-NC",
    "CCBYNCSA": "CC-BY-NC-SA",
    "CCBYNCND": "CC-BY-NC-ND",
    "CC0": "CC0-1.0",
}
YEAR = re.compile(r"\b(1[89]\d\d|20\d\d)\b")
NUMERIC = re.compile(r"[^A-Za-z]*")
BIBLIOGRAPHY = re.compile(
    r"^[ \t#]*(?:\d{1,2}\.?|[IVX]+\.)?[ \t]*(?:references|bibliography|works cited|literature cited)[ \t]*:?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
APPENDIX = re.compile(r"^[ \t#]*(?:[A-Z]\.?[ \t]+)?(?:appendix|appendices)\b.{0,80}$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Paper:
    """A record of a paper. `keys` are names such as "doi:10.1145/1", "dblp:conf/sosp/A1", "corpusid:7"."""

    title: str
    year: int | None
    venue: str = ""
    dblp: str = ""
    number: str = ""
    keys: tuple[str, ...] = ()
    url: str | None = None
    date: str | None = None
    licence: str | None = None


def paper_of(record: dict) -> Paper:
    """Return the paper in a record of any known layout; values of a wrong type are ignored."""
    within = _dict(_dict(record.get("content")).get("source"))
    layers = (record, record.get("metadata"), record.get("openaccessinfo"), within.get("oainfo"))
    nested = [layer for layer in layers if isinstance(layer, dict)]
    about = {name.lower(): value for part in reversed(nested) for name, value in part.items() if value is not None}
    identifiers = {name.lower(): str(value) for name, value in _external(nested).items() if value}
    links = _strings(about.get("links"), about.get("ee"), about.get("url"))
    dblp = identifiers.get("dblp") or _dblp_key(about.get("key"))
    doi = doi_in(identifiers.get("doi") or _string(about.get("doi"))) or next(filter(None, map(doi_in, links)), None)
    arxiv = identifiers.get("arxiv") or next(filter(None, map(arxiv_in, links)), None)
    corpus = about.get("corpusid") or identifiers.get("corpusid") or _pes2o_id(record)
    keys = {"dblp": dblp, "doi": doi, "arxiv": arxiv and re.sub(r"v\d+$", "", arxiv), "corpusid": corpus}
    keys["s2"] = about.get("paperid")
    title = _string(about.get("title")) or _title_within(record)
    date = _string(about.get("publicationdate")) or _string(about.get("created"))
    return Paper(
        title=" ".join(title.split()),
        year=year_in(about.get("year")) or year_in(date),
        venue=_string(about.get("venue")) or _journal(about.get("journal")),
        dblp=dblp,
        number=_string(about.get("number")),
        keys=tuple(f"{kind}:{value}" for kind, value in keys.items() if value),
        url=f"https://doi.org/{doi}" if doi else next((link for link in links if link.startswith("http")), None),
        date=date[:10] if re.fullmatch(r"\d{4}-\d\d-\d\d.*", date) else None,
        licence=licence_of(_string(about.get("license"))),
    )


def _title_within(record: dict) -> str:
    """Return the title marked by S2ORC's spans, or the first line of peS2o's text."""
    content, text = record.get("content"), _string(record.get("text"))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        annotations = content.get("annotations")
        spans = _spans(annotations.get("title") if isinstance(annotations, dict) else None, len(content["text"]))
        return content["text"][spans[0][0] : spans[0][1]] if spans else ""
    return text.partition("\n")[0] if len(text) > 4 * TITLE_CHARACTERS else ""


def _external(parts: list[dict]) -> dict:
    found: dict = {}
    for part in parts:
        for name in ("externalids", "externalIds"):
            if isinstance(part.get(name), dict):
                found.update(part[name])
    return found


def _dict(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _string(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _strings(*values: object) -> list[str]:
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]


def _journal(value: object) -> str:
    return _string(value.get("name") if isinstance(value, dict) else value)


def _dblp_key(value: object) -> str:
    key = _string(value)
    return key if key.count("/") >= 2 else ""


def _pes2o_id(record: dict) -> str | None:
    """Return the corpus id in peS2o's `id`; other collections use that name for something else."""
    known = str(record.get("source", "")).startswith(("s2orc", "s2ag")) and str(record.get("id", "")).isdigit()
    return str(record["id"]) if known else None


def year_in(value: object) -> int | None:
    """Return the first year from 1800 to 2099 in a number or a string, or None."""
    match = YEAR.search(str(value)) if isinstance(value, str | int) else None
    return int(match[1]) if match else None


def licence_of(words: str) -> str | None:
    """Return a licence as its SPDX id if the words or the link determine one, else unchanged."""
    return licence_of_address(words) or LICENCES.get(re.sub(r"[^A-Z0-9]", "", words.upper()), words) or None


def title_key(title: str) -> str | None:
    """Return a title without case, accents, spaces and punctuation; None if it is too short to identify a paper."""
    folded = unicodedata.normalize("NFKD", title).casefold()
    key = "".join(filter(str.isalnum, folded))
    return key if len(key) >= TITLE_CHARACTERS else None


def text_of(record: dict) -> str:
    """Return the full text of an S2ORC or peS2o record; "" if it has none (or only the abstract).

    S2ORC's spans give sections and paragraphs; text outside them (affiliations, figures, the bibliography) is dropped.
    Headings become Markdown.
    """
    content = next((record[name] for name in ("content", "body") if isinstance(record.get(name), dict)), None)
    if content is not None:
        text = content.get("text")
        return _from_spans(text, content.get("annotations")) if isinstance(text, str) else ""
    if str(record.get("source", "")).startswith("s2ag"):
        return ""  # peS2o's abstracts
    return without_bibliography(_string(record.get("text")))


def _from_spans(text: str, annotations: object) -> str:
    found = _dict(annotations)
    spans = {name: _spans(found.get(name), len(text)) for name in ("abstract", "paragraph", "sectionheader")}
    if not spans["paragraph"]:
        return without_bibliography(text.strip())
    citations = [
        (start, end) for start, end, _ in _spans(found.get("bibref"), len(text)) if NUMERIC.fullmatch(text[start:end])
    ]
    pieces: list[tuple[int, int, str | None]] = [
        (start, end, None) for name in ("abstract", "paragraph") for start, end, _ in spans[name]
    ]
    pieces = sorted(pieces + [(start, end, number or "1") for start, end, number in spans["sectionheader"]])
    while pieces and pieces[-1][2] is not None:  # trailing headings, of figures and tables
        pieces.pop()
    parts, position, following = [], 0, 0
    for start, end, number in pieces:
        if start < position:
            continue  # a paragraph within the abstract
        position = end
        while following < len(citations) and citations[following][0] < start:
            following += 1
        kept = []
        while following < len(citations) and citations[following][1] <= end:
            kept.append(text[start : citations[following][0]].rstrip())
            start = citations[following][1]
            following += 1
        words = " ".join("".join([*kept, text[start:end]]).split())
        if words:
            parts.append(words if number is None else f"{'#' * min(number.rstrip('.').count('.') + 2, 6)} {words}")
    return "\n\n".join(parts)


def _spans(value: object, length: int) -> list[tuple[int, int, str | None]]:
    """Return (start, end, section number) of the spans in an annotation: a list, or JSON within JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    found = []
    for span in value if isinstance(value, list) else []:
        start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if isinstance(start, int | str) and isinstance(end, int | str) and f"{start}{end}".isdigit():
            start, end = int(start), int(end)
            attributes = span.get("attributes")
            number = attributes.get("n") if isinstance(attributes, dict) else None
            if start < end <= length:
                found.append((start, end, number if isinstance(number, str) else None))
    return sorted(found, key=lambda span: span[:2])


def without_bibliography(text: str) -> str:
    """Return a text without its list of references: from the last heading of that name up to an appendix."""
    headings = [match for match in BIBLIOGRAPHY.finditer(text) if match.start() > 0.3 * len(text)]
    if not headings:
        return text
    appendix = APPENDIX.search(text, headings[-1].end())
    rest = text[appendix.start() :] if appendix else ""
    return f"{text[: headings[-1].start()].rstrip()}\n\n{rest}".strip()
