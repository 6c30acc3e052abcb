"""LongCrawl64: documents of 65,536 GPT-2 tokens in zarr arrays, read in place."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.settings import SettingError
from data_pipeline.identity import EARLIER, SAMPLE, WHOLE, file_identity
from data_pipeline.tokens.batches import NOTHING, Sequence, Sequences

if TYPE_CHECKING:
    import zarr

END_OF_TEXT = 50256
VOCABULARY = 50257
SAMPLED_DOCUMENTS = 8  # documents whose tokens identify an array
ARRAYS = {"train": "train.zarr", "validation": "heldout.zarr"}


@dataclass(frozen=True)
class LongCrawl64:
    """A folder with train.zarr and heldout.zarr, arrays [documents, document_length] of GPT-2 tokens.

    The public arrays have 6,609,334 and 52,131 documents of 65,536 tokens, uint16
    (https://manifestai.com/articles/longcrawl64/). Nothing is converted or copied.
    """

    path: str

    def identity(self, by: str = SAMPLE) -> dict:
        """Return each array's shape, dtype and layout, and a digest of some documents' tokens (WHOLE: of all)."""
        arrays = {split: self.open(split) for split in ARRAYS}
        found = {
            "longcrawl64": {split: [list(array.shape), str(array.dtype)] for split, array in arrays.items()},
            "files": file_identity(
                (
                    file
                    for name in ARRAYS.values()
                    for file in sorted(self._folder(name).glob(".zarray"))
                    + sorted(self._folder(name).glob("zarr.json"))
                ),
                by,
            ),
        }
        if by != EARLIER:
            found["tokens"] = {split: _digest(array, by) for split, array in arrays.items()}
        return found

    def open(self, split: str) -> zarr.Array:
        """Open an array.

        Raises:
            ValueError: the array is missing or has another layout; the error names `path`.
        """
        import zarr  # only this source needs it

        folder = self._folder(ARRAYS[split])
        if not folder.is_dir():
            problem = f"has no folder {ARRAYS[split]}"
            raise SettingError("data.source.path", self.path, "give the folder of LongCrawl64", problem)
        try:
            array = zarr.open_array(str(folder), mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0][:200]
            problem = f"has a {ARRAYS[split]} that is not a zarr array"
            raise SettingError("data.source.path", self.path, reason, problem) from error
        if len(array.shape) != 2 or 0 in array.shape or array.dtype.kind not in "iu":
            problem = f"has a {ARRAYS[split]} of {list(array.shape)} {array.dtype}"
            raise SettingError("data.source.path", self.path, "give integers, [documents, document_length]", problem)
        return array

    def _folder(self, name: str) -> Path:
        return Path(self.path).expanduser() / name


def _digest(array: zarr.Array, by: str) -> str:
    """Return a SHA-256 of the tokens of evenly spaced documents, first and last included."""
    documents = array.shape[0]
    count = documents if by == WHOLE else min(documents, SAMPLED_DOCUMENTS)
    digest = hashlib.sha256()
    for number in range(count):
        digest.update(np.asarray(array[(documents - 1) * number // max(1, count - 1)]).tobytes())
    return digest.hexdigest()


class ArraySequences(Sequences):
    """Documents cut into independent sequences of `length` targets.

    The inputs are the targets shifted by one, with the end-of-text token first, so all `length` tokens are predicted.

    Raises:
        ValueError: `length` does not divide the documents' length.
    """

    def __init__(self, source: LongCrawl64, split: str, length: int, key: str) -> None:
        self.source, self.split, self.length = source, split, length
        self._process, self._array = os.getpid(), source.open(split)
        documents, document_length = self._array.shape
        if document_length % length:
            problem = f"does not divide the documents' length, {document_length} tokens"
            raise SettingError(key, length, "give a divisor", problem)
        self.per_document = document_length // length
        self._count = documents * self.per_document

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sequence:
        if index == -1:
            return NOTHING
        document, part = divmod(index, self.per_document)
        targets = np.asarray(self._opened()[document, part * self.length : (part + 1) * self.length])
        inputs = np.empty_like(targets)
        inputs[0], inputs[1:] = END_OF_TEXT, targets[:-1]
        return Sequence(inputs, targets, np.zeros(1, np.int64))

    def _opened(self) -> zarr.Array:
        """Return this process's array: zarr reads through a thread, which a forked process does not inherit."""
        if self._process != os.getpid():
            self._process, self._array = os.getpid(), self.source.open(self.split)
        return self._array
