"""The settings of a corpus, checked: sources, cleaning, and where it goes."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datatrove.pipeline.base import PipelineStep

from common.settings import check_share, check_whole
from data_pipeline.cleaning.duplicates import Stage
from data_pipeline.sources.parts import SourceInParts

Cleaning = PipelineStep | Callable[..., list[Stage]]
CATEGORY = re.compile(r"\w[\w.-]*")
SOURCE_KEY = re.compile(r"\b(?:data\.)?source\.")


@dataclass(frozen=True)
class Recipe:
    """What a corpus is made of.

    `cleaning`: in their order, steps (one pipeline passes a document through those that follow each other) and
    functions `(folder, tasks) -> list[Stage]`. `categories`: of a source's documents, in place of what the source says.
    `tasks`: pieces that the work of every phase is cut into, each read by one process. `validation_fraction`: of the
    documents, by a hash of their raw text. `most_skipped`: of a source's records, before the job stops. `samples`:
    documents kept and dropped that the card shows for each step.
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
    """Return the recipe that `corpus` of a configuration describes, in plain containers.

    Raises ValueError, naming the key, for a setting that is missing or wrong.
    """
    for key, least in (("tasks", 1), ("samples", 0)):
        check_whole(f"corpus.{key}", settings[key], least)
    if not 0 < settings["validation_fraction"] < 1:
        raise ValueError(
            f"corpus.validation_fraction={settings['validation_fraction']}: give a fraction between 0 and 1"
        )
    check_share("corpus.most_skipped", settings["most_skipped"])
    if settings["bytes_per_token"] <= 0:
        raise ValueError(f"corpus.bytes_per_token={settings['bytes_per_token']}: give a positive number; 4 is usual")
    sources = {name: source for name, source in (settings.get("sources") or {}).items() if source is not None}
    if not sources:
        raise ValueError("corpus.sources is empty: add one, as in +source@corpus.sources.commands=commands")
    made = {}
    for name, source in sources.items():
        with named(name):
            made[name] = _instantiated(source)
        if not isinstance(made[name], SourceInParts):
            raise ValueError(
                f"corpus.sources.{name}: {type(made[name]).__name__} is no source that can be read in parts"
            )
    categories = dict(settings.get("categories") or {})
    for name, category in categories.items():
        if name not in sources:
            raise ValueError(f"corpus.categories.{name}: no such source; there are {', '.join(sources)}")
        if not CATEGORY.fullmatch(str(category)):
            raise ValueError(f"corpus.categories.{name}={category}: give a plain word")
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
    try:
        return _instantiated(settings)
    except ValueError as error:  # of a step that asks a model by a backend of job=rewrite
        raise ValueError(str(error).replace("rewrite.backend", f"corpus.cleaning.{name}.backend")) from error


def _instantiated(settings: Mapping[str, Any]) -> Any:
    """Return the object. Raises what its class raises, not Hydra's words around it."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(settings, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


@contextlib.contextmanager
def named(source: str) -> Iterator[None]:
    """Name a source's settings, in what it raises, as they stand in the recipe."""
    try:
        yield
    except ValueError as error:
        whole = SOURCE_KEY.sub(f"corpus.sources.{source}.", str(error))
        if whole == str(error):
            raise
        raise ValueError(whole) from error
