"""A mixture's sequences as one data set, indexed by position in the run."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from data_pipeline.mixtures.order import Interleaving, walk
from data_pipeline.mixtures.plan import PlannedPhase
from data_pipeline.tokens import batches
from data_pipeline.tokens.batches import BlockSequences


class ComponentSequence(NamedTuple):
    """A sequence with the number of its component."""

    sequence: batches.Sequence
    component: int


class Mixed(batches.Sequences):
    """Sequences of several components; the empty one is assigned to the first component."""

    def __init__(self, parts: Sequence[BlockSequences | None]) -> None:
        self._parts = parts

    def part(self, component: int) -> BlockSequences:
        """Return the sequences of a component that is read."""
        part = self._parts[component]
        assert part is not None  # only a component that is never read has none
        return part

    @abstractmethod
    def locate(self, position: int) -> tuple[int, int]:
        """Return the component at a position, and the index of its sequence."""

    def __getitem__(self, position: int) -> ComponentSequence:
        if position == -1:
            return ComponentSequence(batches.NOTHING, 0)
        component, index = self.locate(position)
        return ComponentSequence(self.part(component)[index], component)


class TrainingSequences(Mixed):
    """All positions of a run, phase after phase: a pure function of seed and position.

    `Interleaving` merges the components within a phase. Each component walks through its sequences epoch by epoch, and
    continues across phases.
    """

    def __init__(
        self, phases: Sequence[PlannedPhase], names: Sequence[str], parts: Sequence[BlockSequences | None], seed: int
    ) -> None:
        super().__init__(parts)
        self.phases = phases
        self._firsts = [phase.first for phase in phases]
        self._orders = [Interleaving(phase.counts, f"{seed} {number}") for number, phase in enumerate(phases)]
        self._keys = [f"{seed} {name}" for name in names]  # by name: adding a component does not change the others

    def __len__(self) -> int:
        return self.phases[-1].end

    def locate(self, position: int) -> tuple[int, int]:
        number = bisect_right(self._firsts, position) - 1
        phase = self.phases[number]
        component, read = self._orders[number].locate(position - phase.first)
        index = walk(phase.before[component] + read, len(self.part(component)), self._keys[component])
        return component, index


class HeldOutSequences(Mixed):
    """All held-out sequences once, interleaved, so any first part is a fair sample of every component."""

    def __init__(self, parts: Sequence[BlockSequences]) -> None:
        super().__init__(parts)
        self._order = Interleaving([len(part) for part in parts], "held out")

    def __len__(self) -> int:
        return self._order.total

    def locate(self, position: int) -> tuple[int, int]:
        return self._order.locate(position)


def collate_components(sequences: list[ComponentSequence], length: int) -> dict[str, torch.Tensor]:
    """Return the batch of `collate`, and `component` int64 [sequences], the number of each sequence's component."""
    component = torch.tensor([each.component for each in sequences])
    return {**batches.collate([each.sequence for each in sequences], length), "component": component}
