"""Phases of a recipe."""

from dataclasses import dataclass, field
from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from data_pipeline.cleaning.duplicates import PipelineStage
from data_pipeline.cleaning.record import Recorded
from data_pipeline.corpus.finish import Finish
from data_pipeline.corpus.layout import Layout
from data_pipeline.corpus.reading import PrepareSources, ReadSources
from data_pipeline.corpus.recipe import Recipe
from data_pipeline.corpus.storing import StoredDocuments, StoreDocuments, WriteCorpus
from data_pipeline.executors.phases import Phase
from data_pipeline.executors.timed_step import TimedStep


@dataclass
class _Plan:
    """Phases so far, and the steps of the pipeline being built."""

    recipe: Recipe
    layout: Layout
    phases: list[Phase] = field(default_factory=list)
    name: str = "read"
    flowing: list[PipelineStep] = field(default_factory=list)
    recorded: int = 0  # number of recorded steps
    stored: int = 0  # how often the documents have been written to disk

    def close(self, steps: list[PipelineStep]) -> None:
        """Finish the pipeline with `steps`."""
        self.add(self.name, [*self.flowing, *steps], self.recipe.tasks)
        self.flowing = []

    def add(self, name: str, steps: list[PipelineStep], tasks: int) -> None:
        """Add a whole phase, with a timer around each step."""
        timed = [step if isinstance(step, Recorded) else TimedStep(step) for step in steps]
        self.phases.append(Phase(name, timed, tasks))

    def record(self, step: PipelineStep, name: str) -> Recorded:
        self.recorded += 1
        return Recorded(step, str(self.layout.record), name, self.recorded, self.recipe.samples)

    def place(self) -> str:
        return str(self.layout.work / "documents" / f"{self.stored:02d}")


def phases(recipe: Recipe) -> list[Phase]:
    """Return the phases of a recipe, in order.

    Documents stream from step to step. They are written to disk only if a step needs several pipelines, and then by
    the pipeline that reads them for its first stage: each text is read, parsed and cleaned once.
    """
    layout = Layout(Path(recipe.output))
    places = str(layout.work / "sources"), str(layout.problems)
    plan = _Plan(recipe, layout)
    plan.add("prepare", [PrepareSources(recipe, *places)], len(recipe.sources))
    plan.flowing = [ReadSources(recipe, *places)]
    for name, cleaning in recipe.cleaning.items():
        if isinstance(cleaning, PipelineStep):
            plan.flowing.append(plan.record(cleaning, name))
        else:
            _add_stages(plan, name, cleaning(folder=str(layout.work / name), tasks=recipe.tasks))
    plan.close([WriteCorpus(str(layout.work / "corpus"))])
    plan.add("finish", [Finish(recipe, layout)], 1)
    return plan.phases


def _add_stages(plan: _Plan, name: str, stages: list[PipelineStage]) -> None:
    for stage in stages:
        if not stage.reads:
            plan.add(f"{name}-{stage.name}", stage.steps, stage.tasks)
            continue
        if plan.flowing:
            plan.stored += 1
            plan.flowing.append(StoreDocuments(plan.place()))
        else:
            plan.name, plan.flowing = f"{name}-{stage.name}", [StoredDocuments(plan.place())]
        if stage.gives:
            *before, last = stage.steps
            plan.flowing += [*before, plan.record(last, name)]
        else:
            plan.close(stage.steps)
