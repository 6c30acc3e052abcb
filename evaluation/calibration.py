"""`job=calibrate`: fit the rotations and maps of a model's cache to text, and print what they gain."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from common.setting_types import check_type
from common.settings import SettingError, check_choice, check_whole
from data_pipeline.tokens.tokenizer import text_start
from evaluation.loading import DTYPES, load_checkpoint
from evaluation.tables import table
from lit_modules.generation import job
from lit_modules.networks.caches.calibration import (
    TREATMENTS,
    LayerErrors,
    fit_rotations,
    measure_rotations,
    measured_format,
)
from lit_modules.networks.caches.rotations import model_identity, write_rotations
from lit_modules.planning import out_of_memory

log = logging.getLogger(__name__)

LEAST_TOKENS = 100
LONGEST_SEQUENCE = 2048
CHARACTERS_PER_TOKEN = 32  # read of the text for each token; few texts have more
SUFFIX = ".safetensors"


def run(cfg: DictConfig) -> None:
    """Fit rotations to nine tenths of the tokens, write them, and print the errors on the last tenth by layer.

    Raises:
        ValueError: a setting is invalid, the text is too short, the output cannot be written, there is no checkpoint,
            or its cache cannot be quantized.
    """
    check_settings(cfg)
    output = Path(cfg.output)
    check_output(output)
    text = read_beginning(Path(cfg.text), cfg.tokens * CHARACTERS_PER_TOKEN)
    device = job.choose_device(cfg.device)
    model, tokenizer = load_checkpoint(cfg, device)
    check_heads(str(cfg.checkpoint), model)
    length = sequence_length(cfg.sequence_length, model)
    start = text_start(tokenizer)
    if length <= len(start):
        raise SettingError("sequence_length", length, f"give more than {len(start)}, which begin each text")
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: cfg.tokens]
    if len(tokens) < cfg.tokens:
        problem = f"has {len(tokens):,} tokens, fewer than tokens={cfg.tokens:,}"
        raise SettingError("text", cfg.text, "give a longer one, or fewer tokens", problem)
    fitted = len(tokens) - len(tokens) // 10
    to_fit, held_out = (sequences(part, start, length, device) for part in (tokens[:fitted], tokens[fitted:]))
    with out_of_memory.explain_out_of_memory(cfg, "give a smaller sequence_length, or dtype=bfloat16"):
        progress = counted(sum(ids.numel() for ids in (*to_fit, *to_fit, *held_out)))
        rotations = fit_rotations(model, to_fit, progress)
        errors = measure_rotations(model, rotations, held_out, progress)
    try:
        write_rotations(output, rotations)
    except OSError as error:
        raise cannot_be_written(output, error) from error
    print(as_markdown(errors), flush=True)
    log.info("rotations of %s layers are in %s", len(rotations.layers), output)


def check_settings(cfg: DictConfig) -> None:
    """Raise SettingError for a value of a wrong type or size."""
    for key in ("checkpoint", "text", "output", "device"):
        check_type(key, cfg[key], str)
    check_whole("tokens", cfg.tokens, LEAST_TOKENS)
    check_whole("sequence_length", cfg.sequence_length, 2, null=True)
    check_choice("dtype", cfg.dtype, DTYPES)


def check_output(path: Path) -> None:
    """Raise SettingError, before the model is loaded, if the file cannot be written."""
    if path.suffix != SUFFIX or path.is_dir():
        raise SettingError("output", path, f"give a {SUFFIX} file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingError("output", path, "give another", "is in a folder that cannot be written to")


def cannot_be_written(path: Path, error: OSError) -> SettingError:
    return SettingError("output", path, "give another", f"cannot be written ({error.strerror})")


def read_beginning(path: Path, characters: int) -> str:
    """Return the first characters of a text file.

    Raises:
        SettingError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(characters)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("text", path, f"give a text file ({error})", "cannot be read") from error


def check_heads(checkpoint: str, model: Any) -> None:
    """Raise SettingError if no format of 2 bits fits the heads of a model."""
    identity = model_identity(model)
    for width in (identity["key_dim"], identity["value_dim"]):
        try:
            measured_format(width)
        except ValueError as error:
            problem = f"has heads {width} wide, which cannot be packed ({error})"
            raise SettingError("checkpoint", checkpoint, "give another model", problem) from error


def sequence_length(asked: int | None, model: Any) -> int:
    """Return the length of sequences.

    Raises:
        SettingError: it is beyond what the model takes.
    """
    most = model.config.get_text_config(decoder=True).max_position_embeddings or LONGEST_SEQUENCE
    if asked is not None and asked > most:
        raise SettingError("sequence_length", asked, f"give {most} at most", "is longer than the model's context")
    return min(most, LONGEST_SEQUENCE) if asked is None else asked


def sequences(tokens: list[int], start: list[int], length: int, device: torch.device) -> list[torch.Tensor]:
    """Cut tokens into sequences `[1, length]`, the last one shorter, each begun as the tokenizer begins a text."""
    own = length - len(start)
    cut = (start + tokens[place : place + own] for place in range(0, len(tokens), own))
    return [torch.tensor([row], device=device) for row in cut]


def counted(total: int) -> Callable[[int], None]:
    """Return a function that counts tokens and logs each tenth of the total."""
    read = 0

    def count(tokens: int) -> None:
        nonlocal read
        before, read = read, read + tokens
        if 10 * read // total > 10 * before // total:
            log.info("%s of %s tokens read, in three passes", f"{read:,}", f"{total:,}")

    return count


def as_markdown(errors: dict[int, LayerErrors]) -> str:
    """Format the errors of each layer and their means."""
    names = [f"{kind}, {treatment}" for kind in ("scores", "values") for treatment in TREATMENTS]
    rows = [[str(layer), *(found.scores + found.values)] for layer, found in errors.items()]
    means = [sum(column) / len(rows) for column in zip(*(row[1:] for row in rows), strict=True)]
    lines = [[str(row[0]), *(f"{value:.3f}" for value in row[1:])] for row in [*rows, ["mean", *means]]]
    title = "Relative error at 2 bits on text that the rotations are not fitted to:"
    return "\n".join([title, "", *table([["layer", *names], *lines])])
