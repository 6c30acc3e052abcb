"""Hashes of every window of n words of a text, in one vectorized pass, to find equal passages in any documents.

A text is a sequence of bytes b_0 ... b_m. With random 64-bit numbers r_0 ... r_255 and an odd p,
    S_i = sum_{j<i} r[b_j] p^j,    hash of [i, k) = p^{-i} (S_k - S_i)    (mod 2^64)
so one cumulative sum gives the hash of any window, and equal windows have equal hashes at any position.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_BYTES = 1 << 20  # hashed at once: a document of 100 MB takes no more memory than one of 2 MB
MULTIPLIER = 0x9E3779B97F4A7C15
SPACE = 32
NO_WORD = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a text: `hashes` uint64 `[m]`; `starts`, `ends` int64 `[m]`, their byte offsets in the text."""

    hashes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def normalized(text: str) -> bytes:
    """Return a text in lower case as UTF-8, with a space for every character but letters and digits."""
    if text.isascii():
        return text.lower().encode().translate(_ASCII_WORDS)
    return NO_WORD.sub(" ", text.lower()).encode(errors="replace")


def windows(text: bytes, length: int) -> Iterator[Windows]:
    """Yield the windows of `length` words of a text, in order, block by block; each window once.

    Words are separated by whitespace; any whitespace between two words counts as one space.
    """
    start = 0
    while start < len(text):
        end = _block_end(text, start)
        block = _windows_of_block(text[start:end], length)
        if len(block.hashes):
            yield Windows(block.hashes, block.starts + start, block.ends + start)
        if end == len(text):
            return
        # Windows across the end start within the last length - 1 words of this block.
        start = _start_of_last_words(text, start, end, length - 1)


def _block_end(text: bytes, start: int) -> int:
    end = start + BLOCK_BYTES
    if end >= len(text):
        return len(text)
    for space in (b"\n", b" "):
        found = text.find(space, end, end + BLOCK_BYTES)
        if found >= 0:
            return found
    return end  # cut a word of a megabyte


def _start_of_last_words(text: bytes, start: int, end: int, words: int) -> int:
    if words == 0:
        return end
    starts, _ = word_places(text[start:end])
    # A block with fewer words than a window must still make progress.
    return start + int(starts[-words]) if len(starts) > words else end


def word_places(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of the words' first bytes, and of the bytes after their last, int64 `[words]`."""
    blank = np.ones(len(text) + 2, bool)
    np.less_equal(np.frombuffer(text, np.uint8), SPACE, out=blank[1:-1])
    change = np.flatnonzero(blank[1:] != blank[:-1])
    return change[0::2], change[1::2]


def _windows_of_block(text: bytes, length: int) -> Windows:
    data = np.frombuffer(text, np.uint8)
    starts, ends = word_places(text)
    if len(starts) < length:
        return Windows(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    keep = data > SPACE
    keep[ends[:-1]] = True  # the first whitespace byte after each word represents all of it
    kept = data[keep]
    kept = np.where(kept > SPACE, kept, SPACE)
    powers, inverses = _powers(max(1 << 16, 1 << len(kept).bit_length()))
    sums = np.zeros(len(kept) + 1, np.uint64)
    np.cumsum(_random_table()[kept] * powers[: len(kept)], out=sums[1:])
    # In the kept bytes a word starts after all earlier words and one space for each.
    lengths = ends - starts
    kept_ends = np.cumsum(lengths + 1) - 1
    kept_starts = (kept_ends - lengths)[: len(starts) - length + 1]
    kept_ends = kept_ends[length - 1 :]
    hashes = (sums[kept_ends] - sums[kept_starts]) * inverses[kept_starts]
    hashes ^= hashes >> np.uint64(32)  # mix: the low bits of a sum of products are weak
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    return Windows(hashes, starts[: len(hashes)], ends[length - 1 :])


@functools.cache
def _random_table() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(20)).integers(0, 1 << 64, 256, np.uint64)


@functools.lru_cache(maxsize=2)  # one size for nearly all documents, one for long ones
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` powers of the multiplier and of its inverse, modulo 2^64."""
    factors = np.ones((2, count), np.uint64)
    factors[0, 1:] = MULTIPLIER
    factors[1, 1:] = pow(MULTIPLIER, -1, 1 << 64)
    return tuple(np.cumprod(factors, axis=1))


_ASCII_WORDS = bytes(byte if chr(byte).isalnum() else SPACE for byte in range(128)) + bytes(range(128, 256))
