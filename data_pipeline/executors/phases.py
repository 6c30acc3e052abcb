"""Phases: datatrove pipelines that run one after the other, each split into tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from datatrove.pipeline.base import PipelineStep


@dataclass(frozen=True)
class Phase:
    """A pipeline of `tasks` tasks; all of them end before the next phase begins.

    `steps`: a whole datatrove pipeline. Phases tell each other what they found through files alone, so that an executor
    may run them in other processes or on other machines.
    """

    name: str
    steps: list[PipelineStep]
    tasks: int


class Executor(Protocol):
    """What runs phases: `data_pipeline.executors` has those there are."""

    def run(self, phases: list[Phase], logs: Path, place: str | None = None) -> bool:
        """Run what of the phases has not ended yet; return whether all have ended, or are submitted to end later."""
