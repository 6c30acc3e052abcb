"""The job: from settings over the text's sequences to results."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from common.settings import SettingError, check_whole
from evaluation import result_folder, results
from evaluation.caches import NamedCache, bits_per_element, read_caches
from evaluation.loading import batch_of, check_loading, cut_text, explain_batch_memory, load_checkpoint
from evaluation.perplexity_by_position.report import as_markdown, compared, draw, logged
from evaluation.perplexity_by_position.scoring import buckets, curve_ranges, mean_losses, token_losses
from evaluation.saved_results import saved_results
from lit_modules.generation import job

NAME = "perplexity_by_position"


@dataclass(frozen=True)
class Settings:
    """Checked settings of conf/benchmark/perplexity_by_position.yaml.

    Raises:
        SettingError: a value is invalid.
    """

    text: Path
    length: int
    chunk: int
    sequences: int | None

    def __post_init__(self) -> None:
        check_whole("benchmark.length", self.length, 2)
        check_whole("benchmark.chunk", self.chunk, 1)
        check_whole("benchmark.sequences", self.sequences, 1, null=True)


def run(cfg: DictConfig) -> None:
    """Measure the perplexity of a text by position, once with each cache.

    Raises:
        ValueError: a setting is invalid, the text is too short, or there is no checkpoint.
    """
    own = cfg.benchmark
    check_loading(cfg)
    settings = Settings(Path(str(own.text)), own.length, own.chunk, own.sequences)
    caches = read_caches(own.caches)
    check_selecting(caches, settings.chunk)
    place = result_folder.result_folder_of(cfg)
    text = job.read_text("benchmark.text", str(settings.text))
    device = job.choose_device(cfg.device)
    place.make()
    report = measured(cfg, settings, caches, text, device, place.folder / NAME)
    results.write_results(NAME, report, place, as_markdown, draw, logged(report))


def check_selecting(caches: list[NamedCache], chunk: int) -> None:
    """Check that tokens pass through the model one at a time if a cache selects values, which it does for these alone.

    Raises:
        SettingError: they do not.
    """
    selecting = [cache.name for cache in caches if cache.settings.top_values is not None]
    if selecting and chunk > 1:
        problem = f"would measure {selecting[0]} as if it read all values"
        raise SettingError("benchmark.chunk", chunk, "give 1", problem)


def measured(
    cfg: DictConfig, settings: Settings, caches: list[NamedCache], text: str, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Return the losses of each cache by position, and the conditions of their measurement."""
    said = results.conditions(device)
    model, tokenizer = load_checkpoint(cfg, device)
    sequences = cut_text(tokenizer, text, settings.length)[: settings.sequences]
    identity = {
        **results.identity(cfg, said),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "length": settings.length,
        "chunk": settings.chunk,
    }
    batch = batch_of(cfg.batch_size, settings.length, device)
    found = {}
    for cache in caches:
        compute = functools.partial(losses_of, model, sequences, cache, settings, batch)
        key = {**identity, "cache": cache.identity()}
        found[cache.name] = saved_results(folder, cache.name, key, len(sequences), compute, batch)
    return {
        "checkpoint": str(cfg.checkpoint),
        "text": str(settings.text),
        "length": settings.length,
        "chunk": settings.chunk,
        "sequences": len(sequences),
        **compared(found, settings.length),
        "caches": {cache.name: cache.plain for cache in caches},
        "dtype": str(model.dtype).removeprefix("torch."),
        **said,
    }


def losses_of(
    model: Any, sequences: torch.Tensor, cache: NamedCache, settings: Settings, batch: int, rows: list[int]
) -> list[dict[str, Any]]:
    """Return these sequences' mean losses in the buckets and along the curve, and the cache's bits at their end."""
    filled = cache.new(model)
    with explain_batch_memory(batch, model.device, f"{settings.length} tokens"):
        losses = token_losses(model, filled, sequences[rows].to(model.device), settings.chunk)
    parts = {"buckets": buckets(settings.length), "curve": curve_ranges(settings.length)}
    bits = {"bits": bits_per_element(filled, model.dtype)}
    return [{part: mean_losses(row, ranges) for part, ranges in parts.items()} | bits for row in losses]
