"""The job: from settings over questions to results."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from common.setting_nodes import plain_dict
from common.setting_types import check_type
from common.settings import SettingError, check_choice, check_whole
from evaluation import result_folder, results, scores
from evaluation.answering import answers
from evaluation.caches import NamedCache, read_caches
from evaluation.loading import batch_of, check_loading, explain_batch_memory, load_checkpoint
from evaluation.recall.questions import KINDS, Recall, check_depths, is_right
from evaluation.recall.report import as_markdown, compared, draw
from evaluation.saved_results import saved_results
from lit_modules.generation import job

NAME = "recall"
MOST_KEYS = 1000


@dataclass(frozen=True)
class Settings:
    """Checked settings of conf/benchmark/recall.yaml.

    Raises:
        SettingError: a value is invalid.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    keys: int
    text: str | None
    chunk: int
    seed: int

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice("benchmark.kinds", kind, KINDS)
        for length in self.lengths:
            check_whole("benchmark.lengths", length, 1)
        for name in ("kinds", "lengths"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise SettingError(f"benchmark.{name}", list(given), "give one or more, each once")
        check_depths(self.depths)
        check_whole("benchmark.samples", self.samples, 1)
        check_whole("benchmark.keys", self.keys, 1, MOST_KEYS)
        check_type("benchmark.text", self.text, str | None)
        check_whole("benchmark.chunk", self.chunk, 1)
        check_whole("seed", self.seed, 0)


def run(cfg: DictConfig) -> None:
    """Ask for facts at each depth and length, once with each cache.

    Raises:
        ValueError: a setting is invalid, or there is no checkpoint.
    """
    own = cfg.benchmark
    check_loading(cfg)
    plain = plain_dict(own, resolve=False)
    lists: dict[str, Any] = {key: plain.get(key) for key in ("kinds", "lengths", "depths")}
    for key, value in lists.items():
        check_type(f"benchmark.{key}", value, list)
    settings = Settings(
        **{key: tuple(value) for key, value in lists.items()},
        samples=own.samples,
        keys=own["keys"],
        text=own.text,
        chunk=own.chunk,
        seed=cfg.seed,
    )
    caches = read_caches(own.caches)
    place = result_folder.result_folder_of(cfg)
    text = None if settings.text is None else job.read_text("benchmark.text", settings.text)
    if text is not None and not text.strip():
        raise SettingError("benchmark.text", settings.text, "give one with sentences", "is empty")
    device = job.choose_device(cfg.device)
    place.make()
    said = results.conditions(device)
    model, tokenizer = load_checkpoint(cfg, device)
    asking = Asking(model, tokenizer, Recall(tokenizer, text, settings.keys, settings.seed), settings, cfg.batch_size)
    identity = {
        **results.identity(cfg, said),
        "text": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        **{key: getattr(settings, key) for key in ("keys", "chunk", "seed")},
    }
    found = {cache.name: asking.everything(cache, place.folder / NAME, identity) for cache in caches}
    report = {
        "checkpoint": str(cfg.checkpoint),
        **compared(found, settings.kinds),
        "settings": dataclasses.asdict(settings),
        "caches": {cache.name: cache.plain for cache in caches},
        "context": getattr(model.config, "max_position_embeddings", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        **said,
    }
    results.write_results(NAME, report, place, as_markdown, draw, scores.logged(report))


@dataclass(frozen=True)
class Asking:
    """Questions put to a model."""

    model: Any
    tokenizer: Any
    recall: Recall
    settings: Settings
    batch_size: int | str

    def everything(self, cache: NamedCache, folder: Any, identity: dict) -> dict[tuple[str, int, float], list[bool]]:
        """Return for each kind, length and depth which questions were answered rightly."""
        every = [(k, n, d) for k in self.settings.kinds for n in self.settings.lengths for d in self.settings.depths]
        found = {}
        for kind, length, depth in every:
            said = saved_results(
                folder,
                f"{cache.name} {kind} {length} {depth:g}",
                {**identity, "cache": cache.identity(), "kind": kind, "length": length, "depth": depth},
                self.settings.samples,
                functools.partial(self.ask, cache, kind, length, depth),
                batch_of(self.batch_size, length, self.model.device),
            )
            found[kind, length, depth] = [is_right(each["text"], each["answer"]) for each in said]
        return found

    def ask(
        self, cache: NamedCache, kind: str, length: int, depth: float, numbers: Sequence[int]
    ) -> list[dict[str, str]]:
        """Return the generated texts for the questions with these numbers, and their answers."""
        questions = [self.recall.question(kind, length, depth, number) for number in numbers]
        with explain_batch_memory(len(questions), self.model.device, f"{length} tokens"), torch.no_grad():
            texts = answers(
                self.model,
                self.tokenizer,
                [question.prompt for question in questions],
                cache.new(self.model),
                max_new_tokens=max(question.max_new_tokens for question in questions),
                chunk=self.settings.chunk,
                ends=job.text_ends(self.model, self.tokenizer),
            )
        return [{"text": text, "answer": each.answer} for text, each in zip(texts, questions, strict=True)]
