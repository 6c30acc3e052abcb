"""What a model's bits per byte must beat: the token unigram model and xz, on the same held-out text."""

import json
import lzma
from pathlib import Path

import numpy as np

from data_pipeline.blocks import Blocks
from data_pipeline.documents import texts
from data_pipeline.files import write_whole

XZ_BYTES = 64 * 1024 * 1024  # xz -9 takes a minute for more


def yardsticks(documents_folder: Path, blocks_folder: Path, vocab_size: int, validation_bytes: int) -> dict:
    """Return `unigram_bits_per_byte` and `xz_bits_per_byte` (None above 64 MiB), kept beside the blocks.

    Both divide the bits of all validation text by its bytes. Unigram: each token of the validation stream, document
    ends included, by its frequency in train, with one added to every count. xz: preset 9 on the documents put together.
    """
    path = blocks_folder / "yardsticks.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    train = target_counts(Blocks(blocks_folder, "train"), vocab_size)
    validation = target_counts(Blocks(blocks_folder, "validation"), vocab_size)
    bits = -np.log2((train + 1) / (train.sum() + vocab_size))
    result = {
        "unigram_bits_per_byte": float(validation @ bits) / validation_bytes,
        "xz_bits_per_byte": _xz_bits(documents_folder) / validation_bytes if validation_bytes <= XZ_BYTES else None,
    }
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return result


def target_counts(blocks: Blocks, vocab_size: int) -> np.ndarray:
    """Return how often each token is a target, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, offsets, _, _ in blocks.chunks:
        counts += np.bincount(tokens, minlength=vocab_size)
        counts -= np.bincount(tokens[offsets[:-1]], minlength=vocab_size)  # a row's first token is an input only
    return counts


def _xz_bits(documents_folder: Path) -> int:
    compressor = lzma.LZMACompressor(preset=9)
    size = sum(len(compressor.compress(text.encode())) for text in texts(documents_folder, "validation"))
    return 8 * (size + len(compressor.flush()))
