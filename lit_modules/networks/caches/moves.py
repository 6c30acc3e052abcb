"""What new tokens do in a compressed cache: the slots they take, and the tokens that leave afterwards."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Turn:
    """What the new tokens are for the rows of one schedule.

    Attributes:
        rows: the rows' indices.
        before: slots in use.
        padding: how many of the new tokens, the first ones, are padding; then `before` is 0.
        real: how many are not.
        length: real tokens before.
        releases: blocks that the tokens' content chooses to release; 0 where positions decide.
        since: the tokens in slots from this one to `before` came one by one since the last prompt chunk or release.
    """

    rows: list[int]
    before: int
    padding: int
    real: int
    length: int
    releases: int = 0
    since: int = 0

    def slots(self) -> Array:
        """Return the slots of the tokens, the new ones last, without padding."""
        first = self.before + self.padding
        return np.concatenate((np.arange(self.before), np.arange(first, first + self.real)))


@dataclass(frozen=True)
class Filing:
    """Where new blocks go: block `source[i]` of row `row[i]` to block `target[i]`; a slice where all rows agree.

    Attributes:
        needed: blocks that the storage has to hold.
        cells: int64 `[3, n]`: row, source and target.
        first: the first new block of every row, or None where rows differ.
    """

    needed: int
    cells: Tensor
    first: int | None = None


@dataclass(frozen=True)
class Roll:
    """The tokens that leave their slots after attention, as slots of the layout that attention saw.

    Attributes:
        kept: int64 `[B or 1, 1, m]`, the slots that stay, which become slots 0 to m - 1; None where content decides.
        released: int64 `[B or 1, 1, n]`, the slots to pack, in order; None if none is packed.
        filing: where the new blocks go; None if none is packed.
    """

    kept: Tensor | None
    released: Tensor | None
    filing: Filing | None


@dataclass(frozen=True)
class Move:
    """What `tokens` new tokens do.

    Attributes:
        tokens: T.
        used: slots in use before, the most of any row.
        slots: slots in use with the new tokens, the most of any row.
        end: int32 `[B]`, the slots in use with the new tokens; the new ones are the last.
        start: int32 `[B]`, the first slot that is no padding, or None.
        blocks: int32 `[B]`, packed blocks before.
        past: whether any row has packed blocks.
        is_level: whether all rows use equally many slots.
        roll: what leaves afterwards, or None.
        is_padded: whether some row has padding among the new tokens.
        orders: where positions lie, if the ledger `tracks` them.
        turns: for policies that read content, which choose `kept` and `released` of the roll themselves; else empty.
    """

    tokens: int
    used: int
    slots: int
    end: Tensor
    start: Tensor | None
    blocks: Tensor
    past: bool
    is_level: bool
    roll: Roll | None
    is_padded: bool
    orders: tuple["Order", ...]
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Order:
    """Which positions lie where during attention, for the rows of one schedule.

    Attributes:
        rows: the rows' indices.
        packed: positions of the packed tokens, as they lie in memory.
        slots, positions: the slots in use, and the position in each.
    """

    rows: list[int]
    packed: Array
    slots: Array
    positions: Array


def match(keys: Move, values: Move, sizes: tuple[int, int, int, int]) -> Array:
    """Return for each value the place of its key, where the two keep different tokens.

    Args:
        keys, values: the same tokens' moves in the two ledgers.
        sizes: packed tokens and slots of the keys' storage, and of the values'.

    Returns:
        int64 `[B, packed tokens + slots]` of the values' storage; `[1, ...]` where all rows agree. Packed tokens come
        first. A place that is not in use has the number of the keys' places.
    """
    key_packed, key_slots, value_packed, value_slots = sizes
    table = np.full((sum(len(o.rows) for o in values.orders), value_packed + value_slots), key_packed + key_slots)
    for key, value in zip(keys.orders, values.orders, strict=True):
        place = np.empty(len(key.packed) + len(key.positions), np.int64)
        place[key.packed] = np.arange(len(key.packed))
        place[key.positions] = key_packed + key.slots
        row = np.full(table.shape[1], key_packed + key_slots)
        row[: len(value.packed)] = place[value.packed]
        row[value_packed + value.slots] = place[value.positions]
        table[value.rows] = row
    return table[:1] if len(values.orders) == 1 else table
