"""Tokenizers: train a byte-level BPE on the corpus, or load one from a folder or the Hub."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import AutoTokenizer

from common.hub import is_path, use_cache_where_unreachable
from common.settings import SettingError, check_whole
from data_pipeline import documents
from data_pipeline.fingerprint import read_manifest
from data_pipeline.identity import SAMPLE, content_identity, settings_identity
from data_pipeline.progress import Stage

END_OF_TEXT = "<|endoftext|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
# A folder holds a tokenizer if it has all files of one of these sets.
FILE_SETS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("spiece.model",), ("vocab.txt",))
# All files a tokenizer is read from; a model's folder also has others (weights, a README).
FILES = (
    "tokenizer*",  # tokenizer.json, tokenizer_config.json, and other versions' files
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
CONFIG_KEYS = ("model_type", "model_name", "tokenizer_class", "transformers_version")  # decide how FILES are read


@dataclass(frozen=True)
class ByteLevelBPE:
    """A byte-level BPE in GPT-2's style, trained on about `train_bytes` bytes of the train documents.

    Every text decodes to itself, byte for byte. Documents are sampled by a hash of their text, so the sample and the
    vocabulary do not depend on the machine.
    """

    vocab_size: int = 16384
    train_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_whole("tokenizer.vocab_size", self.vocab_size, len(ALPHABET) + 1)  # bytes and END_OF_TEXT
        check_whole("tokenizer.train_bytes", self.train_bytes, 1)

    def identity(self, documents_folder: Path | None, by: str = SAMPLE) -> dict:
        """Return the settings and the training documents' folder, which is named by its content."""
        return {"byte_level_bpe": asdict(self), "documents": documents_folder and documents_folder.name}

    def build(self, documents_folder: Path | None) -> PreTrainedTokenizerFast:
        """Train the tokenizer.

        Raises:
            ValueError: `documents_folder` is None, so there is no text to train on.
        """
        if documents_folder is None:
            problem = "needs text to train on, and data has only tokens"
            raise SettingError("tokenizer", "bpe", "use tokenizer=gpt2", problem)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=ALPHABET, show_progress=False
        )
        with Stage("training the tokenizer", "B") as stage:
            tokenizer.train_from_iterator(self._sample(documents_folder, stage), trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
        )

    def _sample(self, documents_folder: Path, stage: Stage) -> Iterator[str]:
        fraction = self.train_bytes / read_manifest(documents_folder)["train"]["bytes"]
        for text in documents.texts(documents_folder, "train"):
            encoded = text.encode()
            # Other digits than those that decide between train and validation.
            if int.from_bytes(hashlib.sha256(encoded).digest()[8:16], "big") < fraction * 2**64:
                stage.advance(len(encoded))
                yield text
        if stage.done == 0:  # a few long documents, and the sample holds none of them
            for text in documents.texts(documents_folder, "train"):
                stage.advance(len(text.encode()))
                yield text
                if stage.done >= self.train_bytes:
                    return


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face tokenizer from a folder, or from the Hub by name (at `revision`)."""

    path: str
    revision: str | None = None

    def identity(self, documents_folder: Path | None, by: str = SAMPLE) -> dict:
        """Return the settings and, for a local folder, the whole content of the files that make the tokenizer.

        Args:
            documents_folder: unused; the other tokenizer is trained on it.
            by: EARLIER includes the folder's path.
        """
        folder = self._folder()
        if folder is None:
            return {"pretrained": asdict(self), "files": content_identity(Path(), [])}
        files = sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})
        try:
            content = content_identity(folder, files)
        except OSError as error:
            raise SettingError("tokenizer.path", self.path, str(error), "cannot be read") from error
        return {"pretrained": settings_identity(self, by, "path"), "files": content, "config": _config_values(folder)}

    def build(self, documents_folder: Path | None) -> PreTrainedTokenizerFast:
        """Load the tokenizer.

        Raises:
            ValueError: it cannot be loaded; the line names `tokenizer.path` and what is missing.
        """
        folder = self._folder()
        if folder is not None:
            _check_files(folder, self.path)
        else:
            use_cache_where_unreachable()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder or self.path, revision=self.revision, use_fast=True)
        except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
            what = "cannot be read as a tokenizer" if folder else "is not a folder here, nor could it come from the Hub"
            reason = str(error).strip().partition("\n")[0][:200]
            raise SettingError("tokenizer.path", self.path, reason, what) from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise SettingError("tokenizer.path", self.path, "give one with a tokenizer.json", "has no fast tokenizer")
        if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
            problem = "names neither a bos_token nor an eos_token, which mark where a document begins"
            raise SettingError("tokenizer.path", self.path, "set one in its tokenizer_config.json", problem)
        return tokenizer

    def _folder(self) -> Path | None:
        """Return the local folder, or None for a name on the Hub."""
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            return folder
        if is_path(self.path) or folder.exists():
            raise SettingError("tokenizer.path", self.path, "give a folder or a Hub name", "is not a folder")
        return None


def document_start(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id of the token put before each document: bos, or eos (GPT-2 uses one token for both), or None."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def text_start(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text, without those it puts after."""
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(alone)] == alone), whole[:0])


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids of the tokens that end a generated text; the model's generation settings may list several."""
    named = model.generation_config.eos_token_id
    return {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}


def set_special_tokens(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a model trained on the tokenizer's documents their special tokens, in its configuration and for generation.

    Generation ends at either document boundary: eos, or the start of the next document.
    """
    start, end = document_start(tokenizer), tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = start, end, tokenizer.pad_token_id
    ends = sorted({start, end} - {None})
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def add_document_start(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make `tokenizer(text)` start with the start token, as every text document did in training.

    The rule is stored in tokenizer.json, so saved tokenizers follow it in plain transformers too. Chat templates write
    their own special tokens and are tokenized without this one.

    Raises:
        ValueError: there is no start token.
    """
    first = document_start(tokenizer)
    if first is None:
        raise ValueError(
            f"{tokenizer.name_or_path}: the tokenizer names neither a bos_token nor an eos_token, which begin a text: "
            "set one in its tokenizer_config.json"
        )
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    if tokenizer("a")["input_ids"] == [first, *bare]:
        return
    token, backend = tokenizer.convert_ids_to_tokens(first), tokenizer.backend_tokenizer
    template = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, first)]
    )
    # Keep a post-processor that adds no tokens: it may adjust offsets. One that adds others was not used in training.
    keep = backend.post_processor is not None and tokenizer("a")["input_ids"] == bare
    backend.post_processor = processors.Sequence([backend.post_processor, template]) if keep else template


def _config_values(folder: Path) -> dict:
    """Return the keys of a model's `config.json` that concern its tokenizer; empty if the file cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: config[key] for key in CONFIG_KEYS if key in config} if isinstance(config, dict) else {}


def _check_files(folder: Path, path: str) -> None:
    here = {file.name for file in folder.iterdir()}
    if any(here.issuperset(names) for names in FILE_SETS):
        return
    partial = next((names for names in FILE_SETS if here.intersection(names)), FILE_SETS[0])
    missing = " and ".join(sorted(set(partial) - here))
    problem = f"has no {missing} (it has {', '.join(sorted(here)) or 'nothing'})"
    raise SettingError("tokenizer.path", path, "give a whole tokenizer", problem)
