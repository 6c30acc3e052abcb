"""Which tokens of a compressed cache keep 16 bits, and when the others are released.

These are the policies that depend on positions alone, so everything here is host arithmetic on 0-based positions, and a
pure function of the number of tokens: it never matters how they were divided into prompt chunks and decoding steps.

| policy | what keeps 16 bits after n tokens |
|---|---|
| `log_sparse` | the newest W to 2W - 1, and W older ones with gaps that double with every W tokens back (LogQuant) |
| `recent` | the last `window` (KiVi) |
| `first_and_recent` | the first `first` and the last `window` (StreamingLLM, KiVi + sink) |

The log-sparse rule (arXiv 2503.19950, section 2.5): append to a list A; whenever it has 3W tokens, replace it by
`A[0:2W:2] + A[2W:3W]`. The n-th of these thinnings can be written down directly. Before it, A is W old tokens, W tokens
of the window before, and W new ones. Entry i of the new old part is entry 2i of the first 2W, which is in the earlier
window if 2i >= W, and otherwise entry 2i of the earlier old part, where the same holds. So entry i comes, s thinnings
back, from where `2^s i` reaches W: `position(n, i) = (n - s) W + 2^s i`.

So the k-th W tokens before the newest ones have about `W / 2^k` left, and nothing older than about `W (2 + log2 W)`
tokens is kept, except the very first token: entry 0 is never dropped.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common.settings import check_choice, check_whole

POLICIES = ("log_sparse", "recent", "first_and_recent")

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """What some new tokens change; all are int64 positions, counted from the row's first token.

    Attributes:
        packed: `[n]`, n a multiple of the block: tokens to pack now, in the order of their release.
        waiting: `[m]`, m less than a block: tokens that were released, in that order, and keep 16 bits until their
            block is full.
        kept: the tokens that keep 16 bits by the policy, ascending.
    """

    packed: Array
    waiting: Array
    kept: Array


@dataclass
class Schedule:
    """The releases of one tensor of a cache, token by token or many at a time.

    It counts tokens and holds none, so all layers can share one, and `copy.copy` of it is a point to return to. Rows
    with left padding need schedules of their own, which count real tokens only.

    Args:
        keep: one of `POLICIES`.
        window: W of `log_sparse`, which keeps 2W to 3W - 1 tokens; else the number of newest tokens that are kept.
        first: the number of first tokens that `first_and_recent` keeps; the other policies do not read it.
        block: tokens that are packed together; 1 where released tokens are evicted.

    Attributes:
        length: tokens so far.

    Raises:
        SettingError: for an unknown policy or a number out of range.
    """

    keep: str
    window: int
    first: int = 0
    block: int = 64
    length: int = 0

    def __post_init__(self) -> None:
        _check(self.keep, self.window, self.first)
        check_whole("block", self.block, 1)
        check_whole("length", self.length, 0)

    def advance(self, tokens: int) -> Step:
        """Append `tokens` tokens (0 or more)."""
        check_whole("tokens", tokens, 0)
        packed = self.packed
        self.length += tokens
        released = released_count(self.keep, self.length, self.window, self.first)
        order = release_order(self.keep, packed, released, self.window, self.first)
        full = self.packed - packed
        kept = kept_positions(self.keep, self.length, self.window, self.first)
        return Step(packed=order[:full], waiting=order[full:], kept=kept)

    @property
    def packed(self) -> int:
        """The number of tokens packed so far, a multiple of the block."""
        return released_count(self.keep, self.length, self.window, self.first) // self.block * self.block

    @property
    def earliest(self) -> int:
        """The fewest tokens that `rewind` can go back to: those at which the last packed block became full."""
        if self.packed == 0:
            return 0
        if self.keep == "log_sparse":
            return (2 + -(-self.packed // self.window)) * self.window
        return self.packed + self.window + (self.first if self.keep == "first_and_recent" else 0)

    def rewind(self, length: int) -> Step:
        """Take back tokens until `length` are left; the step that is returned packs nothing.

        What is kept and waits afterwards has 16 bits before, too, kept or waiting: no block was filled in between.

        Raises:
            ValueError: if a block was packed since: its tokens no longer have 16 bits.
        """
        check_whole("length", length, 0, self.length)
        if length < self.earliest:
            raise ValueError(
                f"{self.length} tokens cannot be cut to {length}, as a block was quantized since: cut to "
                f"{self.earliest} or more, or begin anew"
            )
        self.length = length
        return self.advance(0)


def log_sparse_positions(length: int, window: int) -> list[int]:
    """Return the positions that keep 16 bits after `length` tokens have come one by one, ascending and 0-based.

    LogQuant's rule with window W (arXiv 2503.19950, section 2.5). There are `length` of them below 3W tokens, and from
    2W to 3W - 1 afterwards: the list is thinned as soon as it has 3W.

    Raises:
        SettingError: if length is below 0 or window below 1.
    """
    positions: list[int] = kept_positions("log_sparse", length, window).tolist()
    return positions


def kept_positions(keep: str, length: int, window: int, first: int = 0) -> Array:
    """Return the ascending positions that a policy keeps in 16 bits after `length` tokens; arguments as `Schedule`'s.

    Raises:
        SettingError: for an unknown policy or a number out of range.
    """
    _check(keep, window, first)
    check_whole("length", length, 0)
    if keep == "log_sparse":
        thinnings = _thinnings(length, window)
        old = _in_list(np.full(1, thinnings), np.arange(min(window, length)), window)[0]
        return np.concatenate((old, np.arange(min(length, (thinnings + 1) * window), length)))
    first = min(first, length) if keep == "first_and_recent" else 0
    return np.concatenate((np.arange(first), np.arange(max(first, length - window), length)))


def released_count(keep: str, length: int, window: int, first: int = 0) -> int:
    """Return how many of `length` tokens a policy no longer keeps in 16 bits; arguments as `Schedule`'s."""
    if keep == "log_sparse":
        return _thinnings(length, window) * window
    return max(0, length - window - (first if keep == "first_and_recent" else 0))


