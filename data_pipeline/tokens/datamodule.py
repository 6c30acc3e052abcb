"""Lightning data modules for text (tokenized and packed) and for ready tokens."""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from common.settings import NO_VALUE, SettingError, check_number, check_whole, under
from data_pipeline.documents import SPLITS, Problems
from data_pipeline.fingerprint import MANIFEST, fingerprint, folder_of, other_text, prepared_folder, read_manifest
from data_pipeline.identity import EARLIER, SAMPLE
from data_pipeline.tokens.batches import BlockSequences
from data_pipeline.tokens.blocks import write_blocks
from data_pipeline.tokens.gathering import TextSource, gather
from data_pipeline.tokens.longcrawl64 import VOCABULARY, ArraySequences, LongCrawl64
from data_pipeline.tokens.token_data import LEAST_LENGTH, TokenData, tokenizer_identity
from data_pipeline.tokens.yardsticks import yardsticks
from data_pipeline.workers import available_processes, most_processes

log = logging.getLogger(__name__)

# Part of every fingerprint: increase a number when that stage writes something else from the same inputs.
FORMATS = {"documents": 2, "blocks": 1}


@dataclass(kw_only=True, eq=False, repr=False)
class PackedText(TokenData):
    """Text in documents folders, tokenized and packed into rows of `block_length` under `data_dir`.

    Args:
        processes: number of worker processes; None for one per core.
    """

    block_length: int = 2048
    processes: int | None = None

    def __post_init__(self) -> None:
        check_lengths(self.block_length, self.sequence_length, self.validation_length)
        super().__post_init__()
        check_whole("data.processes", self.processes, 1, most_processes(), null=True)
        self._processes = self.processes or available_processes()

    def _prepare_blocks(self, documents: Path, tokenizer: Path) -> Path:
        identity = self._blocks_identity(documents, tokenizer)
        return prepared_folder(self.data_dir, "blocks", identity, functools.partial(self._build_blocks, documents))

    def _blocks_identity(self, documents: Path, tokenizer: Path) -> dict:
        return {
            "format": FORMATS["blocks"],
            "documents": documents.name,
            "tokenizer": tokenizer.name,
            "block_length": self.block_length,
        }

    def _build_blocks(self, documents: Path, folder: Path) -> dict:
        gathered = read_manifest(documents)
        blocks = write_blocks(documents, self.hf_tokenizer, folder, self.block_length, self._processes)
        return {
            **{split: {**gathered[split], **blocks[split]} for split in SPLITS},
            "block_length": self.block_length,
            "vocab_size": len(self.hf_tokenizer),
            "dtype": blocks["dtype"],
            **{key: gathered[key] for key in ("duplicates", "repeated", "skipped", "problems") if key in gathered},
            "seconds": {"gathering": gathered["seconds"], "tokenizing": blocks["seconds"]},
            "tokens_per_second": blocks["tokens_per_second"],
        }

    def _open_blocks(self, blocks: Path, split: str, length: int) -> BlockSequences:
        """Return a split's sequences, memory-mapped.

        Raises:
            ValueError: the files are damaged (earlier versions kept no checksums).
        """
        try:
            sequences = BlockSequences(blocks, split, self.block_length, length)
            rows, written = len(sequences.blocks), read_manifest(blocks)[split]["rows"]
            wrong = f"{rows} rows of {written}" if rows != written else None
        except (OSError, pa.ArrowException) as error:
            wrong = str(error).partition("\n")[0][:200]
        if wrong is not None:
            raise ValueError(f"{blocks}: {split}-*.arrow are damaged ({wrong}): remove the folder to prepare it again")
        return sequences


