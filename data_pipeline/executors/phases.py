"""Phases: datatrove pipelines that run in sequence, each split into tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from datatrove.pipeline.base import PipelineStep


@dataclass(frozen=True)
class Phase:
    """A pipeline of `tasks` tasks; all of them finish before the next phase starts.

    `steps` is a whole datatrove pipeline. Phases exchange data only through files, so that an executor may run them in
    other processes or on other machines.
    """

    name: str
    steps: list[PipelineStep]
    tasks: int


class Executor(Protocol):
    """Interface of the executors in `data_pipeline.executors`."""

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Run the unfinished tasks of the phases; return True if all have finished, False if they were submitted."""
