"""Share of a document's text that other documents repeat; decides whether it can be held out.

Passages are windows of WINDOW_WORDS words, about 50 bytes of English, without case and punctuation. Only the windows of
the drawn documents are kept in memory; all other text streams past them. Above INDEX_WINDOWS windows, a sample by hash,
the same in every document, replaces them, so memory stays bounded.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from data_pipeline.cleaning.windows import normalized, windows
from data_pipeline.documents import read_texts, texts, units
from data_pipeline.progress import Stage
from data_pipeline.workers import ordered_map

WINDOW_WORDS = 8
INDEX_WINDOWS = 1 << 24
BYTES_PER_WINDOW = 4  # lower bound of text bytes per window, so a length in bytes bounds the number of windows
INDEX = ".windows.npy"


def repeated_shares(folder: Path, drawn: str, others: str, size: int, processes: int) -> list[float]:
    """Return, for each document of the shards `drawn`, the share of its windows that occur in another document.

    Args:
        folder: holds the shards of both names, and temporarily the index.
        others: shard name of all other documents.
        size: bytes of the drawn documents.
        processes: number of processes that read the others.
    """
    rate = min(1.0, INDEX_WINDOWS * BYTES_PER_WINDOW / max(size, 1))
    index, repeated = _index(texts(folder, drawn), rate)
    path = folder / INDEX
    np.save(path, index)
    with Stage("looking for held-out text in the rest", "windows") as stage:
        for places, count in ordered_map(functools.partial(_finder, path, rate), units(folder, others), processes):
            repeated[places] = True
            stage.advance(count)
    path.unlink()
    return [_share(text, rate, index, repeated) for text in texts(folder, drawn)]


def _index(drawn: Iterable[str], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted hashes of all windows, and for each whether at least two of the documents contain it."""
    found = [np.unique(_hashes(rate, text)) for text in drawn]
    index, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_counts=True)
    return index, counts > 1


def _finder(path: Path, rate: float) -> Callable[[tuple[Path, int]], tuple[np.ndarray, int]]:
    """Return a function from a unit of text to its windows' positions in the index and its number of windows."""
    index = np.load(path, mmap_mode="r")  # shared by all processes

    def find(unit: tuple[Path, int]) -> tuple[np.ndarray, int]:
        hashes = np.concatenate([_hashes(rate, text) for text in read_texts(unit)])
        places, known = _places(np.unique(hashes), index)
        return places[known], len(hashes)

    return find


def _hashes(rate: float, text: str) -> np.ndarray:
    """Return the hashes of a text's windows, uint64; with rate < 1, only those below that share of the hash range."""
    found = [block.hashes for block in windows(normalized(text), WINDOW_WORDS)]
    hashes = np.concatenate(found) if found else np.empty(0, np.uint64)
    return hashes if rate >= 1 else hashes[hashes < np.uint64(rate * 2**64)]


def _places(hashes: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each hash's position in the index, and whether it is there."""
    if not len(index):
        return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), bool)
    places = np.searchsorted(index, hashes).clip(max=len(index) - 1)
    return places, index[places] == hashes


def _share(text: str, rate: float, index: np.ndarray, repeated: np.ndarray) -> float:
    hashes = _hashes(rate, text)
    if not len(hashes):  # the text is too short for a window, or the sample holds none of its windows: share unknown
        return 0.0 if rate >= 1 or not len(_hashes(1.0, text)) else 1.0
    return float(repeated[_places(hashes, index)[0]].mean())
