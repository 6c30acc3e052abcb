"""The job: from settings over documents to results."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from common.setting_nodes import plain_dict
from common.setting_types import check_type
from common.settings import SettingError, check_choice, check_switch, check_whole, instead
from data_pipeline.identity import WHOLE, file_identity
from evaluation import result_folder, results, scores
from evaluation.answering import answers
from evaluation.caches import NamedCache, read_caches
from evaluation.loading import batch_of, check_loading, explain_batch_memory, load_checkpoint
from evaluation.longbench.documents import (
    Definition,
    Document,
    check_copies,
    prompt_tokens,
    read_documents,
    room_for_prompt,
)
from evaluation.longbench.report import as_markdown, draw, math_beside, summary
from evaluation.saved_results import saved_results
from lit_modules.generation import job

NAME = "longbench"
PACKAGES = ("rouge", *results.PACKAGES)
WORDS = ("characters", "jieba")


@dataclass(frozen=True)
class Settings:
    """Checked settings of conf/benchmark/longbench.yaml.

    Raises:
        SettingError: a value is invalid.
    """

    folder: str
    sets: tuple[str, ...]
    limit: int | None
    max_length: int | None
    chat_template: bool
    chinese_words: str
    chunk: int

    def __post_init__(self) -> None:
        check_whole("benchmark.limit", self.limit, 1, null=True)
        check_whole("benchmark.max_length", self.max_length, 2, null=True)
        check_switch("benchmark.chat_template", self.chat_template)
        check_choice("benchmark.chinese_words", self.chinese_words, WORDS)
        check_whole("benchmark.chunk", self.chunk, 1)


def run(cfg: DictConfig) -> None:
    """Let the model answer the sets' questions, once with each cache.

    Raises:
        ValueError: a setting is invalid, a set is not there, or there is no checkpoint.
    """
    # Imported here so that a missing extra is named: Hydra hides import errors of this module.
    from evaluation.longbench.metrics import Metrics

    own = plain_dict(cfg.benchmark)
    check_loading(cfg)
    definitions = {name: Definition(**given) for name, given in own["definitions"].items()}
    given = list(definitions) if own["sets"] is None else own["sets"]
    check_type("benchmark.sets", given, list[str])
    if not given or len(set(given)) < len(given):
        raise SettingError("benchmark.sets", given, "name one or more, each once, or give null for all")
    for name in given:
        if name not in definitions:
            raise SettingError("benchmark.sets", name, instead(name, list(definitions)), "is not known")
    plain = {key: own[key] for key in ("limit", "max_length", "chat_template", "chinese_words", "chunk")}
    settings = Settings(folder=str(own["folder"]), sets=tuple(given), **plain)
    caches = read_caches(own["caches"])
    check_copies(Path(settings.folder), settings.sets)
    metrics = Metrics(settings.chinese_words)
    place = result_folder.result_folder_of(cfg)
    device = job.choose_device(cfg.device)
    documents = {
        name: read_documents(Path(settings.folder) / f"{name}.jsonl", settings.limit) for name in settings.sets
    }
    place.make()
    said = results.conditions(device, PACKAGES)
    model, tokenizer = load_checkpoint(cfg, device)
    identity = {
        **results.identity(cfg, said),
        "chunk": settings.chunk,
    }
    found: dict[str, dict[str, list[float]]] = {}
    cut = {}
    for name in settings.sets:
        asked = Set(model, tokenizer, name, definitions[name], documents[name], settings)
        cut[name] = sum(was_cut for _, was_cut in asked.prompts)
        for cache in caches:
            texts = asked.texts(cache, cfg.batch_size, place.folder / NAME, identity)
            found.setdefault(definitions[name].title, {})[cache.name] = asked.scores(metrics, texts)
    report = {
        "checkpoint": str(cfg.checkpoint),
        "weights": identity["weights"],
        **summary(scores.compared(found), {name: definitions[name] for name in settings.sets}),
        "documents": {name: len(each) for name, each in documents.items()},
        "cut_prompts": cut,
        "settings": dataclasses.asdict(settings),
        "caches": {cache.name: cache.plain for cache in caches},
        "dtype": str(model.dtype).removeprefix("torch."),
        **said,
    }
    report["math"] = math_beside(report, place.folder)
    results.write_results(NAME, report, place, as_markdown, draw, scores.logged(report["sets"]))


@dataclass(frozen=True)
class Set:
    """A set's questions put to a model."""

    model: Any
    tokenizer: Any
    name: str
    definition: Definition
    documents: Sequence[Document]
    settings: Settings

    @property
    def in_template(self) -> bool:
        """Whether prompts go into the tokenizer's chat template."""
        wanted = self.settings.chat_template and self.definition.chat_template
        return wanted and self.tokenizer.chat_template is not None

    @functools.cached_property
    def max_length(self) -> int:
        """Tokens of a prompt without the template."""
        if self.settings.max_length is not None:
            return self.settings.max_length
        return room_for_prompt(self.model.config, self.tokenizer, self.definition, self.in_template)

    @functools.cached_property
    def prompts(self) -> list[tuple[list[int], bool]]:
        """The documents' prompts as tokens, and whether each was cut."""
        return [
            prompt_tokens(self.tokenizer, self.definition, document, self.max_length, self.in_template)
            for document in self.documents
        ]

    def texts(self, cache: NamedCache, batch_size: int | str, folder: Path, identity: dict) -> list[str]:
        """Return the generated answers."""
        longest = max(len(tokens) for tokens, _ in self.prompts) + self.definition.max_new_tokens
        return saved_results(
            folder,
            f"{cache.name} {self.name}",
            {
                **identity,
                "cache": cache.identity(),
                "definition": dataclasses.asdict(self.definition),
                "data": file_identity([Path(self.settings.folder) / f"{self.name}.jsonl"], WHOLE),
                "max_length": self.max_length,
                "in_template": self.in_template,
            },
            len(self.documents),
            functools.partial(self.ask, cache),
            batch_of(batch_size, longest, self.model.device),
        )

    def ask(self, cache: NamedCache, numbers: Sequence[int]) -> list[str]:
        """Return the generated answers to the questions with these numbers."""
        ends, least = job.text_ends(self.model, self.tokenizer), 0
        if self.definition.ends_at_newline:
            ends, least = ends | {self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]}, 1
        with explain_batch_memory(len(numbers), self.model.device, self.name):
            return answers(
                self.model,
                self.tokenizer,
                [self.prompts[number][0] for number in numbers],
                cache.new(self.model),
                max_new_tokens=self.definition.max_new_tokens,
                min_new_tokens=least,
                chunk=self.settings.chunk,
                ends=ends,
            )

    def scores(self, metrics: Any, texts: Sequence[str]) -> list[float]:
        """Return each answer's score."""
        given = self.definition
        return [
            metrics.score(given.metric, text, document.answers, document.classes, given.first_line)
            for text, document in zip(texts, self.documents, strict=True)
        ]
