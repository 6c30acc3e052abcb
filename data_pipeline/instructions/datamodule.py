"""Data module for instructions: records in, packed batches out, in the form and order of all token data."""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingError, check_choice, check_number, check_switch, check_whole, shown
from data_pipeline.documents import SPLITS
from data_pipeline.fingerprint import prepared_folder, read_manifest
from data_pipeline.identity import EARLIER
from data_pipeline.instructions.packing import PACKINGS
from data_pipeline.instructions.records import Record, Records
from data_pipeline.instructions.rendering import AlpacaTemplate, ChatTemplate, Example
from data_pipeline.instructions.storage import SequenceWriter, StoredSequences
from data_pipeline.progress import Stage
from data_pipeline.tokens.batches import IGNORED
from data_pipeline.tokens.token_data import TokenData
from data_pipeline.tokens.tokenizer import Pretrained
from data_pipeline.tokens.yardsticks import unigram_bits

log = logging.getLogger(__name__)

FORMAT = 1  # part of every fingerprint: increase it when the code writes something else from the same inputs
RECORDS_AT_ONCE = 512
CHOICES = {"template": ("alpaca", "chat"), "loss_on": ("answers", "all"), "packing": tuple(PACKINGS)}


@dataclass(kw_only=True, eq=False, repr=False)
class InstructionData(TokenData):
    """Instructions and their answers, rendered, tokenized, and packed into sequences under `data_dir`.

    The tokenizer needs an eos token, which ends every example, but no pad token. Sequences without a target are
    dropped. `manifest` has for each split: `examples`, `tokens`, `target_tokens`, `sequences`, `pass_tokens` (read by
    one epoch), and the losses: `truncated` and `without_target` examples, `left_out` sequences, and with a chat
    template `joined` examples, dropped because a token spans a prompt and an answer. `validation_bytes` counts the text
    that the held-out targets decode to, without special tokens.

    Args:
        path, split, revision, columns: see `data_pipeline.instructions.records.Records`. A record has instruction,
            output and perhaps input, or messages with role and content.
        template: "chat", the tokenizer's chat template; "alpaca", the Alpaca prompts.
        loss_on: "answers", or "all" tokens but the first of an example.
        packing: "whole", first fit, with examples cut to the sequence length; "concatenate", examples continue in the
            next sequence.
        cross_documents: a sequence is one document, so examples attend to those before them.
        validation_records: hold out this many first records; or None, and `validation_fraction` of all, by a hash of
            the record.
    """

    path: str | int | Path
    split: str = "train"
    revision: str | None = None
    columns: Mapping[str, str | None] | None = None
    template: str = "chat"
    loss_on: str = "answers"
    packing: str = "whole"
    cross_documents: bool = False
    sequence_length: int = 1024
    validation_length: int = 1024
    batch_tokens: int = 8192
    validation_records: int | None = 200
    validation_fraction: float | None = None

    documents_have_start = False  # an example starts as its template says

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, known in CHOICES.items():
            check_choice(f"data.{key}", getattr(self, key), known)
        check_switch("data.cross_documents", self.cross_documents)
        if not isinstance(self.tokenizer, Pretrained):
            fix = "use tokenizer=pretrained and the model's own (tokenizer.path)"
            raise SettingError("tokenizer", "bpe", fix, "is trained on text, and data has instructions")
        _check_held_out(self.validation_records, self.validation_fraction)
        self.records = Records(_place(self.path), self.split, self.revision, _names(self.columns))
        self._tokenizer_path = self.tokenizer.path
        self._folder: Path

    def prepare(self) -> None:
        """Read, render, tokenize and pack, unless already done.

        Raises:
            ValueError: something cannot work; the line names the key or the record.
        """
        if self.fingerprint is not None:
            return
        records, earlier = (self.records.identity(by) for by in (self.identified_by, EARLIER))
        tokenizer = self._prepare_tokenizer(None)
        if self.hf_tokenizer.eos_token_id is None:
            problem = "has no eos_token, which ends every answer"
            raise SettingError("tokenizer.path", self._tokenizer_path, "set one in its tokenizer_config.json", problem)
        identity = {
            "format": FORMAT,
            "records": records,
            "tokenizer": tokenizer.name,
            "template": self.template,
            "loss_on": self.loss_on,
            "packing": self.packing,
            "cross_documents": self.cross_documents,
            "lengths": [self.sequence_length, self.validation_length],
            "held_out": [self.validation_records, self.validation_fraction],
        }
        earlier = {**identity, "records": earlier}
        self._folder = prepared_folder(self.data_dir, "instructions", identity, self._build, earlier)
        self.manifest = read_manifest(self._folder)
        self.train_sequences = self.manifest["train"]["sequences"]
        self.validation_bytes = self.manifest["validation"]["bytes"]
        self.fingerprint = self._folder.name.removeprefix("instructions-")
        log.info("instructions: %s", _summary(self.manifest))

    def open(self, split: str, length: int) -> StoredSequences:
        """Return a split's sequences, memory-mapped; `length` is the length they were packed to."""
        return StoredSequences(self._folder, split)

    def yardsticks(self) -> dict[str, float | None]:
        """Return the bits per byte of the targets' unigram model; xz does not apply to answers alone."""
        self.prepare()
        train, validation = (
            StoredSequences(self._folder, split).target_counts(self.manifest["vocab_size"]) for split in SPLITS
        )
        found = unigram_bits(train, validation) / self.validation_bytes if self.validation_bytes else None
        return {**super().yardsticks(), "unigram_bits_per_byte": found}

    def _build(self, folder: Path) -> dict:
        parts = {split: _Part(self, split, folder) for split in SPLITS}
        template = self._make_template()
        with Stage("tokenizing instructions", "examples") as stage:
            for records in _groups(self.records):
                for record, example in zip(records, template.render(records), strict=True):
                    parts[self._split_of(record, stage.done)].add(example)
                    stage.advance(1)
            for part in parts.values():
                part.finish()
        self._check(parts, stage.done)
        return {
            **{split: part.counts for split, part in parts.items()},
            "vocab_size": len(self.hf_tokenizer),
            "seconds": round(stage.seconds, 3),
        }

    def _make_template(self) -> AlpacaTemplate | ChatTemplate:
        if self.template == "alpaca":
            return AlpacaTemplate(self.hf_tokenizer, self.loss_on)
        return ChatTemplate(self.hf_tokenizer, self.loss_on, f"tokenizer.path={self._tokenizer_path}")

    def _split_of(self, record: Record, number: int) -> str:
        if self.validation_records is not None:
            return "validation" if number < self.validation_records else "train"
        digest = hashlib.sha256(record.canonical()).digest()
        assert self.validation_fraction is not None  # one of the two is given
        return "validation" if int.from_bytes(digest[:8], "big") / 2**64 < self.validation_fraction else "train"

    def _check(self, parts: dict[str, "_Part"], records: int) -> None:
        """Raise ValueError, naming the key to change, if a split has nothing to learn or to measure."""
        for split, part in parts.items():
            if part.counts["sequences"]:
                continue
            if part.counts["examples"]:
                length = "sequence_length" if split == "train" else "validation_length"
                problem = (
                    f"leaves no target in any of {part.counts['examples']} {split} examples "
                    f"({part.counts['joined']} of them because a token had parts of a prompt and of an answer)"
                )
                raise SettingError(f"data.{length}", part.length, "give more tokens", problem)
            key = "validation_fraction" if self.validation_records is None else "validation_records"
            change = "lower it" if split == "train" else "raise it"
            problem = f"leaves no {split} record among {records}"
            raise SettingError(f"data.{key}", getattr(self, key), f"{change}, or give data.path more records", problem)


