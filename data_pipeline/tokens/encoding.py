"""Work of a tokenizing process; few imports, so that processes start fast."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_pipeline.documents import read_texts


class Encoded(NamedTuple):
    """A unit's documents as one token stream with [bos] before each document, and their start offsets (int64)."""

    tokens: np.ndarray
    starts: np.ndarray


def make_encoder(tokenizer_json: str, bos: int, dtype: str) -> Callable[[tuple[Path, int]], Encoded]:
    """Return a function that maps a unit of Parquet text to its tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # "<|endoftext|>" quoted in a text is encoded as plain characters and does not end the document.
    tokenizer.encode_special_tokens = True

    def encode(unit: tuple[Path, int]) -> Encoded:
        encodings = tokenizer.encode_batch_fast(read_texts(unit), add_special_tokens=False)
        starts = np.zeros(len(encodings) + 1, np.int64)
        np.cumsum([len(encoding) + 1 for encoding in encodings], out=starts[1:])
        tokens = np.empty(starts[-1], dtype)
        tokens[starts[:-1]] = bos
        for start, end, encoding in zip(starts, starts[1:], encodings, strict=False):
            tokens[start + 1 : end] = encoding.ids
        return Encoded(tokens, starts[:-1])

    return encode