@dataclass(kw_only=True, eq=False, repr=False)
class TextData(PackedText):
    """Text from a source: gathered, split, tokenized and packed into rows of `block_length` under `data_dir`.

    Unreadable records are skipped, counted and logged. More than `most_skipped` of them, or with `strict` the first
    one, raise ValueError.

    Args:
        source: one of `data_pipeline.sources`.
        validation_fraction: share of documents drawn by hash; those that other documents repeat return to train.
    """

    source: TextSource
    validation_fraction: float = 0.01
    strict: bool = False
    most_skipped: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("data.validation_fraction", self.validation_fraction, above=0, below=1)
        check_number("data.most_skipped", self.most_skipped, above=0, most=1)
        self._documents_folder: Path
        self._blocks_folder: Path

    def prepare(self) -> None:
        """Gather the documents, train or load the tokenizer, tokenize and pack; redo only what changed.

        Raises:
            ValueError: something cannot work; the line names the key or file (see the sources and tokenizers).
        """
        if self.fingerprint is not None:
            return
        documents = self._documents_of_resumed() or self._prepare_documents()
        tokenizer = self._prepare_tokenizer(documents)
        blocks = self._prepare_blocks(documents, tokenizer)
        self._documents_folder, self._blocks_folder = documents, blocks
        self.manifest = read_manifest(blocks)
        self.train_sequences = self.manifest["train"]["rows"] * (self.block_length // self.sequence_length)
        self.validation_bytes = self.manifest["validation"]["bytes"]
        self.fingerprint = blocks.name.removeprefix("blocks-")
        log.info("text: %s", _summary(self.manifest))

    def _prepare_documents(self) -> Path:
        identity = self._documents_identity(FORMATS["documents"], self.identified_by)

        @under("data.source")
        def build(folder: Path) -> dict:
            problems = Problems(self.strict)
            return gather(self.source, folder, self.validation_fraction, self._processes, problems, self.most_skipped)

        folder = prepared_folder(self.data_dir, "documents", identity, build)
        problems = read_manifest(folder)["problems"]
        if self.strict and problems:  # gathered while strict was off
            raise ValueError(f"{problems[0]} before; fix it, or set data.strict=false")
        return folder

    def _documents_of_resumed(self) -> Path | None:
        """Return the documents of a resumed run if an earlier version gathered them, else None.

        The earlier version held out documents by another rule, and the run must finish with the text it started with.
        None also for a new run, and for a run whose documents this version gathers.

        Raises:
            ValueError: the run's documents match neither version; raised before anything is prepared.
        """
        identities = [self._documents_identity(FORMATS["documents"], self.identified_by)]
        identities += [self._documents_identity(1, EARLIER)]
        new, old = (folder_of(self.data_dir, "documents", identity) for identity in identities)
        if self.resumed in (None, self._fingerprint_with(new)):
            return None
        if self.resumed == self._fingerprint_with(old) and (old / MANIFEST).exists():
            return old
        raise ValueError(other_text(self.resumed, self._fingerprint_with(new)))

    def _fingerprint_with(self, documents: Path) -> str:
        identities = (tokenizer_identity(self.tokenizer, documents, by) for by in (SAMPLE, EARLIER))
        return fingerprint(self._blocks_identity(documents, folder_of(self.data_dir, "tokenizer", *identities)))

    @under("data.source")
    def _documents_identity(self, version: int, by: str) -> dict:
        return {
            "format": version,
            "validation_fraction": self.validation_fraction,
            **self.source.identity(by),
        }

    def open(self, split: str, length: int) -> BlockSequences:
        """Return a split's sequences, memory-mapped."""
        return self._open_blocks(self._blocks_folder, split, length)

    def yardsticks(self) -> dict[str, float | None]:
        """Return the bits per byte of the unigram model and of xz on the held-out text; computed once."""
        self.prepare()
        size, held_out = self.manifest["vocab_size"], self.manifest["validation"]["bytes"]
        return yardsticks(self._documents_folder, self._blocks_folder, size, held_out)


@dataclass(kw_only=True, eq=False, repr=False)
class LongCrawl64Data(TokenData):
    """LongCrawl64's arrays of GPT-2 tokens, cut to `sequence_length` and read in place.

    `tokenizer` must be GPT-2's: it decodes samples and gives the vocabulary size.
    """

    source: LongCrawl64
    sequence_length: int = 16384
    validation_length: int = 16384
    micro_batch_size: int = 1
    num_workers: int = 4

    def prepare(self) -> None:
        """Check the arrays and load the tokenizer.

        Raises:
            ValueError: a setting cannot work; the line names the key.
        """
        if self.fingerprint is not None:
            return
        self.train_sequences = len(self.open("train", self.sequence_length))
        self.open("validation", self.validation_length)
        self._prepare_tokenizer(None)
        if len(self.hf_tokenizer) < VOCABULARY:
            problem = f"has {len(self.hf_tokenizer)} tokens, and LongCrawl64 holds GPT-2's {VOCABULARY}"
            raise SettingError("tokenizer", NO_VALUE, "use tokenizer=gpt2", problem)
        for split in SPLITS:
            documents, length = self.source.open(split).shape
            self.manifest[split] = {"documents": documents, "tokens": documents * length}
        self.manifest["vocab_size"] = len(self.hf_tokenizer)
        identities = (self.source.identity(by) for by in (self.identified_by, EARLIER))
        self.fingerprint, earlier = (fingerprint(identity) for identity in identities)
        if self.resumed == earlier:
            self.fingerprint = earlier
        log.info("text: %s", _summary(self.manifest))

    def open(self, split: str, length: int) -> ArraySequences:
        """Return a split's sequences without reading them."""
        key = "data.sequence_length" if split == "train" else "data.validation_length"
        return ArraySequences(self.source, split, length, key)


def check_lengths(block_length: int, sequence_length: int, validation_length: int) -> None:
    """Raise ValueError, naming the key, unless both sequence lengths divide the block length."""
    for key, value in (
        ("block_length", block_length),
        ("sequence_length", sequence_length),
        ("validation_length", validation_length),
    ):
        check_whole(f"data.{key}", value, LEAST_LENGTH)
    for key, length in (("sequence_length", sequence_length), ("validation_length", validation_length)):
        if length > block_length:
            fix = f"a sequence is a part of a block; raise data.block_length or lower data.{key}"
            raise SettingError(f"data.{key}", length, fix, f"is longer than data.block_length={block_length}")
        if block_length % length:
            raise SettingError(
                f"data.{key}", length, "give a divisor", f"does not divide data.block_length={block_length}"
            )


def _summary(manifest: dict) -> str:
    return "; ".join(
        f"{split} {manifest[split]['documents']:,} documents, {manifest[split]['tokens']:,} tokens" for split in SPLITS
    )
