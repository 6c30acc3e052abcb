import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter

from data_pipeline.card.history import rates
from data_pipeline.card.rates import read_rates
from data_pipeline.cleaning.record import Recorded
from data_pipeline.executors.timed_step import PROCESSOR_SECONDS, TimedStep
from tests.data_pipeline.card.conftest import step

SLOW, DOCUMENTS = 0.005, 20


class Numbers(PipelineStep):
    """Reads documents quickly, without a clock."""

    type, name = "READER", "numbers"

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        yield from (Document(f"text {number}", str(number)) for number in range(rank, DOCUMENTS, world_size))


class SlowFilter(BaseFilter):
    """Keeps everything, slowly."""

    name = "quality"

    def filter(self, doc: Document) -> bool:
        work(SLOW)
        return True


class Signatures(PipelineStep):
    """Reads all documents when called, and yields none."""

    type, name = "🫂 - DEDUP", "🎯 MinHash stage 1"

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        with self.track_time():
            for _ in data:
                work(SLOW / 10)


class Waiting(BaseFilter):
    """Keeps everything after waiting."""

    name = "waiting"

    def filter(self, doc: Document) -> bool:
        time.sleep(0.1)
        return True


def work(seconds: float) -> None:
    """Keep the CPU busy."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def write_resources(folder: Path, **tasks: float) -> None:
    (folder / "resources").mkdir(parents=True)
    for number, seconds in enumerate(tasks.values()):
        content = {"peak_rss_bytes": 100_000_000 * (number + 1), "seconds": 2 * seconds, "processor_seconds": seconds}
        (folder / "resources" / f"{number:05d}.json").write_text(json.dumps(content))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Return the logs of two datatrove tasks."""
    folder = tmp_path / "logs" / "01-read"
    steps = [TimedStep(Numbers()), Recorded(SlowFilter(), str(tmp_path / "record"), "quality"), TimedStep(Signatures())]
    LocalPipelineExecutor(steps, tasks=2, workers=1, logging_dir=str(folder)).run()
    return tmp_path / "logs"


def test_a_step_has_neither_the_time_of_those_before_it_nor_of_those_after_it(logs: Path) -> None:
    [phase] = read_rates(logs, [], 1000)
    assert [rate.name for rate in phase.steps] == ["numbers", "quality", "MinHash stage 1"]
    numbers, slow, signatures = (rate.seconds for rate in phase.steps)
    assert slow > DOCUMENTS * SLOW
    assert DOCUMENTS * SLOW / 10 < signatures < slow / 2
    assert numbers < slow / 2


def test_waiting_is_no_work() -> None:
    waiting = TimedStep(Waiting())
    assert len(list(waiting.run(iter([Document("text", "0")])))) == 1
    assert waiting.stats.stats[PROCESSOR_SECONDS].total < 0.05


def test_a_recorded_step_has_the_bytes_of_its_record(logs: Path) -> None:
    recorded = [step("quality", (20, 4_000_000), (10, 1_000_000), {})]
    [phase] = read_rates(logs, recorded, 9)
    _, quality, after = phase.steps
    assert quality.bytes == 4_000_000
    assert after.bytes == 1_000_000  # what is left reaches the step after it
    assert phase.bytes == 4_000_000


def test_phases_have_the_seconds_of_their_tasks_and_the_memory_of_the_largest(logs: Path) -> None:
    write_resources(logs / "01-read", first=3.0, second=5.0)
    [phase] = read_rates(logs, [], 16_000_000)
    assert (phase.name, phase.tasks, phase.seconds, phase.peak_memory) == ("read", 2, 8.0, 200_000_000)
    table = rates([phase])
    assert "| **read**, 2 tasks | 8.0 | 16.0 | 2.00 | 100% | 200.0 MB |" in table
    assert "– between the steps" in table


def test_seconds_of_some_tasks_are_not_those_of_the_phase(logs: Path) -> None:
    write_resources(logs / "01-read", first=3.0)
    [phase] = read_rates(logs, [], 16_000_000)
    assert phase.seconds is None
    assert "| **read**, 2 tasks |  | 16.0 |  |  | 100.0 MB |" in rates([phase])


def test_a_phase_that_has_not_ended_and_no_logs_are_left_out(logs: Path) -> None:
    (logs / "02-finish" / "logs").mkdir(parents=True)
    assert [phase.name for phase in read_rates(logs, [], 1)] == ["read"]
    assert read_rates(logs / "none", [], 1) == []
