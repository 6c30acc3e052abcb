"""Measure each step's own CPU time, excluding upstream and downstream steps.

datatrove's timers do not: some run while a step waits for its documents, some while later steps process its output, and
many steps have none.
"""

import time
from collections.abc import Iterable, Iterator

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

PROCESSOR_SECONDS = "processor_seconds"  # statistic of a step, one value per task


class StepTimer:
    """CPU seconds that an iterator takes to produce its items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the items, and add up the time."""
        iterator = iter(documents)
        while True:
            start = time.process_time()
            try:
                document = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += time.process_time() - start
            yield document


class TimedStep(PipelineStep):
    """Wrapper of a step that adds its CPU time to its statistics."""

    def __init__(self, step: PipelineStep) -> None:
        super().__init__()
        self.step, self.type, self.name = step, step.type, step.name
        self.stats = step.stats

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Run the step."""
        waited, passed = StepTimer(), StepTimer()
        arriving = None if data is None else waited.measured(data)
        yield from passed.measured(_run(self.step, arriving, rank, world_size))
        self.stat_update(PROCESSOR_SECONDS, value=passed.seconds - waited.seconds, unit="task")


def _run(step: PipelineStep, data: DocumentsPipeline, rank: int, world_size: int) -> Iterator[Document]:
    """Run a step lazily: a step without output does all its work when called, so defer it to the first `next`."""
    yield from step.run(data, rank, world_size) or ()
