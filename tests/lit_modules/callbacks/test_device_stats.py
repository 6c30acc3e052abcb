"""Statistics of devices, and of a rank that the others wait for."""

import json
import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_modules.callbacks import device_stats
from lit_modules.callbacks.device_stats import Device, DeviceStats, RankTimer
from lit_modules.loggers.csv import MetricsCsv
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    """What rank 0 finds beside a rank 1 that computes slowly, reads slowly, is as quick as itself, or comes late."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = subprocess.run(
        [sys.executable, "-m", "tests.lit_modules.callbacks.straggling", str(port)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SLURMD_NODENAME": "node7"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert found.returncode == 0, found.stderr
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def test_a_rank_that_computes_slowly_is_named_though_every_rank_takes_as_long_for_a_step(two_ranks):
    found = two_ranks["computing"]
    assert found["metrics"]["straggler/slowest_rank"] == 1
    assert 2.0 < found["metrics"]["straggler/slowdown"] < 3.5, "30 ms in each block, where rank 0 takes 10"
    assert len(found["lines"]) == 1, "it is named once, not at each report"
    assert "rank 1 (node7, rank1: cpu) is slow: a micro-batch costs it" in found["lines"][0]
    assert found["step_seconds"] > 0.05, "rank 0, which waits, is no quicker"
    assert found["metrics"]["system/node7/rank0_forward_seconds"] < 0.04


def test_a_rank_that_waits_for_its_data_is_named_and_the_wait_told(two_ranks):
    found = two_ranks["reading"]
    assert found["metrics"]["straggler/slowest_rank"] == 1
    assert found["metrics"]["straggler/slowdown"] > 1.5
    assert found["metrics"]["straggler/longest_data_seconds"] == pytest.approx(0.1, rel=0.5)
    assert "0.1" in found["lines"][0].split(" s of waiting for data")[0]


def test_the_wait_for_another_ranks_part_of_the_weights_is_not_a_ranks_own_time(two_ranks):
    found = two_ranks["sharded"]
    assert found["step_seconds"] > 0.09, "rank 1 comes 0.1 s late each time, and rank 0 waits for it"
    assert found["forward_seconds"] < 0.05


def test_wandbs_settings_name_the_device_of_each_rank_by_host(two_ranks):
    assert two_ranks["even"]["settings"] == {"hosts": {"node7": ["cpu", "cpu"]}}


def reading(**told: float) -> dict[str, float]:
    return {name: told.get(name, math.nan) for name in (*device_stats.GPU, *device_stats.HOST, *device_stats.TIMES)}


def test_each_gpu_and_host_has_its_own_metrics_and_what_is_not_told_has_none():
    places = [Device("a", "gpu0", "H200"), Device("a", "gpu1", "H200"), Device("b", "gpu0", "H200")]
    found = [
        reading(utilization=90, memory_gib=80, cpu_percent=11),
        reading(utilization=70, cpu_percent=11),
        reading(temperature=60, cpu_percent=50),
    ]
    assert device_stats.host_metrics(places, found) == {
        "system/a/gpu0_utilization": 90,
        "system/a/gpu0_memory_gib": 80,
        "system/a/gpu1_utilization": 70,
        "system/a/cpu_percent": 11,
        "system/b/gpu0_temperature": 60,
        "system/b/cpu_percent": 50,
    }
    assert device_stats.summarize(found) == {"system/gpu_utilization_lowest": 70, "system/gpu_temperature_highest": 60}


def test_the_slowdown_is_over_the_median_rank_and_of_two_ranks_over_the_faster():
    def slowdown(*seconds: float) -> tuple[int, float]:
        found = device_stats.summarize([reading(forward_seconds=s, data_seconds=0.0) for s in seconds])
        return found["straggler/slowest_rank"], found["straggler/slowdown"]

    assert slowdown(1.0, 1.0, 1.5, 1.0) == (2, 1.5)
    assert slowdown(2.0, 1.0) == (0, 2.0)
    assert device_stats.summarize([reading(forward_seconds=1.0)]) == {}, "one rank waits for nobody"
    assert device_stats.summarize([reading(forward_seconds=1.0), reading()]) == {}, "not yet timed"


def test_the_first_step_is_not_timed_and_later_ones_are_sampled():
    block = torch.nn.Linear(2, 2)
    pace = RankTimer([block], torch.device("cpu"), every=3)
    for _ in range(8):
        pace.start_batch()
        block(torch.ones(2))
        pace.end_forward()
        block(torch.ones(2))  # as when it is recomputed in the backward pass
        pace.start_wait(ends_step=True)
    assert len(pace.timed) == 2, "of 8 micro-batches the fourth and the seventh"
    assert all(len(marks) == 2 for marks in pace.timed)
    forward, waited = pace.take_times()
    assert 0 < forward < 1
    assert 0 < waited < 1
    pace.remove_hooks()
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_a_validation_or_a_checkpoint_between_two_batches_is_no_wait_for_data(monkeypatch):
    clock = iter((0.0, 0.5, 10.0, 90.0, 100.0, 100.25))
    monkeypatch.setattr(device_stats, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pace = RankTimer([], torch.device("cpu"), every=100)
    pace.start_wait(ends_step=False)  # 0.0
    pace.start_batch()  # 0.5
    pace.start_wait(ends_step=False)  # 10.0
    pace.cancel_wait()
    pace.start_batch()
    next(clock)
    pace.start_wait(ends_step=False)  # 100.0
    pace.start_batch()  # 100.25
    assert pace.take_times()[1] == pytest.approx((0.5 + 0.25) / 2)


def test_the_table_has_the_summary_and_not_a_column_for_each_gpu_of_the_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(device_stats, "read_gpu", lambda device: [55.0, 100.0, 40.0, 600.0])
    table, other = MetricsCsv(tmp_path), MetricsCsv(tmp_path / "other")
    other_logger = SimpleNamespace(log_metrics=other.log_metrics)
    other.path.parent.mkdir()
    trainer = SimpleNamespace(world_size=1, is_global_zero=True, global_step=4, loggers=[table, other_logger])
    callback = DeviceStats(every_tokens=4)
    callback.rank_devices = [Device("a", "gpu0", "H200")]
    callback.timer = RankTimer([], torch.device("cpu"), every=1)
    callback.report(trainer, SimpleNamespace(device=torch.device("cpu")))
    assert table.columns == [
        "step",
        "system/gpu_utilization_lowest",
        "system/gpu_temperature_highest",
        "system/gpu_power_total",
    ]
    assert {"system/a/gpu0_power", "system/gpu_power_total"} <= set(other.columns)


def test_a_gpu_without_nvidias_library_tells_its_memory_alone(monkeypatch):
    def missing(*_: Any) -> float:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    for name in ("utilization", "temperature", "power_draw"):
        monkeypatch.setattr(torch.cuda, name, missing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * 2**30, 4 * 2**30))
    found = device_stats.read_gpu(torch.device("cuda", 0))
    assert found[1] == 3.0
    assert [math.isnan(value) for value in found] == [True, False, True, True]
