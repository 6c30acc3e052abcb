"""Checked settings of a corpus: sources, cleaning, and output."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from datatrove.pipeline.base import PipelineStep

from common.settings import NO_VALUE, SettingError, check_number, check_whole, under
from data_pipeline.cleaning.duplicates import PipelineStage
from data_pipeline.sources.parts import SourceInParts

Cleaning: TypeAlias = PipelineStep | Callable[..., list[PipelineStage]]
CATEGORY = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Recipe:
    """Settings of a corpus.

    `cleaning`: in order, steps (consecutive ones share a pipeline) and functions `(folder, tasks) ->
    list[PipelineStage]`. `categories`: overrides the category of a source's documents. `tasks`: number of pieces of
    every phase's work, each run by one process. `validation_fraction`: share of the documents, by a hash of their raw
    text. `most_skipped`: largest share of a source's records to skip before the job stops. `samples`: kept and dropped
    documents that the card shows for each step.
    """

    output: str
    sources: dict[str, SourceInParts]
    cleaning: dict[str, Cleaning]
    categories: dict[str, str]
    tasks: int
    validation_fraction: float
    samples: int
    bytes_per_token: float
    most_skipped: float
    strict: bool


def read_recipe(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe for a configuration's `corpus`, given in plain containers.

    Raises:
        ValueError: a setting is missing or wrong; the line names the key.
    """
    for key, least in (("tasks", 1), ("samples", 0)):
        check_whole(f"corpus.{key}", settings[key], least)
    check_number("corpus.validation_fraction", settings["validation_fraction"], above=0, below=1)
    check_number("corpus.most_skipped", settings["most_skipped"], above=0, most=1)
    check_number("corpus.bytes_per_token", settings["bytes_per_token"], above=0)
    sources = {name: source for name, source in (settings.get("sources") or {}).items() if source is not None}
    if not sources:
        fix = "add one, as in +source@corpus.sources.commands=commands"
        raise SettingError("corpus.sources", NO_VALUE, fix, "is empty")
    made = {}
    for name, source in sources.items():
        with under(f"corpus.sources.{name}"):
            made[name] = _instantiated(source)
        if not isinstance(made[name], SourceInParts):
            kind = type(made[name]).__name__
            raise SettingError(f"corpus.sources.{name}", kind, "give a SourceInParts", "has no parts")
    categories = dict(settings.get("categories") or {})
    for name, category in categories.items():
        if name not in sources:
            raise SettingError(
                f"corpus.categories.{name}", NO_VALUE, f"give one of {', '.join(sources)}", "is not a source"
            )
        if not CATEGORY.fullmatch(str(category)):
            raise SettingError(f"corpus.categories.{name}", category, "give a word of a-z, 0-9, _ . -")
    cleaning = {name: step for name, step in (settings.get("cleaning") or {}).items() if step is not None}
    return Recipe(
        output=str(settings["output"]),
        sources=made,
        cleaning={name: _cleaning(name, step) for name, step in cleaning.items()},
        categories=categories,
        tasks=settings["tasks"],
        validation_fraction=float(settings["validation_fraction"]),
        samples=settings["samples"],
        bytes_per_token=float(settings["bytes_per_token"]),
        most_skipped=settings["most_skipped"],
        strict=bool(settings["strict"]),
    )


def _cleaning(name: str, settings: Mapping[str, Any]) -> Cleaning:
    with under(f"corpus.cleaning.{name}.backend"):  # steps give whole keys, and a backend of job=rewrite its own
        return _instantiated(settings)


def _instantiated(settings: Mapping[str, Any]) -> Any:
    """Return the object; raise the class's own error, without Hydra's wrapper."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(settings, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise
