"""The job: from settings over text and model to results."""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor

from common.setting_types import check_type
from common.settings import NO_VALUE, SettingError, check_choice, check_whole
from evaluation import result_folder, results
from evaluation.cache_analysis import report
from evaluation.cache_analysis.coverage import Coverage, Distances
from evaluation.cache_analysis.distortion import AttentionError, Reconstruction, Rounding
from evaluation.cache_analysis.heads import key_heads
from evaluation.cache_analysis.pictures import draw
from evaluation.cache_analysis.values import Values
from evaluation.loading import DTYPES, cut_text, load_checkpoint
from lit_modules.generation import job
from lit_modules.networks.attention_inputs import AttentionInputs, watched_attention
from lit_modules.networks.caches.rotations import Rotations, read_rotations

log = logging.getLogger(__name__)

NAME = "cache_analysis"
LEAST_RESERVED = 6  # four first tokens and a recent one; two in a third


@dataclass(frozen=True)
class Settings:
    """Checked settings besides the checkpoint: conf/benchmark/cache_analysis.yaml explains them.

    Raises:
        ValueError: if a value is invalid; the line names its key.
    """

    text: str
    length: int
    sequences: int
    queries: int
    reserved: tuple[int, ...]
    bits: tuple[int, ...]
    group: int
    rotations: str | None
    dtype: str
    seed: int

    def __post_init__(self) -> None:
        check_type("benchmark.text", self.text, str)
        check_type("benchmark.rotations", self.rotations, str | None)
        for key in ("length", "sequences", "queries"):
            check_whole(f"benchmark.{key}", getattr(self, key), 1)
        for key in ("reserved", "bits"):
            if not getattr(self, key):
                raise SettingError(f"benchmark.{key}", NO_VALUE, "give one or more numbers", "is empty")
        for reserved in self.reserved:
            check_whole("benchmark.reserved", reserved, LEAST_RESERVED)
        for bits in self.bits:
            check_choice("benchmark.bits", bits, (2, 4))
        check_whole("benchmark.group", self.group, 16)
        check_choice("dtype", self.dtype, DTYPES)
        check_whole("seed", self.seed, 0)
        most, before = max(self.reserved), self.length - self.queries
        if most + self.group > before:
            fix = f"give {before - self.group} at most, or a larger benchmark.length"
            problem = (
                f"leaves no tokens to quantize: {before} come before the measured queries (benchmark.length less "
                f"benchmark.queries), and {self.group} are quantized at a time"
            )
            raise SettingError("benchmark.reserved", most, fix, problem)

    @property
    def rows(self) -> range:
        """The positions of the measured queries."""
        return range(self.length - self.queries, self.length)


def run(cfg: DictConfig) -> None:
    """Analyse a checkpoint; print the tables, write cache_analysis.json, .md and .png, log to the run.

    Raises:
        ValueError: if a setting is invalid, the text too short, or there is no checkpoint or no attention in it.
    """
    settings = settings_of(cfg)
    job.check_is_folder(str(cfg.checkpoint))
    place = result_folder.result_folder(str(cfg.checkpoint), None if cfg.output is None else str(cfg.output))
    text, device = job.read_text("benchmark.text", settings.text), job.choose_device(cfg.device)
    model, tokenizer = load_checkpoint(cfg, device)
    rotations = None if settings.rotations is None else read_rotations(Path(settings.rotations), model)
    check_model(model, str(cfg.checkpoint), settings.length)
    sequences = some_sequences(text, tokenizer, settings)
    place.make()
    values, edges = measure(model, [row.to(device) for row in sequences], settings, rotations)
    found = report.make_report(values, edges, settings.reserved) | {
        "checkpoint": str(cfg.checkpoint),
        "settings": asdict(settings),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": result_folder.weights_identity(str(cfg.checkpoint)),
        **results.conditions(device),
    }
    results.write_results(NAME, found, place, report.as_markdown, draw, report.logged_values(found))


def settings_of(cfg: DictConfig) -> Settings:
    """Read the settings from the configuration."""
    given = cfg.benchmark
    return Settings(
        text=given.text,
        length=given.length,
        sequences=given.sequences,
        queries=given.queries,
        reserved=numbers(given.reserved),
        bits=numbers(given.bits),
        group=given.group,
        rotations=given.rotations,
        dtype=str(cfg.dtype),
        seed=cfg.seed,
    )


def numbers(given: Any) -> tuple:
    """Return the numbers of a list, each once, ascending; or a single one."""
    if not isinstance(given, ListConfig):
        return () if given is None else (given,)
    return tuple(dict.fromkeys(given))


def check_model(model: Any, checkpoint: str, length: int) -> None:
    """Raise ValueError for sequences longer than the model reads, or attention with more in it than scores."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and length > most:
        raise SettingError("benchmark.length", length, f"give {most} at most", "is more than the checkpoint reads")
    if any(name.endswith("self_attn.sinks") for name, _ in model.named_parameters()):
        raise SettingError("checkpoint", checkpoint, "give one without", "has learned sinks beside its scores")


def some_sequences(text: str, tokenizer: Any, settings: Settings) -> list[Tensor]:
    """Return `settings.sequences` sequences `[1, length]` of the text that do not overlap, drawn by the seed.

    Raises:
        ValueError: the text is too short for them.
    """
    rows = cut_text(tokenizer, text, settings.length)
    if len(rows) < settings.sequences:
        fix = "give fewer, a smaller benchmark.length, or a longer benchmark.text"
        problem = f"are more than the {len(rows)} of {settings.length:,} tokens in {settings.text}"
        raise SettingError("benchmark.sequences", settings.sequences, fix, problem)
    drawn = random.Random(settings.seed).sample(range(len(rows)), settings.sequences)
    return [rows[[number]] for number in sorted(drawn)]


def measure(
    model: Any, sequences: Sequence[Tensor], settings: Settings, rotations: Rotations | None
) -> tuple[Values, list[int]]:
    """Run the sequences `[1, T]` through the model; return the measured values, and the bins of distances.

    Raises:
        ValueError: no layer has attention to the whole past, or its values are not numbers.
    """
    device, values, seconds = sequences[0].device, Values(), time.perf_counter()
    rounding = roundings(settings, rotations)
    plain = [each for each in rounding if each.transform == "plain"]
    coverage = Coverage(settings.reserved, settings.rows, device)
    distances = Distances(settings.rows, device)
    errors = AttentionError(settings.reserved, plain, settings.rows, device)
    reconstruction = Reconstruction(rounding, min(settings.reserved), settings.rows, device)

    def see(layer: int, inputs: AttentionInputs) -> None:
        if inputs.window is not None and inputs.window < settings.length:
            return  # a cache holds the window's tokens, as they are
        found = []
        for head in key_heads(inputs, settings.queries, settings.reserved):
            if not bool(head.weights.isfinite().all()):
                raise ValueError(f"checkpoint: the attention of layer {layer} is not numbers, so weights are damaged")
            found.append(
                coverage.of_head(head)
                | distances.of_head(head)
                | errors.of_head(head, layer)
                | reconstruction.of_head(head, layer)
            )
        values.add(layer, {key: torch.cat([each[key] for each in found]) for key in found[0]})

    with torch.no_grad(), watched_attention(model, see):
        for number, row in enumerate(sequences, 1):
            values.begin_sequence()
            model(input_ids=row, use_cache=False, logits_to_keep=1)
            if not values.sequences[-1]:
                problem = "has no attention layer that sees all tokens"
                raise SettingError("checkpoint", NO_VALUE, "only the cache of such a layer is compressed", problem)
            log.info("%s of %s sequences (%.0f s)", number, len(sequences), time.perf_counter() - seconds)
    return values, distances.edges


def roundings(settings: Settings, rotations: Rotations | None) -> list[Rounding]:
    """Return every way to round that is compared; calibrated ones have groups along channels, as OSCAR has."""
    ways = [("tokens", "plain"), ("channels", "plain"), ("tokens", "hadamard"), ("channels", "hadamard")]
    if rotations is not None:
        ways += [("channels", "rotation"), ("channels", "clipped"), ("channels", "balanced")]
    return [
        Rounding(bits, along, transform, settings.group, rotations)
        for bits in settings.bits
        for along, transform in ways
    ]
