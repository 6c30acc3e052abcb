"""Labels: an LLM labels a sample of the documents; a small classifier learns from it and labels the rest.

`rubric` is the question, `sample` selects documents, `asking` and `store` get each answer once, `training` and
`classifier` learn from the answers, `agreement` and `report` measure their reliability, `filter` drops documents.
"""

from collections.abc import Mapping
from pathlib import Path

from common.settings import NO_VALUE, SettingError, check_number, check_whole, is_number
from data_pipeline.cleaning.duplicates import PipelineStage
from data_pipeline.labels.asking import LabelSample
from data_pipeline.labels.classifier import require_scikit_learn
from data_pipeline.labels.filter import DEFAULT, LabelFilter
from data_pipeline.labels.rubric import read_rubric
from data_pipeline.labels.sample import Sample, read_excerpt
from data_pipeline.labels.training import LEAST_LABELS, MODEL, TrainClassifier
from data_pipeline.rewriting.backends import Backend

__all__ = ["labels"]


def labels(
    folder: str,
    tasks: int,
    *,
    rubric: Mapping,
    backend: Backend,
    store: str,
    documents: int = 2000,
    excerpt: Mapping[str, int] | None = None,
    attempts: int = 3,
    held_out: float = 0.2,
    set_category: bool = False,
    thresholds: Mapping[str, float] | None = None,
    seed: int = 0,
) -> list[PipelineStage]:
    """Return the stages that give every document a quality, and drop those below a threshold.

    `backend` labels a sample of `documents` according to `rubric`. The other arguments are passed to the steps.

    Args:
        folder: holds the data that the stages exchange, and the report in `folder`/report; it starts empty.
        store: folder that keeps the answers for later corpora.

    Raises:
        ValueError: a setting cannot work; the line names the key.
    """
    require_scikit_learn()
    question, pieces = read_rubric(rubric), read_excerpt(excerpt or {})
    for key, value, least in (("documents", documents, LEAST_LABELS), ("attempts", attempts, 1)):
        check_whole(f"corpus.cleaning.labels.{key}", value, least)
    check_number("corpus.cleaning.labels.held_out", held_out, least=0.05, most=0.5)
    limits = _thresholds(thresholds, set_category, question.categories)
    label = LabelSample(folder, tasks, documents, question, backend, store, attempts, seed)
    step = LabelFilter(str(Path(folder, MODEL)), pieces, limits, set_category)
    return [
        PipelineStage("sample", [Sample(str(Path(folder, "sample")), documents, pieces)], tasks, reads=True),
        PipelineStage("label", [label], 1),
        PipelineStage("train", [TrainClassifier(folder, held_out, set_category)], 1),
        PipelineStage("filter", [step], tasks, reads=True, gives=True),
    ]


def _thresholds(given: Mapping[str, float] | None, set_category: bool, known: Mapping[str, str]) -> dict[str, float]:
    """Return the thresholds with a default of 0; raise ValueError for an invalid one."""
    for category, value in (given or {}).items():
        key = f"corpus.cleaning.labels.thresholds.{category}"
        if not is_number(value):
            raise SettingError(key, value, "give a number from 0 to 5")
        if set_category and category not in (DEFAULT, *known):
            fix = f"give one of {', '.join((DEFAULT, *known))}"
            raise SettingError(key, NO_VALUE, fix, "is not a category of the rubric")
    return {DEFAULT: 0.0, **(given or {})}
