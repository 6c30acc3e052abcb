"""Phases on a Ray cluster of one node behave as on one machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.executors import Ray
from tests.data_pipeline.executors.steps import phase, times


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


pytestmark = pytest.mark.usefixtures("_cluster")


def executor() -> Ray:
    return Ray(mem_per_cpu_gb=0.25)


def test_all_tasks_of_a_phase_end_before_the_next_begins(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", name, tasks=3, seconds=0.1) for name in ("read", "write")]
    assert executor().run(phases, tmp_path / "logs")
    ended = [times(tmp_path / "traces", "read", task)["ended"][0] for task in range(3)]
    began = [times(tmp_path / "traces", "write", task)["began"][0] for task in range(3)]
    assert max(ended) <= min(began)


def test_no_more_tasks_run_at_a_time_than_there_are_workers(tmp_path: Path) -> None:
    Ray(workers=1, mem_per_cpu_gb=0.25).run([phase(tmp_path / "traces", "read", seconds=0.3)], tmp_path / "logs")
    first, second = sorted(
        (times(tmp_path / "traces", "read", task) for task in range(2)), key=lambda task: task["began"]
    )
    assert first["ended"][0] <= second["began"][0]


def test_a_mistake_comes_in_its_own_words_and_the_next_run_goes_on(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", tasks=3, fail=(1,), how="mistake")]
    with pytest.raises(ValueError, match=r"^corpus\.sources\.papers\.metadata=nowhere\.jsonl: no such file; give one$"):
        executor().run(phases, tmp_path / "logs")
    (tmp_path / "traces" / "mended").touch()
    assert executor().run(phases, tmp_path / "logs")
    assert all(times(tmp_path / "traces", "read", task)["ended"] for task in range(3))
    assert len(times(tmp_path / "traces", "read", 1)["began"]) == 2


def test_a_full_disk_is_one_line_that_names_the_setting(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", fail=(1,), how="full_disk")]
    with pytest.raises(ValueError, match=r"^corpus\.output=corpora/x: the disk is full at part\.parquet: free some"):
        executor().run(phases, tmp_path / "logs", "corpus.output=corpora/x")


def test_a_task_that_is_killed_each_time_ends_the_run_in_one_line(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", fail=(1,), how="killed")]
    with pytest.raises(ValueError, match=r"^executor\.mem_per_cpu_gb: task 1 of phase read was lost 4 times") as raised:
        executor().run(phases, tmp_path / "logs")
    assert "\n" not in str(raised.value)
    assert len(times(tmp_path / "traces", "read", 1)["began"]) == 4


def test_a_task_too_large_for_every_node_is_said(tmp_path: Path, caplog) -> None:
    Ray(cpus_per_task=64).run([], tmp_path / "logs")
    assert "no node of the Ray cluster has room for a task now (64 CPUs and 128.0 GB" in caplog.text
