"""Decontamination: drop documents that contain parts of an evaluation set, found by n-grams, and report each."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.settings import SettingError
from data_pipeline.cleaning.windows import normalized, windows
from data_pipeline.fingerprint import prepared_folder
from data_pipeline.identity import file_identity

ENDINGS = (".json", ".jsonl", ".txt", ".md")
JSON_BYTES = 512 * 1024 * 1024  # a .json file is parsed whole
KEY = "corpus.cleaning.decontamination"
SHORT_WORDS = 5  # short items are found by their first words, then compared completely


@dataclass(frozen=True)
class EvaluationSet:
    """Files of an evaluation set: `path` is a file or a folder of .json, .jsonl, .txt and .md files.

    `fields`: names of the fields to use (`answer`, `messages.content`: through lists and objects), or None for all
    strings. In text files each paragraph is an item.
    """

    name: str
    path: str
    fields: list[str] | None = None

    def files(self) -> list[Path]:
        """Return the files, sorted; raise ValueError if there are none."""
        path = Path(self.path).expanduser()
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in found if file.is_file() and file.name.lower().endswith(ENDINGS)]
        if not files:
            what = "no file in it ends in" if path.exists() else "no such file or folder; it must end in"
            raise SettingError(f"{KEY}.sets.{self.name}.path", self.path, f"{what} {' '.join(ENDINGS)}")
        return files

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield (location, text) of every item; raise ValueError for a broken file, or if no field is found."""
        empty = True
        for file in self.files():
            for place, text in self._read(file):
                empty = False
                yield place, text
        if empty:
            wanted = f"no field {', '.join(self.fields)} with text" if self.fields else "no text"
            raise ValueError(f"{KEY}.sets.{self.name}: {wanted} in {self.path}; set fields or path")

    def _read(self, file: Path) -> Iterator[tuple[str, str]]:
        try:
            if file.suffix.lower() in (".txt", ".md"):
                yield from _paragraphs(file)
            elif file.suffix.lower() == ".jsonl":
                with file.open(encoding="utf-8") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip():
                            yield from self._strings(f"{file.name}:{number}", json.loads(line))
            elif file.stat().st_size > JSON_BYTES:
                raise ValueError(f"{file.stat().st_size:,} bytes; give JSON lines (.jsonl)")
            else:
                content = json.loads(file.read_text(encoding="utf-8"))
                for number, record in enumerate(content if isinstance(content, list) else [content]):
                    yield from self._strings(f"{file.name}[{number}]", record)
        except (ValueError, RecursionError, OSError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ValueError(f"{KEY}.sets.{self.name}: {file}: {reason}") from error

    def _strings(self, place: str, record: object) -> Iterator[tuple[str, str]]:
        if self.fields is None:
            yield from ((place, text) for text in _leaves(record))
        else:
            for field in self.fields:
                for value in _field(record, field.split(".")):
                    yield from ((f"{place} {field}", text) for text in _leaves(value))


def _paragraphs(file: Path) -> Iterator[tuple[str, str]]:
    lines: list[str] = []
    with file.open(encoding="utf-8") as stream:
        number = 0
        for number, line in enumerate(stream, 1):
            if line.strip():
                lines.append(line)
            elif lines:
                yield f"{file.name}:{number - len(lines)}", "".join(lines)
                lines = []
        if lines:
            yield f"{file.name}:{number - len(lines) + 1}", "".join(lines)


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)


def _field(record: object, names: list[str]) -> Iterator[object]:
    if isinstance(record, list):
        for inner in record:
            yield from _field(inner, names)
    elif not names:
        yield record
    elif isinstance(record, dict) and names[0] in record:
        yield from _field(record[names[0]], names[1:])


