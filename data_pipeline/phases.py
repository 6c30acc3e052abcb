"""Phases: datatrove pipelines that run one after the other, each split into tasks."""

from dataclasses import dataclass

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
