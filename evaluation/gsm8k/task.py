"""lm-eval's task gsm8k on a local copy of the data."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import Task
from transformers.cache_utils import Cache

from common.settings import SettingError
from evaluation.caches import NamedCache
from evaluation.harness.copies import DataCopies
from evaluation.harness.model import CheckpointLM
from evaluation.harness.tasks import silence_loggers

SPLITS = ("train", "test")


class GradeSchoolMath(DataCopies):
    """The splits of GSM8K from one folder, whatever lm-eval calls the data set."""

    def folders(self, path: str, name: str | None) -> list[Path]:
        """Return the folder."""
        assert self.folder is not None
        return [self.folder]


class CachedLM(CheckpointLM):
    """A checkpoint that answers lm-eval's requests through a cache.

    Attributes:
        cache: the kind of cache.
        chunk: tokens of a prompt that pass through the model at a time.
    """

    cache: NamedCache
    chunk: int

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
        cache: Cache = self.cache.new(self.model)
        return super()._model_generate(
            context, max_length, stop, past_key_values=cache, prefill_chunk_size=self.chunk, **settings
        )


def check_copy(folder: Path) -> None:
    """Check that the folder has the data.

    Raises:
        SettingError: it has not; the line says where they are to be had.
    """
    missing = [f"{split}.jsonl" for split in SPLITS if not (folder / f"{split}.jsonl").is_file()]
    if missing:
        fix = "they are in grade_school_math/data of the repository github.com/openai/grade-school-math"
        raise SettingError("benchmark.folder", folder, fix, f"has no {' and no '.join(missing)}")


def load_task(folder: Path, num_fewshot: int, max_new_tokens: int, seed: int, limit: int | None) -> Task:
    """Return the task with its requests: lm-eval's prompts, examples drawn from the train split, and its filters.

    Args:
        limit: the first so many questions; None: all.

    Raises:
        ValueError: the data cannot be read, or have too few examples.
    """
    own = Path(lm_eval.tasks.__file__).parent / "gsm8k"
    with silence_loggers(), GradeSchoolMath(folder).in_place(), contextlib.redirect_stderr(io.StringIO()):
        manager = lm_eval.tasks.TaskManager(include_path=str(own), include_defaults=False)
        task = manager.load(["gsm8k"])["tasks"]["gsm8k"]
        there = len(list(task.fewshot_docs()))
        if num_fewshot > there:
            raise SettingError("benchmark.num_fewshot", num_fewshot, f"give at most {there}, there are no more")
        task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_config(key="generation_kwargs", value={"max_gen_toks": max_new_tokens}, update=True)
        task.set_fewshot_seed(seed)
        task.build_all_requests(limit=limit)
    return task


def scores_of(task: Task, texts: Sequence[str]) -> dict[str, list[float]]:
    """Return for each of lm-eval's filters whether the number that it finds in each generated text is the answer."""
    for request, text in zip(task.instances, texts, strict=True):
        request.resps = [text]
    task.apply_filters()
    return {
        name: [
            float(task.process_results(request.doc, [request.filtered_resps[name]])["exact_match"])
            for request in task.instances
        ]
        for name in task.instances[0].filtered_resps
    }