class Decontamination(BaseFilter):
    """Filter that drops documents with `ngram` consecutive words of an evaluation set's item.

    Words are compared in lower case without punctuation. An item of fewer words must occur completely, and counts only
    if it has at least `short_characters` characters (and 5 words): shorter ones ("yes", "ls -l") occur everywhere.
    The first task builds the index, once. Each dropped document is a line in `report`/<task>.jsonl: document, set,
    item, n-gram, the word and byte offset of the match (both in the normalized document), and the number of n-grams
    found.

    datatrove's NGramsDecontFilter needs lighteval to build its index, and does not report the item it found.

    Args:
        sets: {name: {"path", "fields"}}.
        folder: parent of the index.
        ignore: passages whose n-grams do not count, such as a licence that an item quotes.
    """

    name = "decontamination"

    def __init__(
        self,
        sets: dict[str, dict],
        folder: str,
        report: str | None = None,
        ngram: int = 13,
        short_characters: int = 40,
        ignore: Sequence[str] = (),
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        if not sets:
            raise ValueError("corpus.cleaning.decontamination.sets: empty; name evaluation sets, or leave the step out")
        if ngram <= SHORT_WORDS:
            raise SettingError(f"{KEY}.ngram", ngram, f"give more than {SHORT_WORDS} words; 13 is usual")
        for name, settings in sets.items():
            unknown = set(settings) - {"path", "fields"}
            if unknown or "path" not in settings:
                raise ValueError(f"{KEY}.sets.{name}: give path, and maybe fields; found {settings}")
        self.sets = [_set(name, settings) for name, settings in sets.items()]
        for evaluation in self.sets:
            evaluation.files()  # report a wrong path here, not in a task
        self.folder, self.report = str(folder), None if report is None else str(report)
        self.ngram, self.short_characters, self.ignore = ngram, short_characters, list(ignore)
        self._index: _Index | None = None
        self._lines: TextIO | None = None

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents without parts of the sets; the report appears complete after the last one."""
        if self.report is None:
            yield from super().run(data, rank, world_size)
            return
        path = Path(self.report, f"{rank:05d}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8", errors="replace") as self._lines:
                yield from super().run(data, rank, world_size)
            os.replace(partial, path)
        finally:
            self._lines = None
            partial.unlink(missing_ok=True)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, the name of the set found in it)."""
        if self._index is None:
            self._index = _Index(self.build_index())
        found = self._index.find(normalized(doc.text), self.ngram)
        if found is None:
            return True
        self.stat_update(f"contaminated_{found['set']}")
        if self._lines is not None:
            about = {"document": doc.id, "source": doc.metadata.get("source")}
            print(json.dumps({**about, **found}, ensure_ascii=False), file=self._lines)
        return False, found["set"]

    def build_index(self) -> Path:
        """Return the folder of the index; build it if it is missing."""
        identity = {
            "sets": [asdict(evaluation) for evaluation in self.sets],
            "files": [file_identity(evaluation.files()) for evaluation in self.sets],
            "settings": [self.ngram, self.short_characters, self.ignore],
        }
        return prepared_folder(Path(self.folder), "decontamination", identity, self._build)

    def _build(self, folder: Path) -> dict:
        ignored = _hashes_of(self.ignore, self.ngram)
        pieces, counts = [], {}
        names: list[list[str]] = []
        short: list[list[str]] = []
        for evaluation in self.sets:
            items = 0
            for place, text in evaluation.items():
                items += 1
                words = normalized(text).split()
                if len(words) < self.ngram:
                    joined = b" ".join(words)
                    if len(words) >= SHORT_WORDS and len(joined) >= self.short_characters:
                        short.append([evaluation.name, place, joined.decode()])
                    continue
                hashes = np.setdiff1d(_hashes_of([text], self.ngram), ignored)
                pieces.append((hashes, np.full(len(hashes), len(names), np.uint32)))
                names.append([evaluation.name, place])
            counts[evaluation.name] = items
        hashes = np.concatenate([piece[0] for piece in pieces] or [np.empty(0, np.uint64)])
        owners = np.concatenate([piece[1] for piece in pieces] or [np.empty(0, np.uint32)])
        hashes, first = np.unique(hashes, return_index=True)
        np.save(folder / "hashes.npy", hashes)
        np.save(folder / "owners.npy", owners[first])
        (folder / "items.json").write_text(json.dumps({"names": names, "short": short}), encoding="utf-8")
        return {"items": counts, "ngrams": len(hashes), "short_items": len(short)}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_index": None, "_lines": None}


def _set(name: str, settings: dict) -> EvaluationSet:
    fields = settings.get("fields")
    return EvaluationSet(name, str(settings["path"]), None if fields is None else [str(field) for field in fields])


class _Index:
    """Hashed n-grams of evaluation sets, in memory-mapped arrays."""

    def __init__(self, folder: Path) -> None:
        self.hashes = np.load(folder / "hashes.npy", mmap_mode="r")
        self.owners = np.load(folder / "owners.npy", mmap_mode="r")
        items = json.loads((folder / "items.json").read_text(encoding="utf-8"))
        self.names = items["names"]
        self.short: dict[int, list[tuple[str, str, bytes]]] = {}
        for name, place, text in items["short"]:
            start = _hashes_of([text], SHORT_WORDS, first=True)
            self.short.setdefault(int(start[0]), []).append((name, place, text.encode()))
        self.short_hashes = np.array(sorted(self.short), np.uint64)

    def find(self, text: bytes, ngram: int) -> dict | None:
        """Return the first match in a normalized text and the number of all matches, or None."""
        result, count, words_before = None, 0, 0
        for block in windows(text, ngram) if len(self.hashes) else ():
            places = np.searchsorted(self.hashes, block.hashes)
            places[places == len(self.hashes)] = 0
            hits = np.flatnonzero(self.hashes[places] == block.hashes)
            if len(hits) and result is None:
                hit = hits[0]
                owner = int(self.owners[places[hit]])
                start, end = block.starts[hit], block.ends[hit]
                name, place = self.names[owner]
                result = _match_record(name, place, text[start:end], int(words_before + hit), int(start))
            count += len(hits)
            words_before += len(block.hashes)
        if result is None:
            result, count = self._find_short(text), 1
        return None if result is None else {**result, "ngrams": int(count)}

    def _find_short(self, text: bytes) -> dict | None:
        words_before = 0
        for block in windows(text, SHORT_WORDS) if self.short else ():
            for hit in np.flatnonzero(np.isin(block.hashes, self.short_hashes)):
                start = int(block.starts[hit])
                for name, place, item in self.short[int(block.hashes[hit])]:
                    words = text[start : start + 4 * len(item) + 64].split(maxsplit=item.count(b" ") + 1)
                    if words[: item.count(b" ") + 1] == item.split():
                        return _match_record(name, place, item, int(words_before + hit), start)
            words_before += len(block.hashes)
        return None


def _match_record(name: str, place: str, passage: bytes, word: int, byte: int) -> dict[str, object]:
    shown = b" ".join(passage.split()).decode(errors="replace")
    return {"set": name, "item": place, "ngram": shown, "word": word, "byte": byte}


def _hashes_of(texts: Iterable[str], length: int, first: bool = False) -> np.ndarray:
    """Return the unique hashes of all windows of the texts, sorted; with `first`, of the first window only."""
    found = [block.hashes for text in texts for block in windows(normalized(text), length)]
    hashes = np.concatenate(found or [np.empty(0, np.uint64)])
    return hashes[:1] if first else np.unique(hashes)