class _Part:
    """Packer, writer and counters of one split."""

    def __init__(self, data: InstructionData, split: str, folder: Path) -> None:
        self.length = data.sequence_length if split == "train" else data.validation_length
        self.packing, self.split, self.tokenizer = data.packing, split, data.hf_tokenizer
        self._packer = PACKINGS[data.packing](self.length, self.tokenizer.eos_token_id, data.cross_documents)
        self._writer = SequenceWriter(folder, split)
        counted = ("examples", "tokens", "target_tokens", "truncated", "without_target", "joined", "left_out")
        self.counts = {**dict.fromkeys(counted, 0), **({"bytes": 0} if split == "validation" else {})}

    def add(self, example: Example | None) -> None:
        self.counts["examples"] += 1
        if example is None:
            self.counts["joined"] += 1
            return
        if self.packing == "whole" and len(example.tokens) > self.length:
            example = Example(*(part[: self.length] for part in example))
            self.counts["truncated"] += 1
            if not example.learned.any():
                self.counts["without_target"] += 1
                return
        self.counts["tokens"] += len(example.tokens)
        if self.split == "validation":
            text = self.tokenizer.decode(
                example.tokens[example.learned].tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            assert isinstance(text, str)  # a list only for a batch
            self.counts["bytes"] += len(text.encode())
        self._write(self._packer.add(example))

    def finish(self) -> None:
        self._write(self._packer.finish())
        self._writer.close()
        self.counts["sequences"] = self._writer.sequences
        self.counts["pass_tokens"] = self._writer.sequences * self.length

    def _write(self, sequences: Iterator) -> None:
        for sequence in sequences:
            targets = int((sequence.targets != IGNORED).sum())
            self.counts["target_tokens"] += targets
            if targets:
                self._writer.write(sequence)
            else:
                self.counts["left_out"] += 1


def _groups(records: Records) -> Iterator[list[Record]]:
    """Yield lists of records, so that the tokenizer's threads have work."""
    iterator = iter(records)
    while group := list(itertools.islice(iterator, RECORDS_AT_ONCE)):
        yield group


def _place(path: Any) -> str:
    if not isinstance(path, str | int | Path):
        raise SettingError("data.path", path, "give a file, a folder, or a name on the Hub")
    return str(path)


def _names(columns: Any) -> dict[str, str]:
    """Return the fields that were given another column name."""
    given = {} if columns is None else columns
    if not isinstance(given, Mapping) or not all(isinstance(name, str | None) for name in given.values()):
        raise SettingError("data.columns", columns, "give names, as data.columns.output=answer")
    return {field: name for field, name in given.items() if name is not None}


def _check_held_out(records: int | None, fraction: float | None) -> None:
    if (records is None) == (fraction is None):
        problem = f"and data.validation_fraction={shown(fraction)}"
        raise SettingError("data.validation_records", records, "give one of them, and null for the other", problem)
    check_whole("data.validation_records", records, 1, null=True)
    check_number("data.validation_fraction", fraction, above=0, below=1, null=True)


def _summary(manifest: dict) -> str:
    lines = []
    for split in SPLITS:
        counts = manifest[split]
        lost = ", ".join(
            f"{counts[key]:,} {words}"
            for key, words in (
                ("truncated", "cut to a sequence"),
                ("without_target", "without a target then"),
                ("joined", "left out, where a token has parts of a prompt and of an answer"),
                ("left_out", "sequences left out, without a target"),
            )
            if counts[key]
        )
        lines.append(
            f"{split} {counts['examples']:,} examples, {counts['tokens']:,} tokens, {counts['target_tokens']:,} of "
            f"them targets, {counts['pass_tokens']:,} in a pass{f' ({lost})' if lost else ''}"
        )
    return "; ".join(lines)
