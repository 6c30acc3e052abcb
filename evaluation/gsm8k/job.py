"""The job: from settings over questions to results."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from common.settings import check_whole
from data_pipeline.identity import WHOLE, file_identity
from evaluation import result_folder, results, scores
from evaluation.caches import read_caches
from evaluation.loading import batch_of, check_loading, explain_batch_memory, load_checkpoint
from evaluation.saved_results import saved_results
from evaluation.tables import UNDECIDED
from lit_modules.generation import job

NAME = "gsm8k"
PACKAGES = ("lm_eval", *results.PACKAGES)


@dataclass(frozen=True)
class Settings:
    """Checked settings of conf/benchmark/gsm8k.yaml.

    Raises:
        SettingError: a value is invalid.
    """

    folder: str
    num_fewshot: int
    limit: int | None
    max_new_tokens: int
    chunk: int
    seed: int

    def __post_init__(self) -> None:
        check_whole("benchmark.num_fewshot", self.num_fewshot, 0)
        check_whole("benchmark.limit", self.limit, 1, null=True)
        check_whole("benchmark.max_new_tokens", self.max_new_tokens, 1)
        check_whole("benchmark.chunk", self.chunk, 1)
        check_whole("seed", self.seed, 0)


def run(cfg: DictConfig) -> None:
    """Let the model answer the questions, once with each cache.

    Raises:
        ValueError: a setting is invalid, the data are not there, or there is no checkpoint.
    """
    # Imported here so that a missing extra is named: Hydra hides import errors of this module.
    from evaluation.gsm8k.task import CachedLM, check_copy, load_task, scores_of
    from evaluation.harness.tasks import silence_loggers

    own = cfg.benchmark
    check_loading(cfg)
    settings = Settings(str(own.folder), own.num_fewshot, own.limit, own.max_new_tokens, own.chunk, cfg.seed)
    folder = Path(settings.folder)
    check_copy(folder)
    caches = read_caches(own.caches)
    place = result_folder.result_folder_of(cfg)
    device = job.choose_device(cfg.device)
    task = load_task(folder, settings.num_fewshot, settings.max_new_tokens, settings.seed, settings.limit)
    place.make()
    said = results.conditions(device, PACKAGES)
    model, tokenizer = load_checkpoint(cfg, device)
    longest = max(len(tokenizer(request.args[0])["input_ids"]) for request in task.instances)
    batch = batch_of(cfg.batch_size, longest + settings.max_new_tokens, device)
    with silence_loggers():
        asked = CachedLM(model, tokenizer, batch, None)
    asked.chunk = settings.chunk
    identity = {
        **results.identity(cfg, said),
        "data": file_identity([folder / "train.jsonl", folder / "test.jsonl"], WHOLE),
        **{key: getattr(settings, key) for key in ("num_fewshot", "max_new_tokens", "chunk", "seed")},
    }
    found: dict[str, dict[str, list[float]]] = {}
    for cache in caches:
        asked.cache = cache
        texts = saved_results(
            place.folder / NAME,
            cache.name,
            {**identity, "cache": cache.identity()},
            len(task.instances),
            functools.partial(answer, asked, task),
            batch,
        )
        for name, values in scores_of(task, texts).items():
            found.setdefault(name, {})[cache.name] = values
    report = {
        "checkpoint": str(cfg.checkpoint),
        "weights": identity["weights"],
        **scores.compared(found),
        "settings": dataclasses.asdict(settings),
        "questions": len(task.instances),
        "longest_prompt": longest,
        "context": asked.max_length,
        "caches": {cache.name: cache.plain for cache in caches},
        "dtype": str(model.dtype).removeprefix("torch."),
        **said,
    }
    results.write_results(NAME, report, place, as_markdown, draw, scores.logged(report))


def answer(asked: Any, task: Any, numbers: Sequence[int]) -> list[str]:
    """Return the texts generated for the questions with these numbers."""
    with explain_batch_memory(asked.batch_size, asked.device, "GSM8K's prompts"):
        return asked.generate_until([task.instances[number] for number in numbers], disable_tqdm=True)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format exact matches by lm-eval's filter and cache."""
    settings = report["settings"]
    lines = [
        f"- percent of {report['questions']:,} questions whose final number is right; strict-match: the number after "
        "####, as in the examples; flexible-extract: the last number",
        f"- {settings['num_fewshot']} examples, at most {settings['max_new_tokens']} new tokens, prompts read "
        f"{settings['chunk']} tokens at a time; seed {settings['seed']}",
    ]
    if settings["limit"] is not None:
        lines.append(f"- **only the first {settings['limit']} questions** (benchmark.limit)")
    if report["longest_prompt"] + settings["max_new_tokens"] > report["context"]:
        told = f"prompts of up to {report['longest_prompt']:,} tokens lost their beginning"
        lines.append(f"- **{told}: the model's context is {report['context']:,}**")
    if len(report["caches"]) > 1:
        lines.append(f"- differences in points, paired by question. {UNDECIDED}")
    lines.append(results.conditions_line(report, report["dtype"]))
    return "\n".join([f"# {report['checkpoint']}", "", *scores.rows(report, "GSM8K"), "", *lines]) + "\n"


def draw(report: dict[str, Any], path: Path) -> Path:
    """Draw bars by filter and cache."""
    return scores.draw_bars(report, f"GSM8K, {report['checkpoint']}", path)
