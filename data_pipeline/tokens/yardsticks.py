"""Baselines for a model's bits per byte on the same held-out text: the token unigram model, and xz."""

import contextlib
import functools
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.atomic_files import write_atomic
from data_pipeline.documents import texts
from data_pipeline.fingerprint import read_manifest
from data_pipeline.tokens.blocks import Blocks

XZ_BYTES = 64 * 1024 * 1024  # window of xz -9; more text would take over a minute
NAMES = ("unigram_bits_per_byte", "xz_bits_per_byte", "xz_after_training_bits_per_byte")


def yardsticks(documents_folder: Path, blocks_folder: Path, vocab_size: int, validation_bytes: int) -> dict:
    """Return the values of NAMES, cached next to the blocks; both xz values are None above 64 MiB of text.

    All divide the bits of all validation text by its bytes. Unigram: each token of the validation stream, document
    ends included, by its frequency in train, with add-one smoothing. xz: preset 9 on the concatenated documents. xz
    after training: the bytes they add to the training text before them, with a window that holds both: a compressor
    that has seen the same text as the model.
    """
    path = blocks_folder / "yardsticks.json"
    with contextlib.suppress(FileNotFoundError, ValueError):  # not stored yet, or damaged
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.keys() >= set(NAMES):  # earlier versions stored two
            return kept
    train = target_counts(Blocks(blocks_folder, "train"), vocab_size)
    validation = target_counts(Blocks(blocks_folder, "validation"), vocab_size)
    unigram = unigram_bits(train, validation) / validation_bytes
    xz = [None if size is None else 8 * size / validation_bytes for size in _xz_bytes(documents_folder)]
    result = dict(zip(NAMES, (unigram, *xz), strict=True))
    write_atomic(path, json.dumps(result, indent=1) + "\n")
    return result


def unigram_bits(train: np.ndarray, validation: np.ndarray) -> float:
    """Return the bits of the validation tokens under train's frequencies; both counts are int64 [vocab_size]."""
    return float(validation @ -np.log2((train + 1) / (train.sum() + len(train))))


def target_counts(blocks: Blocks, vocab_size: int) -> np.ndarray:
    """Return how often each token is a target, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, offsets, _, _ in blocks.chunks:
        counts += np.bincount(tokens, minlength=vocab_size)
        counts -= np.bincount(tokens[offsets[:-1]], minlength=vocab_size)  # a row's first token is only an input
    return counts


def _xz_bytes(documents_folder: Path) -> tuple[int | None, int | None]:
    """Return the compressed bytes of the validation text, alone and after the training text; None if too long."""
    compressed = functools.partial(_compressed, documents_folder)
    with ThreadPoolExecutor(2) as threads:  # xz releases the GIL, and needs ten times its window in memory
        both, train, held_out = threads.map(compressed, (("train", "validation"), ("train",), ("validation",)))
    return held_out, None if both is None or train is None else both - train


def _compressed(documents_folder: Path, splits: tuple[str, ...]) -> int | None:
    """Return the compressed bytes of the splits' concatenated texts; None above XZ_BYTES."""
    counts = read_manifest(documents_folder)
    size = sum(counts[split]["bytes"] for split in splits)
    if size > XZ_BYTES:
        return None
    window = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": max(size, 4096)}
    compressor = lzma.LZMACompressor(filters=[window])
    parts = (compressor.compress(text.encode()) for split in splits for text in texts(documents_folder, split))
    return sum(map(len, parts)) + len(compressor.flush())
