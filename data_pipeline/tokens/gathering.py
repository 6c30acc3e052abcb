"""Write a source's documents to shards: exact duplicates removed, held-out text absent from the training text."""

import hashlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from common.settings import NO_VALUE, SettingError
from data_pipeline.documents import SPLITS, Document, Problems, ShardWriter, read_documents, shards, units
from data_pipeline.progress import Stage
from data_pipeline.tokens.repeats import repeated_shares

log = logging.getLogger(__name__)

DRAWN = "drawn"  # shard name of the documents drawn for validation
MOST_REPEATED = 0.05  # largest share of a held-out document's text that other documents may repeat


@runtime_checkable
class TextSource(Protocol):
    """What data.source is: a `data_pipeline.sources.parts.SourceInParts`, or anything else with these."""

    def identity(self, by: str) -> dict:
        """Return a JSON-able description of settings and input files that changes whenever documents might."""
        ...

    def documents(self, problems: Problems, processes: int) -> Iterator[Document]:
        """Yield all documents."""
        ...


def gather(
    source: TextSource,
    folder: Path,
    validation_fraction: float,
    processes: int,
    problems: Problems,
    most_skipped: float,
) -> dict:
    """Write a source's documents into `folder` as Parquet shards and return the manifest's counts.

    Exact duplicates are dropped. A document is drawn for validation if the sha256 of its text, as a fraction of 1, is
    below `validation_fraction`. It is held out if at most MOST_REPEATED of its text occurs in any other document:
    otherwise the model would train on an exact or near copy. The same text therefore gets the same split in every
    corpus that does not repeat it.

    Raises:
        ValueError: one split is empty, or more than `most_skipped` of the records could not be read; the line names
            the key to change.
    """
    seen: set[bytes] = set()
    duplicates = 0
    train, drawn = ShardWriter(folder, "train"), ShardWriter(folder, "validation", DRAWN)
    with Stage("gathering documents", "B") as stage:
        for document in source.documents(problems, processes):
            encoded = document.text.encode()
            digest = hashlib.sha256(encoded).digest()
            if digest[:16] in seen:
                duplicates += 1
                continue
            seen.add(digest[:16])
            fraction = int.from_bytes(digest[:8], "big") / 2**64
            (drawn if fraction < validation_fraction else train).write(document, len(encoded))
            stage.advance(len(encoded))
        for writer in (train, drawn):
            writer.close()
    if problems.counts:
        log.warning("skipped: %s", problems.summary())
    problems.check(len(seen) + duplicates, most_skipped, "data")
    _check_both_sides({"train": train.documents, "validation": drawn.documents}, validation_fraction, problems)
    validation, repeated = _hold_out(folder, drawn, train, processes)
    return {
        **{
            split: {"documents": writer.documents, "bytes": writer.bytes}
            for split, writer in zip(SPLITS, (train, validation), strict=True)
        },
        "duplicates": duplicates,
        "repeated": repeated,
        "skipped": dict(problems.counts),
        "problems": problems.lines,
        "seconds": round(stage.seconds, 3),
    }


def _hold_out(folder: Path, drawn: ShardWriter, train: ShardWriter, processes: int) -> tuple[ShardWriter, int]:
    """Write the drawn documents to validation, and those that others repeat to train.

    If all are repeated, the least repeated one is held out. Returns the validation writer and the number of repeated
    documents.
    """
    shares = repeated_shares(folder, DRAWN, "train", drawn.bytes, processes)
    most = max(MOST_REPEATED, min(shares))
    validation = ShardWriter(folder, "validation")
    found = (document for unit in units(folder, DRAWN) for document in read_documents(unit))
    for document, share in zip(found, shares, strict=True):
        (validation if share <= most else train).write(document, len(document.text.encode()))
    for writer in (train, validation):
        writer.close()
    for path in shards(folder, DRAWN):
        path.unlink()
    repeated = drawn.documents - validation.documents
    if repeated:
        log.info(
            "held out: %s of the %s documents that were drawn; of the others over %s of the text is repeated elsewhere",
            f"{validation.documents:,}",
            f"{drawn.documents:,}",
            f"{MOST_REPEATED:.0%}",
        )
    if most > MOST_REPEATED:
        log.warning(
            "data.validation_fraction: each document that was drawn repeats others; up to %d%% of what is held out is "
            "in the training text too: raise it for a fairer measure",
            math.ceil(100 * most),
        )
    return validation, repeated


def _check_both_sides(documents: dict[str, int], fraction: float, problems: Problems) -> None:
    total = sum(documents.values())
    if total == 0:
        skipped = f" (skipped: {problems.summary()})" if problems.counts else ""
        raise SettingError("data.source", NO_VALUE, "point it at readable text", f"gives no document{skipped}")
    for split, change in (("validation", "raise it"), ("train", "lower it")):
        if documents[split] == 0:
            fix = f"{change}, or give data.source more (or shorter) documents"
            raise SettingError("data.validation_fraction", fraction, fix, f"leaves no {split} document among {total}")
