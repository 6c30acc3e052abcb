"""Lightning data modules: text or ready tokens in, flattened batches out, in an order that resumes exactly."""

import functools
import logging
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_pipeline.batches import BlockSequences, collate
from data_pipeline.blocks import write_blocks
from data_pipeline.documents import SPLITS, Problems, gather
from data_pipeline.fingerprint import fingerprint, prepared_folder, read_manifest
from data_pipeline.order import TrainOrder, ValidationOrder
from data_pipeline.parallel import available_processes
from data_pipeline.sources.longcrawl64 import VOCABULARY, ArraySequences, LongCrawl64
from data_pipeline.tokenizer import ByteLevelBPE, Pretrained
from data_pipeline.yardsticks import yardsticks

logger = logging.getLogger(__name__)

# Part of every fingerprint: raise one when the code changes what that stage, from the same inputs, writes.
FORMATS = {"documents": 1, "tokenizer": 1, "blocks": 1}


class OrderedLoader(DataLoader):
    """A loader whose place is a function of the trainer's step: it resumes with no state of its own.

    Saying so with an empty state keeps Lightning from warning, at every resume, that the place is lost.
    """

    def state_dict(self) -> dict:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Take nothing."""


class TokenData(LightningDataModule, ABC):
    """What every kind of data shares: lengths, batches, order. Lengths and batch sizes are in tokens.

    A global batch is `batch_tokens` tokens, in sequences of `sequence_length`; a device takes `micro_batch_size`
    sequences at a time and accumulates. Validation reads sequences of `validation_length`, as many as make about as
    many tokens. Batches are those of `data_pipeline.batches.collate`.

    After `prepare()`: `hf_tokenizer`; `fingerprint`, which names the prepared tokens; `manifest`, their counts;
    `train_sequences`, the number of training sequences; `validation_bytes`, UTF-8 bytes of held-out text or None. Of a
    mixture also `component_bytes`, UTF-8 bytes of held-out text by component, in the order in which batches number
    components; and `phase_starts`, from optimizer steps to the names of the phases that begin with them.
    """

    _collate = staticmethod(collate)

    def __init__(
        self,
        data_dir: str | Path,
        sequence_length: int,
        validation_length: int,
        batch_tokens: int,
        micro_batch_size: int,
        seed: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        check_positive(
            sequence_length=sequence_length,
            validation_length=validation_length,
            batch_tokens=batch_tokens,
            micro_batch_size=micro_batch_size,
        )
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers}: give 0 (read in the training process) or more")
        self.data_dir = Path(data_dir).expanduser()
        self.sequence_length, self.validation_length = sequence_length, validation_length
        self.batch_tokens, self.micro_batch_size = batch_tokens, micro_batch_size
        self.seed, self.num_workers = seed, num_workers
        self.hf_tokenizer: PreTrainedTokenizerFast | None = None
        self.fingerprint: str | None = None
        self.manifest: dict = {}
        self.train_sequences: int | None = None
        self.validation_bytes: int | None = None
        self.component_bytes: dict[str, int] = {}
        self.phase_starts: dict[int, str] = {}
        self._sequences: dict[str, Dataset] = {}
        self.accumulation(world_size=1)

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches of each of `world_size` devices that make one global batch.

        Raises ValueError naming `data.batch_tokens`, `data.micro_batch_size` and `trainer.devices` where it is not
        whole.
        """
        at_once = self.micro_batch_size * self.sequence_length * world_size
        if self.batch_tokens % at_once:
            raise ValueError(
                f"data.batch_tokens={self.batch_tokens} is no multiple of {at_once} = data.micro_batch_size="
                f"{self.micro_batch_size} x data.sequence_length={self.sequence_length} x {world_size} devices "
                "(trainer.devices): change one of them"
            )
        return self.batch_tokens // at_once

    def validation_batch_tokens(self, world_size: int) -> int:
        """Return the tokens that one validation batch on each of `world_size` devices reads together."""
        return self._validation_batch_size() * self.validation_length * world_size

    def _validation_batch_size(self) -> int:
        return max(1, self.micro_batch_size * self.sequence_length // self.validation_length)

    @abstractmethod
    def prepare(self) -> None:
        """Do all the work on disk that is not done yet; cheap when it is. Needs no Trainer."""

    @abstractmethod
    def open(self, split: str, length: int) -> Dataset:
        """Return a split's sequences of `length` tokens, of which index -1 is an empty one."""

    def yardsticks(self) -> dict[str, float | None]:
        """Return `unigram_bits_per_byte` and `xz_bits_per_byte`; None where there is no text."""
        return {"unigram_bits_per_byte": None, "xz_bits_per_byte": None}

    def prepare_data(self) -> None:
        """Lightning's hook, on one process a node."""
        self.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Lightning's hook, on every process: open what is prepared."""
        self.prepare()
        if not self._sequences:
            lengths = {"train": self.sequence_length, "validation": self.validation_length}
            self._sequences = {split: self.open(split, lengths[split]) for split in SPLITS}

    def train_dataloader(self) -> DataLoader:
        """Return the micro-batches from the trainer's current step to its last, as one epoch without an end.

        Needs `Trainer(use_distributed_sampler=False)`. Without a trainer: one epoch from the beginning.
        """
        self.setup()
        sequences, trainer = self._sequences["train"], self.trainer
        rank, world_size = self._rank_and_world_size()
        accumulate = self.accumulation(world_size)
        steps = trainer.max_steps if trainer is not None else -1
        if steps < 0:
            steps = max(1, len(sequences) * self.sequence_length // self.batch_tokens)
        start = trainer.global_step * accumulate if trainer is not None else 0
        order = self._train_order(len(sequences), steps * accumulate, start, rank, world_size)
        return self._loader(sequences, order, self.sequence_length)

    def _train_order(self, total: int, micro_batches: int, start: int, rank: int, world_size: int) -> Sampler:
        return TrainOrder(total, self.seed, self.micro_batch_size, micro_batches, start, rank, world_size)

    def val_dataloader(self) -> DataLoader:
        """Return all validation sequences in order, each on one rank, equally many batches on every rank."""
        self.setup()
        sequences = self._sequences["validation"]
        order = ValidationOrder(len(sequences), self._validation_batch_size(), *self._rank_and_world_size())
        return self._loader(sequences, order, self.validation_length)

    def _loader(self, sequences: Dataset, order: Sampler, length: int) -> DataLoader:
        return OrderedLoader(
            sequences,
            batch_sampler=order,
            collate_fn=functools.partial(self._collate, length=length),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own: making an iterator must not draw from the model's
        )

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the data-parallel rank and size: with tensor parallelism there are fewer than processes."""
        if self.trainer is None:
            return 0, 1
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        return replicas["rank"], replicas["num_replicas"]

    def _prepare_tokenizer(self, tokenizer: ByteLevelBPE | Pretrained, documents_folder: Path | None) -> Path:
        def build(folder: Path) -> dict:
            built = tokenizer.build(documents_folder)
            built.save_pretrained(folder)
            return {"vocab_size": len(built)}

        identity = {"format": FORMATS["tokenizer"], **tokenizer.identity(documents_folder)}
        folder = prepared_folder(self.data_dir, "tokenizer", identity, build)
        self.hf_tokenizer = AutoTokenizer.from_pretrained(folder)
        return folder


class PackedText(TokenData):
    """Text in documents folders, tokenized and packed into rows of `block_length` under `data_dir`.

    `processes` do the work (None: one a core).
    """

    def __init__(
        self,
        tokenizer: ByteLevelBPE | Pretrained,
        data_dir: str | Path,
        block_length: int,
        sequence_length: int,
        validation_length: int,
        batch_tokens: int,
        micro_batch_size: int,
        seed: int,
        processes: int | None,
        num_workers: int,
    ) -> None:
        check_lengths(block_length, sequence_length, validation_length)
        super().__init__(
            data_dir, sequence_length, validation_length, batch_tokens, micro_batch_size, seed, num_workers
        )
        if processes is not None:
            check_positive(processes=processes)
        self.tokenizer, self.block_length = tokenizer, block_length
        self.processes = processes or available_processes()

    def _prepare_blocks(self, documents: Path, tokenizer: Path) -> Path:
        identity = {
            "format": FORMATS["blocks"],
            "documents": documents.name,
            "tokenizer": tokenizer.name,
            "block_length": self.block_length,
        }
        return prepared_folder(self.data_dir, "blocks", identity, functools.partial(self._build_blocks, documents))

    def _build_blocks(self, documents: Path, folder: Path) -> dict:
        gathered = read_manifest(documents)
        blocks = write_blocks(documents, self.hf_tokenizer, folder, self.block_length, self.processes)
        return {
            **{split: {**gathered[split], **blocks[split]} for split in SPLITS},
            "block_length": self.block_length,
            "vocab_size": len(self.hf_tokenizer),
            "dtype": blocks["dtype"],
            **{key: gathered[key] for key in ("duplicates", "skipped", "problems") if key in gathered},
            "seconds": {"gathering": gathered["seconds"], "tokenizing": blocks["seconds"]},
            "tokens_per_second": blocks["tokens_per_second"],
        }


class TextData(PackedText):
    """Text from a source: gathered, split, tokenized and packed into rows of `block_length` under `data_dir`.

    `source` is one of `data_pipeline.sources`, `tokenizer` one of `data_pipeline.tokenizer`. `validation_fraction` of
    the documents, by hash, are held out. `processes` do the work (None: one a core). What cannot be read is skipped,
    counted and logged; with `strict` it raises ValueError instead.
    """

    def __init__(
        self,
        source: object,
        tokenizer: ByteLevelBPE | Pretrained,
        data_dir: str | Path = "data",
        block_length: int = 2048,
        sequence_length: int = 2048,
        validation_length: int = 2048,
        batch_tokens: int = 524288,
        micro_batch_size: int = 8,
        validation_fraction: float = 0.01,
        seed: int = 0,
        processes: int | None = None,
        num_workers: int = 0,
        strict: bool = False,
    ) -> None:
        super().__init__(
            tokenizer,
            data_dir,
            block_length,
            sequence_length,
            validation_length,
            batch_tokens,
            micro_batch_size,
            seed,
            processes,
            num_workers,
        )
        if not 0 < validation_fraction < 1:
            raise ValueError(f"data.validation_fraction={validation_fraction}: give a fraction between 0 and 1")
        self.source, self.validation_fraction, self.strict = source, validation_fraction, strict
        self._documents_folder: Path | None = None
        self._blocks_folder: Path | None = None

    def prepare(self) -> None:
        """Gather, train or load the tokenizer, tokenize and pack; each only where it has changed.

        Raises ValueError naming the key or file for what cannot work: see the sources and tokenizers.
        """
        if self.fingerprint is not None:
            return
        documents = self._prepare_documents()
        tokenizer = self._prepare_tokenizer(self.tokenizer, documents)
        blocks = self._prepare_blocks(documents, tokenizer)
        self._documents_folder, self._blocks_folder = documents, blocks
        self.manifest = read_manifest(blocks)
        self.train_sequences = self.manifest["train"]["rows"] * (self.block_length // self.sequence_length)
        self.validation_bytes = self.manifest["validation"]["bytes"]
        self.fingerprint = blocks.name.removeprefix("blocks-")
        logger.info("text: %s", _summary(self.manifest))

    def _prepare_documents(self) -> Path:
        identity = {
            "format": FORMATS["documents"],
            "validation_fraction": self.validation_fraction,
            **self.source.identity(),
        }

        def build(folder: Path) -> dict:
            return gather(self.source, folder, self.validation_fraction, self.processes, Problems(self.strict))

        folder = prepared_folder(self.data_dir, "documents", identity, build)
        problems = read_manifest(folder)["problems"]
        if self.strict and problems:  # gathered when strict was off
            raise ValueError(f"{problems[0]} before; mend it, or set data.strict=false")
        return folder

    def open(self, split: str, length: int) -> BlockSequences:
        """Return a split's sequences, memory-mapped."""
        return BlockSequences(self._blocks_folder, split, self.block_length, length)

    def yardsticks(self) -> dict[str, float | None]:
        """Return the bits per byte of the unigram model and of xz on the held-out text, computed once."""
        self.prepare()
        return yardsticks(
            self._documents_folder, self._blocks_folder, self.manifest["vocab_size"], self.validation_bytes
        )


class LongCrawl64Data(TokenData):
    """LongCrawl64's arrays of GPT-2 tokens, cut to `sequence_length` and read in place.

    `tokenizer` must be GPT-2's: it decodes samples and says how large the vocabulary is.
    """

    def __init__(
        self,
        source: LongCrawl64,
        tokenizer: Pretrained,
        data_dir: str | Path = "data",
        sequence_length: int = 16384,
        validation_length: int = 16384,
        batch_tokens: int = 524288,
        micro_batch_size: int = 1,
        seed: int = 0,
        num_workers: int = 4,
    ) -> None:
        super().__init__(
            data_dir, sequence_length, validation_length, batch_tokens, micro_batch_size, seed, num_workers
        )
        self.source, self.tokenizer = source, tokenizer

    def prepare(self) -> None:
        """Check the arrays and load the tokenizer. Raises ValueError naming the key that cannot work."""
        if self.fingerprint is not None:
            return
        identity = self.source.identity()
        self.train_sequences = len(self.open("train", self.sequence_length))
        self.open("validation", self.validation_length)
        self._prepare_tokenizer(self.tokenizer, None)
        if len(self.hf_tokenizer) < VOCABULARY:
            raise ValueError(
                f"tokenizer has {len(self.hf_tokenizer)} tokens, and LongCrawl64 holds GPT-2's {VOCABULARY}: "
                "use tokenizer=gpt2"
            )
        for split in SPLITS:
            documents, length = self.source.open(split).shape
            self.manifest[split] = {"documents": documents, "tokens": documents * length}
        self.manifest["vocab_size"] = len(self.hf_tokenizer)
        self.fingerprint = fingerprint(identity)
        logger.info("text: %s", _summary(self.manifest))

    def open(self, split: str, length: int) -> ArraySequences:
        """Return a split's sequences; nothing is read yet."""
        key = "data.sequence_length" if split == "train" else "data.validation_length"
        return ArraySequences(self.source, split, length, key)


def check_positive(**settings: int) -> None:
    """Raise ValueError, naming the `data` key, unless each setting is a whole number above 0."""
    for key, value in settings.items():
        if not isinstance(value, int) or value <= 0:
            raise ValueError(f"data.{key}={value!r}: give a whole number above 0")


def check_lengths(block_length: int, sequence_length: int, validation_length: int) -> None:
    """Raise ValueError, naming the key, unless both sequence lengths divide the block length."""
    check_positive(block_length=block_length, sequence_length=sequence_length, validation_length=validation_length)
    for key, length in (("sequence_length", sequence_length), ("validation_length", validation_length)):
        if length > block_length:
            raise ValueError(
                f"data.{key}={length} is longer than data.block_length={block_length}: a sequence is a part of a "
                f"block; raise data.block_length or lower data.{key}"
            )
        if block_length % length:
            raise ValueError(f"data.{key}={length} does not divide data.block_length={block_length}")


def _summary(manifest: dict) -> str:
    return "; ".join(
        f"{split} {manifest[split]['documents']:,} documents, {manifest[split]['tokens']:,} tokens" for split in SPLITS
    )
