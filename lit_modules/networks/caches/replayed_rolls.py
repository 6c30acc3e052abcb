"""Rolls of all layers as one CUDA graph: between two decoding steps the host launches one thing, not a thousand.

A roll lets old tokens go: it packs some slots and closes the gaps. In a long generation the same roll comes again and
again, with other target blocks. The first one of its kind runs as it is, the second is captured, later ones are
replayed. All of this needs storage at fixed addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lit_modules.networks.caches.moves import Filing, Move, Roll

Kind = tuple[object, ...]


class Layer(Protocol):
    """A layer of a cache."""

    device: torch.device

    def roll(self, move: Move, /) -> None:
        """Let the tokens go that the move releases."""

    def forget_layouts(self) -> None:
        """Drop what the last attention saw, of which a roll takes its tokens."""


@dataclass(frozen=True)
class Captured:
    """A captured roll, and the tensors that it reads: kept slots, released slots, cells of the filing."""

    graph: torch.cuda.CUDAGraph
    tables: list[Tensor]


class ReplayedRolls:
    """The rolls of one cache."""

    def __init__(self) -> None:
        self.captured: dict[Kind, Captured | None] = {}  # None: this kind was seen once

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Let a copy of a cache begin with no graph: one can neither be copied nor written to a file."""
        return ReplayedRolls, ()

    def forget(self) -> None:
        """Forget all captured rolls: the cache's tensors have other addresses from now on."""
        self.captured.clear()

    def __call__(self, move: Move, layers: Sequence[Layer], packs: bool) -> None:
        """Let the tokens of all layers go that a move of one decoding step releases.

        Args:
            move: of keys and values.
            layers: of the cache.
            packs: whether released tokens are packed.
        """
        kind = kind_of(move, layers, packs)
        if kind not in self.captured or move.roll is None:
            if kind is not None:
                self.captured[kind] = None
            for layer in layers:
                layer.roll(move)
            return
        captured = self.captured[kind]
        if captured is None:
            captured = self.captured[kind] = _capture(move, layers)
        for mine, new in zip(captured.tables, _tables(move.roll), strict=True):
            mine.copy_(new)
        captured.graph.replay()
        for layer in layers:
            layer.forget_layouts()


def kind_of(move: Move, layers: Sequence[Layer], packs: bool) -> Kind | None:
    """Return what two rolls share if one can replay the other, None for a roll that cannot be captured."""
    roll, turns = move.roll, move.turns
    if roll is None or not move.end.is_cuda or len({layer.device for layer in layers}) > 1:
        return None
    # Where the layers choose, the host has numbers of its own for rows of other lengths and for evicted tokens.
    if turns and (len(turns) > 1 or not packs):
        return None
    sizes = tuple(tuple(table.shape) for table in _tables(roll))
    return sizes, roll.kept is None, roll.released is None, *((t.before, t.real, t.releases, t.since) for t in turns)


def _tables(roll: Roll) -> list[Tensor]:
    """Return the tensors of a roll."""
    tables = [roll.kept, roll.released, None if roll.filing is None else roll.filing.cells]
    return [table for table in tables if table is not None]


def _capture(move: Move, layers: Sequence[Layer]) -> Captured:
    roll = move.roll
    assert roll is not None
    # Which blocks are written is read from the cells alone, not from the host's number of the first.
    filing = None if roll.filing is None else Filing(roll.filing.needed, roll.filing.cells.clone())
    kept, released = (None if table is None else table.clone() for table in (roll.kept, roll.released))
    mine = Roll(kept, released, filing)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those that pin training batches, may allocate device memory meanwhile.
    with torch.cuda.device(move.end.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for layer in layers:
            layer.roll(replace(move, roll=mine))
    return Captured(graph, _tables(mine))