def release_order(keep: str, start: int, stop: int, window: int, first: int = 0) -> Array:
    """Return the positions of the released tokens number `start` to `stop - 1`, in the order of their release.

    The order is that of time; tokens that one thinning releases are in the order of their positions.
    """
    if keep != "log_sparse":
        return np.arange(start, stop) + (first if keep == "first_and_recent" else 0)
    thinnings = np.arange(start // window, -(-stop // window))  # each releases W: the odd entries of the first 2W
    order = _in_list(thinnings, np.arange(1, 2 * window, 2), window).ravel()
    skipped = start // window * window
    return order[start - skipped : stop - skipped]


def _thinnings(length: int, window: int) -> int:
    """Return how often the list was thinned: at 3W tokens, and after each W more."""
    return max(0, length // window - 2)


def _in_list(thinnings: Array, entries: Array, window: int) -> Array:
    """Return the positions `[n, m]` of `entries` `[m]` (below 2W) of the list after each number of `thinnings` `[n]`.

    The equation at the head of this file; entries that would come from before the first thinning are there by then.
    """
    back = np.minimum(_doublings(window)[entries], thinnings[:, None])
    return (thinnings[:, None] - back) * window + (entries << back)


@lru_cache(maxsize=64)  # decoding asks at every step
def _doublings(window: int) -> Array:
    """Return `[2W]`, for each entry the least s with `2^s entry >= W`; for entry 0 more than all thinnings."""
    reached, doublings = np.arange(2 * window), np.zeros(2 * window, dtype=np.int64)
    while np.any(short := reached[1:] < window):
        reached[1:][short] *= 2
        doublings[1:][short] += 1
    doublings[0] = np.iinfo(np.int64).max
    return doublings


def _check(keep: str, window: int, first: int) -> None:
    check_choice("keep", keep, POLICIES)
    check_whole("window", window, 1)
    check_whole("first", first, 0)
