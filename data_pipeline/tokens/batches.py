"""Sequences cut from rows, and the flattened batches that a model reads."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from data_pipeline.tokens.blocks import Blocks

IGNORED = -100  # target value excluded from the loss


class Sequence(NamedTuple):
    """Inputs and targets [n], n <= sequence length, and the positions in the inputs where documents start."""

    inputs: np.ndarray
    targets: np.ndarray
    starts: np.ndarray


NOTHING = Sequence(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


class Sequences(Dataset, ABC):
    """Sequences by index; index -1 is an empty one, which `collate` pads with ignored targets."""

    @abstractmethod
    def __len__(self) -> int: ...


class BlockSequences(Sequences):
    """Packed rows cut into sequences of `length` tokens, a divisor of the block length."""

    def __init__(self, folder: Path, split: str, block_length: int, length: int) -> None:
        self.blocks = Blocks(folder, split)
        self.length, self.per_row = length, block_length // length
        last_targets = len(self.blocks[len(self.blocks) - 1][0]) - 1 if len(self.blocks) else 0
        self._count = (len(self.blocks) - 1) * self.per_row + -(-last_targets // length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sequence:
        if index == -1:
            return NOTHING
        row, part = divmod(index, self.per_row)
        tokens, starts = self.blocks[row]
        begin = part * self.length
        tokens = tokens[begin : begin + self.length + 1]
        first, last = np.searchsorted(starts, (begin, begin + len(tokens) - 1))
        return Sequence(tokens[:-1], tokens[1:], starts[first:last] - begin)


def collate(sequences: list[Sequence], length: int) -> dict[str, torch.Tensor]:
    """Return one flattened row of N = len(sequences) * length tokens.

    `input_ids` int64 [1, N]; `targets` int64 [1, N], -100 where ignored; `cu_seqlens` int32 [M + 1]. A segment starts
    at every sequence, every document, and the padding of a sequence shorter than `length`.
    """
    total = len(sequences) * length
    inputs, targets = np.zeros(total, np.int64), np.full(total, IGNORED, np.int64)
    boundaries = [np.arange(0, total + 1, length)]
    for number, sequence in enumerate(sequences):
        begin, count = number * length, len(sequence.inputs)
        inputs[begin : begin + count] = sequence.inputs
        targets[begin : begin + count] = sequence.targets
        boundaries.append(sequence.starts + begin)
        if count < length:
            boundaries.append(np.array([begin + count]))
    return {
        "input_ids": torch.from_numpy(inputs)[None],
        "targets": torch.from_numpy(targets)[None],
        "cu_seqlens": torch.from_numpy(np.unique(np.concatenate(boundaries)).astype(np.int32)),
    }
