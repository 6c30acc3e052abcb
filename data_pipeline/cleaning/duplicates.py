"""Duplicates across all sources: equal documents, and nearly equal documents (MinHash).

Both use datatrove's steps in several consecutive pipelines. These count documents: all reading stages must read the
same documents in the same order, with the same number of tasks.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

from common.settings import check_whole
from data_pipeline.cleaning.windows import normalized, windows
from data_pipeline.cleaning.words import Words

HASHES = HashConfig(precision=64, hash_fc="sha1")  # datatrove before version 4 has xxhash as its default
PRIME = np.uint64((1 << 61) - 1)
SHINGLES_AT_ONCE = 1024
DIGITS = b"0123456789"
LINES_BUFFERED = 10_000  # signatures per merged file


@dataclass(frozen=True)
class PipelineStage:
    """One of several pipelines: all tasks of a stage finish before the next starts.

    `steps`: the pipeline, after its reader if `reads`. `tasks`: number of the executor's tasks. `gives`: whether it
    yields documents.
    """

    name: str
    steps: list[PipelineStep]
    tasks: int
    reads: bool = False
    gives: bool = False


def exact_documents(folder: str, tasks: int) -> list[PipelineStage]:
    """Return the stages that keep one of each set of equal documents: the earliest within its task.

    Equal texts may differ in leading and trailing white space. `folder` holds the data that the stages exchange; it
    starts empty.
    """
    config = ExactDedupConfig(content_getter=stripped_bytes, hash_config=HASHES)
    signatures, found = str(Path(folder, "signatures")), str(Path(folder, "duplicates"))
    return [
        PipelineStage("signatures", [ExactDedupSignature(signatures, config)], tasks, reads=True),
        PipelineStage("find", [ExactFindDedups(signatures, found, config, lines_to_buffer=LINES_BUFFERED)], 1),
        PipelineStage("filter", [ExactDocumentsFilter(found, config)], tasks, reads=True, gives=True),
    ]


def near_duplicates(
    folder: str, tasks: int, ngram: int = 5, buckets: int = 14, hashes_per_bucket: int = 8, seed: int = 1
) -> list[PipelineStage]:
    """Return the stages that keep one of each cluster of nearly equal documents.

    Documents share a bucket, and then a cluster, if `hashes_per_bucket` minimum hashes of their word n-grams are equal:
    at similarity s, with probability 1 - (1 - s^hashes_per_bucket)^buckets (14 and 8: 92% at 0.8, 56% at 0.7). Words
    are compared without case, punctuation and digits. `folder`: as for `exact_documents`. One task forms the clusters,
    in memory that grows with the number of duplicates.
    """
    for name, value in (("ngram", ngram), ("buckets", buckets), ("hashes_per_bucket", hashes_per_bucket)):
        check_whole(f"corpus.cleaning.near_duplicates.{name}", value, 1)
    config = MinhashConfig(ngram, buckets, hashes_per_bucket, seed, hash_config=HASHES)
    signatures, pairs, found = (str(Path(folder, name)) for name in ("signatures", "pairs", "duplicates"))
    buckets_step = MinhashDedupBuckets(signatures, pairs, config=config, lines_to_buffer=LINES_BUFFERED)
    return [
        PipelineStage("signatures", [NearDuplicateSignature(signatures, config, language=Words())], tasks, reads=True),
        PipelineStage("buckets", [buckets_step], buckets),
        PipelineStage("clusters", [MinhashDedupCluster(pairs, found, config, lines_to_buffer=LINES_BUFFERED)], 1),
        PipelineStage("filter", [MinhashDedupFilter(found)], tasks, reads=True, gives=True),
    ]


class NearDuplicateSignature(MinhashDedupSignature):
    """datatrove's signatures with vectorized hashing of n-grams: six times as fast, in bounded memory."""

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of all n-grams of words, uint64 `[n, 1]`."""
        words = normalized(text).translate(None, DIGITS)
        hashes = [block.hashes for block in windows(words, self.config.n_grams)]
        return np.concatenate(hashes or [np.empty(0, np.uint64)]).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """Return the minimum hash under each of the random functions, by bucket."""
        factors, terms = self.parameters
        least = np.full(self.num_hashes, np.iinfo(np.uint64).max, np.uint64)
        for start in range(0, len(shingles), SHINGLES_AT_ONCE):
            hashed = (shingles[start : start + SHINGLES_AT_ONCE] * factors + terms) % PRIME
            np.minimum(least, hashed.min(axis=0), out=least)
        return [bucket.tolist() for bucket in np.split(least, self.config.num_buckets)]


class ExactDocumentsFilter(ExactDedupFilter):
    """datatrove's filter, without the duplicate count it adds to every document's metadata."""

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents that are not duplicates."""
        for document in super().run(data, rank, world_size):
            document.metadata.pop("duplicate_count", None)
            yield document


def stripped_bytes(document: Document) -> bytes:
    """Return the bytes by which documents are compared."""
    return document.text.strip().encode(errors="replace")
