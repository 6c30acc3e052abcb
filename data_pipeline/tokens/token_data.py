"""Base of all Lightning data modules: flattened batches, in an order that resumes exactly."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import AutoTokenizer

from common.setting_types import check_type
from common.settings import SettingError, check_whole
from data_pipeline.documents import SPLITS
from data_pipeline.fingerprint import prepared_folder
from data_pipeline.identity import EARLIER, SAMPLE, WHOLE
from data_pipeline.tokens.batches import Sequences, collate
from data_pipeline.tokens.order import TrainOrder, ValidationOrder
from data_pipeline.tokens.tokenizer import ByteLevelBPE, Pretrained
from data_pipeline.tokens.yardsticks import NAMES
from data_pipeline.workers import most_processes

FORMAT = 1  # part of a tokenizer's fingerprint: increase it when the code writes another one from the same inputs
LEAST_LENGTH = 2  # tokens per sequence: a single token has no context to learn from


class OrderedLoader(DataLoader):
    """A loader whose position is a function of the trainer's step, so it resumes without saved state.

    The empty state keeps Lightning from warning at every resume that the position is lost.
    """

    def state_dict(self) -> dict:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Ignore the state."""


@dataclass(kw_only=True, eq=False, repr=False)  # fields are the arguments; equality and text stay Lightning's
class TokenData(LightningDataModule, ABC):
    """Base of every kind of data: lengths, batches, order. Lengths and batch sizes are in tokens.

    A global batch is `batch_tokens` tokens, in sequences of `sequence_length`. A device takes `micro_batch_size`
    sequences at a time and accumulates. Validation reads sequences of `validation_length`, in batches of about as many
    tokens. `data_pipeline.tokens.batches.collate` makes the batches.

    Args:
        tokenizer: one of `data_pipeline.tokens.tokenizer`.
        data_dir: folder of everything that is prepared.
        seed: seed of the order.
        num_workers: number of processes that read; 0 for the training process itself.
        full_hash: identify input files by all their content, not by a sample of large ones.

    `resumed`, the fingerprint of the data that a resumed run started with, may be set before `prepare()`.

    After `prepare()`: `hf_tokenizer`; `fingerprint`, which names the prepared tokens; `manifest`, their counts;
    `train_sequences`, the number of training sequences; `validation_bytes`, UTF-8 bytes of held-out text or None.
    Mixtures also have `component_bytes`, UTF-8 bytes of held-out text by component, in the order in which batches
    number components; and `phase_starts`, which maps optimizer steps to the names of the phases that start there.
    """

    tokenizer: ByteLevelBPE | Pretrained
    data_dir: str | Path = "data"
    sequence_length: int = 2048
    validation_length: int = 2048
    batch_tokens: int = 524288
    micro_batch_size: int = 8
    seed: int = 0
    num_workers: int = 0
    full_hash: bool = False

    documents_have_start = True  # every document starts with the start token
    _collate: ClassVar[Callable[..., dict[str, torch.Tensor]]] = staticmethod(collate)

    def __post_init__(self) -> None:
        super().__init__()
        check_whole("data.sequence_length", self.sequence_length, LEAST_LENGTH)
        check_whole("data.validation_length", self.validation_length, LEAST_LENGTH)
        check_whole("data.batch_tokens", self.batch_tokens, 1)
        check_whole("data.micro_batch_size", self.micro_batch_size, 1)
        check_whole("data.seed", self.seed, 0)
        check_whole("data.num_workers", self.num_workers, 0, most_processes())  # 0: the training process reads
        check_type("data.full_hash", self.full_hash, bool)
        self.data_dir = Path(self.data_dir).expanduser()
        self.identified_by = WHOLE if self.full_hash else SAMPLE
        self.hf_tokenizer: PreTrainedTokenizerFast
        self.fingerprint: str | None = None
        self.resumed: str | None = None
        self.manifest: dict = {}
        self.train_sequences: int
        self.validation_bytes: int | None = None
        self.component_bytes: dict[str, int] = {}
        self.phase_starts: dict[int, str] = {}
        self._sequences: dict[str, Sequences] = {}
        self.accumulation(world_size=1)

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches per device that make one global batch on `world_size` devices.

        Raises:
            ValueError: the number is not whole; the line names `data.batch_tokens`, `data.micro_batch_size` and
                `trainer.devices`.
        """
        at_once = self.micro_batch_size * self.sequence_length * world_size
        if self.batch_tokens % at_once:
            problem = (
                f"is not a multiple of {at_once} = data.micro_batch_size={self.micro_batch_size} x "
                f"data.sequence_length={self.sequence_length} x {world_size} ranks that read data (trainer.devices)"
            )
            raise SettingError("data.batch_tokens", self.batch_tokens, "change one of them", problem)
        return self.batch_tokens // at_once

    def validation_batch_tokens(self, world_size: int) -> int:
        """Return the tokens of one validation batch, summed over `world_size` devices."""
        return self._validation_batch_size() * self.validation_length * world_size

    def _validation_batch_size(self) -> int:
        return max(1, self.micro_batch_size * self.sequence_length // self.validation_length)

    @abstractmethod
    def prepare(self) -> None:
        """Do all pending work on disk; cheap when nothing is pending. Needs no Trainer."""

    @abstractmethod
    def open(self, split: str, length: int) -> Sequences:
        """Return a split's sequences of `length` tokens."""

    def yardsticks(self) -> dict[str, float | None]:
        """Return the bits per byte of `data_pipeline.tokens.yardsticks.NAMES`; None without text."""
        return dict.fromkeys(NAMES)

    def prepare_data(self) -> None:
        """Prepare the data: Lightning's hook, called on one process per node."""
        self.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared data: Lightning's hook, called on every process."""
        self.prepare()
        if not self._sequences:
            lengths = {"train": self.sequence_length, "validation": self.validation_length}
            self._sequences = {split: self.open(split, lengths[split]) for split in SPLITS}

    def train_dataloader(self) -> DataLoader:
        """Return the micro-batches from the trainer's current step to its last, as one endless epoch.

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
        """Return all validation sequences in order, each on one rank; every rank has the same number of batches."""
        self.setup()
        sequences = self._sequences["validation"]
        order = ValidationOrder(len(sequences), self._validation_batch_size(), *self._rank_and_world_size())
        return self._loader(sequences, order, self.validation_length)

    def _loader(self, sequences: Sequences, order: Sampler, length: int) -> DataLoader:
        return OrderedLoader(
            sequences,
            batch_sampler=order,
            collate_fn=functools.partial(self._collate, length=length),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # separate: creating an iterator must not draw from the model's generator
        )

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the data-parallel rank and size; tensor parallelism makes them smaller than the process counts."""
        if self.trainer is None:
            return 0, 1
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        return replicas["rank"], replicas["num_replicas"]

    def _prepare_tokenizer(self, documents_folder: Path | None) -> Path:
        def build(folder: Path) -> dict:
            built = self.tokenizer.build(documents_folder)
            built.save_pretrained(folder)
            return {"vocab_size": len(built)}

        identity, earlier = (tokenizer_identity(self.tokenizer, documents_folder, by) for by in (SAMPLE, EARLIER))
        folder = prepared_folder(self.data_dir, "tokenizer", identity, build, earlier)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:  # from an earlier version, which kept no checksums
            raise ValueError(f"{folder} is damaged: remove it, and the next start makes it again") from error
        assert isinstance(tokenizer, PreTrainedTokenizerFast)  # none else is built
        self.hf_tokenizer = tokenizer
        return folder


def tokenizer_identity(tokenizer: ByteLevelBPE | Pretrained, documents: Path | None, by: str) -> dict:
    """Return the identity that names a tokenizer's folder; for `by` see `ByteLevelBPE.identity`."""
    return {"format": FORMAT, **tokenizer.identity(documents, by)}
