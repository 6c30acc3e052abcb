"""Packed sequences on disk: Arrow, read memory-mapped."""

from pathlib import Path

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter

from data_pipeline.tokens.batches import IGNORED, NOTHING, Sequence, Sequences

COLUMNS = datasets.Features(dict.fromkeys(Sequence._fields, datasets.List(datasets.Value("int32"))))


class SequenceWriter:
    """Writer of one split's sequences, into one file."""

    def __init__(self, folder: Path, split: str) -> None:
        self.sequences = 0
        self._writer = ArrowWriter(path=str(_path(folder, split)), features=COLUMNS)

    def write(self, sequence: Sequence) -> None:
        """Append a sequence."""
        self._writer.write(sequence._asdict())
        self.sequences += 1

    def close(self) -> None:
        """Finish the file."""
        self._writer.finalize()
        self._writer.close()


class StoredSequences(Sequences):
    """A split's sequences."""

    def __init__(self, folder: Path, split: str) -> None:
        self._rows = datasets.Dataset.from_file(str(_path(folder, split))).with_format("numpy")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sequence:
        return NOTHING if index == -1 else Sequence(**self._rows[index])

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each token is a target, int64 [vocab_size]."""
        counts = np.zeros(vocab_size, np.int64)
        for chunk in self._rows.data.column("targets").chunks:
            targets = chunk.flatten().to_numpy()
            counts += np.bincount(targets[targets != IGNORED], minlength=vocab_size)
        return counts


def _path(folder: Path, split: str) -> Path:
    return folder / f"{split}.arrow"
