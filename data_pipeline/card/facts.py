"""Contents of a corpus, counted in one pass over its Parquet files without their texts."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = ("category", "source", "split", "licence", "date", "length", "quality")
ROWS_AT_ONCE = 1 << 16  # row groups are small, so several are counted together
NAME_CHARACTERS = 200  # of a licence or another name that a source took from its input
LICENCES = 1_000  # counted separately; a source might write anything there
OTHER_LICENCES = "others"
UNKNOWN = ""  # no date, or no licence
NO_DATE = "?"  # a date from which no month can be read
MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
BINS_PER_DOUBLING = 64
LENGTH_BINS = 48 * BINS_PER_DOUBLING  # up to 2^48 bytes


@dataclass(slots=True)
class Amount:
    """Number of documents, and UTF-8 bytes of their text."""

    documents: int = 0
    bytes: int = 0

    def add(self, documents: int, length: int) -> None:
        self.documents += documents
        self.bytes += length


Amounts = dict[tuple[str, ...], Amount]


def summed(amounts: Amounts, *places: int) -> Amounts:
    """Return the sums grouped by the key parts at `places`; without places the total, under ()."""
    sums: Amounts = defaultdict(Amount)
    for key, amount in amounts.items():
        sums[tuple(key[place] for place in places)].add(amount.documents, amount.bytes)
    return dict(sums)


class Lengths:
    """Histogram of document lengths with bins 1.1% wide, and the exact minimum and maximum."""

    def __init__(self) -> None:
        self.bins = np.zeros(LENGTH_BINS, np.int64)
        self.total, self.least, self.greatest = 0, math.inf, 0

    def add(self, lengths: np.ndarray) -> None:
        """Count `lengths` [documents], in bytes."""
        bins = (np.log2(np.maximum(lengths, 1)) * BINS_PER_DOUBLING).astype(np.int64)
        self.bins += np.bincount(np.minimum(bins, LENGTH_BINS - 1), minlength=LENGTH_BINS)
        self.total += int(lengths.sum())
        self.least = min(self.least, int(lengths.min()))
        self.greatest = max(self.greatest, int(lengths.max()))

    def include(self, other: "Lengths") -> None:
        """Add the counts of another histogram."""
        self.bins += other.bins
        self.total += other.total
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)

    @property
    def documents(self) -> int:
        return int(self.bins.sum())

    def quantile(self, fraction: float) -> float:
        """Return the length that `fraction` of the documents do not exceed: the middle of its bin."""
        place = np.searchsorted(np.cumsum(self.bins), max(1, math.ceil(fraction * self.documents)))
        middle = 2 ** ((int(place) + 0.5) / BINS_PER_DOUBLING)
        return min(max(middle, self.least), self.greatest)


def together(histograms: Iterable[Lengths]) -> Lengths:
    """Return the merged histogram of several."""
    lengths = Lengths()
    for histogram in histograms:
        lengths.include(histogram)
    return lengths


@dataclass
class Facts:
    """Amounts by (category, source, split), (month, source) and (licence, category), and lengths by category.

    A month is "2024-03", UNKNOWN or NO_DATE. A licence may be UNKNOWN; from the thousand and first on it is
    OTHER_LICENCES. `quality`: number of documents by category and rounded quality, if there are labels.
    """

    parts: Amounts = field(default_factory=lambda: defaultdict(Amount))
    months: Amounts = field(default_factory=lambda: defaultdict(Amount))
    licences: Amounts = field(default_factory=lambda: defaultdict(Amount))
    lengths: dict[str, Lengths] = field(default_factory=lambda: defaultdict(Lengths))
    quality: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _licence_names: set[str] = field(default_factory=set)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table with COLUMNS."""
        month = pc.utf8_slice_codeunits(table["date"], 0, len("2024-03"))
        keys = ["category", "source", "split", "licence", "month"]
        grouped = table.append_column("month", month).group_by(keys).aggregate([("length", "sum"), ([], "count_all")])
        for row in grouped.to_pylist():
            documents, length = row["count_all"], row["length_sum"] or 0
            category, source = (_name(row[key]) for key in ("category", "source"))
            self.parts[category, source, row["split"] or ""].add(documents, length)
            self.months[_month(row["month"]), source].add(documents, length)
            self.licences[self._licence(row["licence"]), category].add(documents, length)
        self._add_columns(table)

    def _add_columns(self, table: pa.Table) -> None:
        encoded = pc.dictionary_encode(table["category"].combine_chunks(), null_encoding="encode")
        codes, lengths = encoded.indices.to_numpy(), table["length"].fill_null(0).to_numpy()
        quality = table["quality"].to_numpy().astype(np.float64)  # null is NaN
        for code, category in enumerate(encoded.dictionary.to_pylist()):
            mine = codes == code
            self.lengths[_name(category)].add(lengths[mine])
            labelled = quality[mine & np.isfinite(quality)]
            if labelled.size:
                self.quality[_name(category)].update(np.rint(labelled).astype(int).tolist())

    def _licence(self, licence: str | None) -> str:
        name = (licence or UNKNOWN)[:NAME_CHARACTERS]
        if name not in self._licence_names and len(self._licence_names) >= LICENCES:
            return OTHER_LICENCES
        self._licence_names.add(name)
        return name


def read_facts(documents: Path) -> Facts:
    """Return the facts of all documents/<category>/*.parquet; memory does not grow with their number."""
    facts = Facts()
    for table in _tables(sorted(documents.glob("*/*.parquet"))):
        facts.add(table)
    return facts


def _tables(paths: Iterable[Path]) -> Iterator[pa.Table]:
    """Yield the columns of all files, in tables of at least ROWS_AT_ONCE rows and up to a row group more."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(COLUMNS), use_threads=False):
                held.append(batch.select(COLUMNS))
                rows += batch.num_rows
                if rows >= ROWS_AT_ONCE:
                    yield pa.Table.from_batches(held)
                    held, rows = [], 0
    if rows:
        yield pa.Table.from_batches(held)


def _name(value: str | None) -> str:
    return (value or "unknown")[:NAME_CHARACTERS]


def _month(text: str | None) -> str:
    if not text:
        return UNKNOWN
    return text if MONTH.fullmatch(text) else NO_DATE
