"""The sets' local copies, and their prompts as tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingError

FIELDS = {"input": str, "context": str, "answers": list}
MARGIN = 8  # tokens: a cut prompt is tokenized anew, and may grow a little
CONTEXT = 2048  # where a model's configuration does not say its own


@dataclass(frozen=True)
class Definition:
    """A set: an entry of `definitions` in conf/benchmark/_longbench_sets.yaml.

    Attributes:
        chat_template: whether prompts go into a chat template, if there is one.
        first_line: whether answers are scored by their first line.
        ends_at_newline: whether an answer ends there, after a token or more.
    """

    title: str
    group: str
    metric: str
    max_new_tokens: int
    prompt: str
    chat_template: bool = True
    first_line: bool = False
    ends_at_newline: bool = False


@dataclass(frozen=True)
class Document:
    """A question: what the prompt holds, the right answers, and the classes where there are any."""

    context: str
    question: str
    answers: Sequence[str]
    classes: Sequence[str]


def check_copies(folder: Path, names: Sequence[str]) -> None:
    """Check that there is a file for each set.

    Raises:
        SettingError: there is not; the line says where they are to be had.
    """
    missing = [f"{name}.jsonl" for name in names if not (folder / f"{name}.jsonl").is_file()]
    if missing:
        more = "" if len(missing) < 2 else f" and {len(missing) - 1} others"
        fix = (
            "unpack data.zip of the data set THUDM/LongBench there (hf download --repo-type dataset THUDM/LongBench "
            "data.zip), or name fewer benchmark.sets"
        )
        raise SettingError("benchmark.folder", folder, fix, f"has no {missing[0]}{more}")


def read_documents(path: Path, limit: int | None) -> list[Document]:
    """Return the documents of a file in LongBench's published format.

    Raises:
        ValueError: the file cannot be read; the line names it.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not JSON ({error})") from error
        wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]
        if wrong:
            raise ValueError(f"{path}, line {number}: has no {wrong[0]} as LongBench's documents have")
        found.append(Document(row["context"], row["input"], row["answers"], row.get("all_classes") or ()))
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"{path} has no documents")
    return found


def prompt_tokens(
    tokenizer: Any, definition: Definition, document: Document, max_length: int, in_template: bool
) -> tuple[list[int], bool]:
    """Return a prompt's tokens, and whether it was cut.

    A prompt of more than `max_length` tokens loses its middle: its first and last halves of that length are decoded and
    joined, as LongBench does, because both ends may hold the instruction. Only then it goes into the chat template.

    Args:
        max_length: tokens without those of the template.
        in_template: whether it goes into the tokenizer's chat template.
    """
    text = definition.prompt.format(context=document.context, input=document.question)
    tokens = tokenizer(text, verbose=False)["input_ids"]
    cut = len(tokens) > max_length
    if cut:
        half = max_length // 2
        ends = (tokens[:half], tokens[len(tokens) - half :])
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
        tokens = tokenizer(text, verbose=False)["input_ids"]
    return (chat_tokens(tokenizer, text) if in_template else tokens), cut


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a chat in which the user says `text` and an answer begins."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )  # fmt: skip
    return tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]


def room_for_prompt(config: Any, tokenizer: Any, definition: Definition, in_template: bool) -> int:
    """Return the tokens that a prompt may have in a model's context, beside the template and the answer.

    Raises:
        SettingError: there is no room.
    """
    context = getattr(config, "max_position_embeddings", None) or CONTEXT
    template = len(chat_tokens(tokenizer, "")) if in_template else 0
    room = context - template - definition.max_new_tokens - MARGIN
    if room < 2:
        problem = f"leaves no room in the model's context of {context:,} tokens for {definition.title}'s prompts"
        raise SettingError("benchmark.max_length", None, "leave out the set, or give a number", problem)
    return room
