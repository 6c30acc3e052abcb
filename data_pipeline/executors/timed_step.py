"""Steps with a clock: what each takes of a core, without the steps before and after it.

datatrove's own clocks tell no such thing: some run while a step waits for its documents, some while later steps work on
what it gives, and many steps have none.
"""

import time
from collections.abc import Iterable, Iterator

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

PROCESSOR_SECONDS = "processor_seconds"  # the statistic of a step, a value a task


class Clock:
    """The seconds of processor time that an iterator takes to give its items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the items, and count."""
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


class Clocked(PipelineStep):
    """A step of datatrove's or ours, which leaves its processor time among its statistics."""

    def __init__(self, step: PipelineStep) -> None:
        super().__init__()
        self.step, self.type, self.name = step, step.type, step.name
        self.stats = step.stats

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Run the step."""
        waited, passed = Clock(), Clock()
        arriving = None if data is None else waited.measured(data)
        yield from passed.measured(_run(self.step, arriving, rank, world_size))
        self.stat_update(PROCESSOR_SECONDS, value=passed.seconds - waited.seconds, unit="task")


def _run(step: PipelineStep, data: DocumentsPipeline, rank: int, world_size: int) -> Iterator[Document]:
    """Run a step when the first document is asked for: one that gives none does all its work when it is called."""
    yield from step.run(data, rank, world_size) or ()
