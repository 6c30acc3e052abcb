"""Packed blocks: documents tokenized in parallel, cut into rows, stored as Arrow and read memory-mapped.

The token stream is [bos] + tokens for each document. Row b is stream[b*L : b*L + L + 1]: rows overlap by one token,
inputs are row[:-1] and targets row[1:]. The end of a document is therefore learned as the bos of the next one.
"""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerFast

from common.settings import SettingError
from data_pipeline.documents import SPLITS, units
from data_pipeline.progress import Stage
from data_pipeline.tokens.encoding import Encoded, make_encoder
from data_pipeline.tokens.tokenizer import document_start
from data_pipeline.workers import ordered_map

FILE_TOKENS = 2**28  # tokens per Arrow file
BATCH_TOKENS = 2**20  # tokens per write


class Rows(NamedTuple):
    """Rows ready to write: their concatenated tokens, and where documents start in each row[:-1]."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    start_counts: np.ndarray


class Packer:
    """Packer of a stream of encoded documents into rows of `block_length + 1` tokens that overlap by one."""

    def __init__(self, block_length: int) -> None:
        self.block_length = block_length
        self._tokens: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._length = 0

    def add(self, encoded: Encoded) -> Rows | None:
        """Add a part of the stream; return the full rows once there are enough for a write, else None."""
        self._tokens.append(encoded.tokens)
        self._starts.append(encoded.starts + self._length)
        self._length += len(encoded.tokens)
        return self._cut() if self._length > max(BATCH_TOKENS, self.block_length) else None

    def _cut(self) -> Rows | None:
        length, count = self.block_length, (self._length - 1) // self.block_length
        if count <= 0:
            return None
        tokens, starts = np.concatenate(self._tokens), np.concatenate(self._starts)
        used = count * length
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length][:count]
        inside = starts[starts < used]
        counts = np.bincount(inside // length, minlength=count)
        # The last token is the first token of the next row.
        self._tokens, self._starts, self._length = [tokens[used:]], [starts[starts >= used] - used], len(tokens) - used
        return Rows(rows.reshape(-1), np.full(count, length + 1), inside % length, counts)

    def finish(self, keep_partial: bool) -> Iterator[Rows | None]:
        """Yield the last full rows and, with `keep_partial`, the shorter rest (at least 2 tokens) as one row."""
        yield self._cut()
        if keep_partial and self._length > 1:
            tokens, starts = np.concatenate(self._tokens), np.concatenate(self._starts)
            inside = starts[starts < len(tokens) - 1]
            yield Rows(tokens, np.array([len(tokens)]), inside, np.array([len(inside)]))


class RowWriter:
    """Writer of one split's Arrow files, through `datasets`: list columns `tokens` and `starts`."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.features = Features({"tokens": List(Value(dtype)), "starts": List(Value("int32"))})
        self.rows = 0
        self._files = self._file_tokens = 0
        self._writer: ArrowWriter | None = None

    def write(self, rows: Rows | None) -> None:
        """Append rows; None is ignored."""
        if rows is None:
            return
        if self._writer is None:
            path = self.folder / f"{self.split}-{self._files:05d}.arrow"
            self._writer = ArrowWriter(path=str(path), features=self.features)
        columns = {
            "tokens": _lists(rows.tokens.astype(self.dtype, copy=False), rows.lengths),
            "starts": _lists(rows.starts.astype(np.int32), rows.start_counts),
        }
        self._writer.write_table(pa.table(columns, schema=self.features.arrow_schema))
        self.rows += len(rows.lengths)
        self._file_tokens += len(rows.tokens)
        if self._file_tokens >= FILE_TOKENS:
            self.close()

    def close(self) -> None:
        """Finish the current file."""
        if self._writer is not None:
            self._writer.finalize()
            self._writer.close()
            self._writer, self._file_tokens, self._files = None, 0, self._files + 1


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def write_blocks(
    documents_folder: Path, tokenizer: PreTrainedTokenizerFast, folder: Path, block_length: int, processes: int
) -> dict:
    """Tokenize and pack the documents into `folder`; return tokens and rows per split, and the rate.

    The result does not depend on `processes`. Train drops an incomplete last row. Validation keeps it, because bits per
    byte divide the loss of all held-out text by all its bytes.
    """
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    start = document_start(tokenizer)
    assert start is not None  # such a tokenizer is refused as it is loaded
    encoder = functools.partial(make_encoder, tokenizer.backend_tokenizer.to_str(), start, dtype)
    work = {split: units(documents_folder, split) for split in SPLITS}
    counts: dict[str, dict] = {}
    with Stage("tokenizing and packing", "tokens") as stage:
        results = ordered_map(encoder, [unit for split in SPLITS for unit in work[split]], processes)
        for split in SPLITS:
            writer, packer = RowWriter(folder, split, dtype), Packer(block_length)
            before = stage.done
            for encoded in itertools.islice(results, len(work[split])):
                stage.advance(len(encoded.tokens))
                writer.write(packer.add(encoded))
            for rows in packer.finish(keep_partial=split == "validation"):
                writer.write(rows)
            writer.close()
            counts[split] = {"tokens": stage.done - before, "rows": writer.rows}
    if counts["train"]["rows"] == 0:
        problem = f"is more than the {counts['train']['tokens']} tokens of the train text"
        raise SettingError("data.block_length", block_length, "lower it, or give data.source more text", problem)
    return {**counts, "dtype": dtype, "seconds": round(stage.seconds, 3), "tokens_per_second": round(stage.rate)}


class Blocks:
    """Rows of one split as memory-mapped views without copies. Pickles as its path.

    `chunks` are the stored batches of rows: token values, row offsets into them, start values, offsets into those.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self.chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        for path in sorted(folder.glob(f"{split}-*.arrow")):
            table = Dataset.from_file(str(path)).data
            for tokens, starts in zip(table.column("tokens").chunks, table.column("starts").chunks, strict=True):
                self.chunks.append(
                    (_view(tokens.values), _view(tokens.offsets), _view(starts.values), _view(starts.offsets))
                )
        self._ends = np.cumsum([len(offsets) - 1 for _, offsets, _, _ in self.chunks])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a row's tokens, [L + 1] (validation's last row may be shorter), and its document starts."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        values, offsets, starts, start_offsets = self.chunks[number]
        row = index - int(self._ends[number - 1] if number else 0)
        return values[offsets[row] : offsets[row + 1]], starts[start_offsets[row] : start_offsets[row + 1]]

    def __reduce__(self) -> tuple:
        return Blocks, (self.folder, self.split)


def _view(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=True)
