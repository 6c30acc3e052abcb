"""Examples packed into sequences of one length."""

from collections.abc import Iterator

import numpy as np

from data_pipeline.instructions.rendering import Example
from data_pipeline.tokens.batches import IGNORED, Sequence

OPEN_SEQUENCES = 1024  # sequences filled at once: enough for dense packing, few enough for any number of examples


class Concatenated:
    """Concatenate the examples and cut at every `length` tokens; `filler` pads the last sequence.

    The rest of a cut example is a separate document in the next sequence; its first token is still learned, as the last
    target of the sequence before. With `cross_documents` a sequence is one document.
    """

    def __init__(self, length: int, filler: int, cross_documents: bool) -> None:
        self.length, self.filler, self.cross_documents = length, filler, cross_documents
        self._examples: list[Example] = []
        self._held = 0

    def add(self, example: Example) -> Iterator[Sequence]:
        """Take an example; yield the sequences that are full."""
        self._examples.append(example)
        self._held += len(example.tokens)
        while self._held >= self.length:
            yield self._cut()

    def finish(self) -> Iterator[Sequence]:
        """Yield the incomplete sequence, if there is one."""
        if self._held:
            yield self._cut()

    def _cut(self) -> Sequence:
        sequence = join(self._examples, self.length, self.filler, self.cross_documents)
        used = self.length
        while self._examples and len(self._examples[0].tokens) <= used:
            used -= len(self._examples.pop(0).tokens)
        if self._examples and used:
            self._examples[0] = Example(*(part[used:] for part in self._examples[0]))
        self._held = max(0, self._held - self.length)
        return sequence


class Whole:
    """First fit: an example goes into the first sequence with room for it, and none is cut.

    Examples must not be longer than `length`. `filler` pads the rest of a sequence, as a separate document unless
    `cross_documents`. If none of `OPEN_SEQUENCES` sequences has room, the fullest is closed.
    """

    def __init__(self, length: int, filler: int, cross_documents: bool) -> None:
        self.length, self.filler, self.cross_documents = length, filler, cross_documents
        self._open: list[list[Example]] = []
        self._room = np.zeros(OPEN_SEQUENCES, np.int64)

    def add(self, example: Example) -> Iterator[Sequence]:
        """Take an example; yield the sequence that is closed to make room, if any."""
        size = len(example.tokens)
        fitting = np.flatnonzero(self._room >= size)  # a slot that is not open yet has no room
        if len(fitting):
            place = int(fitting[0])
            self._open[place].append(example)
        elif len(self._open) < OPEN_SEQUENCES:
            place = len(self._open)
            self._open.append([example])
            self._room[place] = self.length
        else:
            place = int(self._room.argmin())
            yield self._join(self._open[place])
            self._open[place] = [example]
            self._room[place] = self.length
        self._room[place] -= size

    def finish(self) -> Iterator[Sequence]:
        """Yield the open sequences."""
        yield from map(self._join, self._open)

    def _join(self, examples: list[Example]) -> Sequence:
        return join(examples, self.length, self.filler, self.cross_documents)


PACKINGS: dict[str, type[Concatenated] | type[Whole]] = {"concatenate": Concatenated, "whole": Whole}


def join(examples: list[Example], length: int, filler: int, cross_documents: bool) -> Sequence:
    """Return a sequence of `length` tokens: the examples, then `filler`.

    The target at a position is the next token if that is learned, also across the end of the sequence. A document
    starts at each example and at the filler; with `cross_documents` there is one document.
    """
    sizes = [len(example.tokens) for example in examples]
    tokens = np.concatenate([example.tokens for example in examples])[: length + 1]
    learned = np.concatenate([example.learned for example in examples])[: length + 1]
    inputs = np.full(length, filler, np.int32)
    inputs[: len(tokens)] = tokens[:length]
    targets = np.full(length, IGNORED, np.int32)
    targets[: len(tokens) - 1] = np.where(learned, tokens, IGNORED)[1:]
    starts = np.concatenate([[0], np.cumsum(sizes)])  # start of each example, then of the filler
    starts = starts[:1] if cross_documents else starts[starts < length]
    return Sequence(inputs, targets, starts.astype(np.int32))
