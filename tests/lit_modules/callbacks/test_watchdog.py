"""Ranks that hang, stop, fail or are killed are named, and the others end; slow operations are not interrupted."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning
import pytest
import torch

from common.settings import SettingError, shown
from lit_modules.callbacks.rank_progress import RankProgress, describe_silent_ranks, furthest_behind
from lit_modules.callbacks.watchdog import LONG_ACTION_FACTOR, Watchdog
from lit_modules.launching import restarts
from lit_modules.launching.process import ProcessInfo
from tests.conftest import ROOT

CASES = ("hangs", "stopped", "killed", "fails", "leader killed", "leader stopped", "slow")


@pytest.fixture(scope="module")
def lost(tmp_path_factory) -> Path:
    """All cases of tests/lit_modules/callbacks/lost_ranks.py, a folder each."""
    folder = tmp_path_factory.mktemp("lost")
    subprocess.run(
        [sys.executable, "-m", "tests.lit_modules.callbacks.lost_ranks", folder, *CASES],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=200,
    )
    return folder


@pytest.mark.parametrize(
    ("case", "rank", "said", "statuses"),
    [
        ("hangs", 1, "hangs: waits for data since step 2, for ", {"0": 1, "1": 1}),
        ("stopped", 1, "no longer answers: killed, out of memory, stopped, or its node is down", {"0": 1, "1": -9}),
        ("killed", 1, "no longer answers: killed, out of memory, stopped, or its node is down", {"0": 1, "1": -9}),
        ("fails", 1, "ArithmeticError: no mean of no tokens", {"0": 1, "1": 1}),
        ("leader killed", 0, "no longer answers: killed, ", {"0": -9, "1": 1}),
        ("leader stopped", 0, "no longer answers: killed, ", {"0": -9, "1": 1}),
    ],
)
def test_a_rank_that_is_lost_is_named_once_and_the_other_ends(lost: Path, case, rank, said, statuses) -> None:
    folder = lost / case
    ended = json.loads((folder / "ended.json").read_text())
    assert {name: ended[name] for name in ("0", "1") if name in ended} == statuses
    lines = [line for line in (folder / "out").read_text(errors="replace").splitlines() if "palimpsest:" in line]
    assert len(lines) == 1, lines
    assert f"rank {rank} of 2 on " in lines[0]
    assert f" failed first: {said}" in lines[0]
    assert ("resume=auto goes on" in lines[0]) == (case != "fails")
    found = json.loads((folder / "failed.json").read_text())
    assert found["rank"] == rank
    assert found["log"].endswith("palimpsest.log" if rank == 0 else "rank_00001.log")


def test_ranks_that_wait_for_a_slow_one_let_it_be(lost: Path) -> None:
    ended = json.loads((lost / "slow" / "ended.json").read_text())
    assert (ended["0"], ended["1"]) == (0, 0), (lost / "slow" / "out").read_text()
    assert not (lost / "slow" / "failed.json").exists()


def test_a_rank_that_hangs_leaves_the_stack_of_what_it_hangs_in_and_those_that_wait_theirs(lost: Path) -> None:
    hangs = (lost / "hangs" / "logs" / "rank_00001.log").read_text()
    assert "this rank: waits for data since step 2" in hangs
    assert "in lose" in hangs
    assert "the others wait for it (backward pass)" in (lost / "hangs" / "palimpsest.log").read_text()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch):
    """A watchdog of one second in a training of this process, whose verdict does not end it."""
    verdicts: list[list] = []

    class Kept(Watchdog):
        def end_process(self, verdict: str) -> None:
            verdicts.append(json.loads(verdict))

    class Network(lightning.LightningModule):
        def __init__(self, seconds: dict[int, float]) -> None:
            super().__init__()
            self.seconds, self.layer = seconds, torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx: int) -> torch.Tensor:
            time.sleep(self.seconds.get(batch_idx, 0.0))
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    def fit(seconds: dict[int, float], **settings) -> list[list]:
        kept = Kept(1.0)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=4,
            callbacks=[kept],
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        before = trainer.profiler
        trainer.fit(Network(seconds), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
        assert trainer.profiler is before
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")]
        return verdicts

    return fit


def test_a_single_process_that_hangs_says_what_it_was_doing(watched) -> None:
    ((place, words),) = watched({2: 1.9})
    assert place["rank"] == 0
    assert words.startswith("hangs: forward pass since step 2, for 1 s")


def test_the_first_step_may_take_longer_than_the_others(watched) -> None:
    assert LONG_ACTION_FACTOR * 1.0 > 2.0
    assert watched({0: 2.0}) == []


def test_a_profiler_of_the_users_goes_on_seeing_everything(watched) -> None:
    from lightning.pytorch.profilers import SimpleProfiler

    described = []

    class Profiler(SimpleProfiler):
        def describe(self) -> None:
            described.append(len(self.recorded_durations["run_training_batch"]))

    watched({}, profiler=Profiler())
    assert described == [4]


def test_the_ranks_furthest_behind_are_named_with_their_gpus() -> None:
    ahead = RankProgress(0, "node1", 0, count=9, doing="backward pass")
    behind = [RankProgress(rank, "node2", rank - 4, count=8, step=117, doing="waits for data") for rank in range(5, 12)]
    culprit, words = furthest_behind([ahead, *behind], 600.4)
    assert culprit.rank == 5
    assert words == (
        "hangs (GPU 1): waits for data since step 117, for 600 s (so with rank 6 on node2 (GPU 2), rank 7 on node2 "
        "(GPU 3), rank 8 on node2 (GPU 4), rank 9 on node2 (GPU 5) and 2 more); the others wait for it (backward pass)"
    )


def test_ranks_that_no_longer_answer_are_all_named() -> None:
    words = describe_silent_ranks(
        [RankProgress(2, "node2", None, step=3, doing="validates"), RankProgress(3, "node2", None)]
    )
    assert words.endswith("its node is down (so with rank 3 on node2); last seen: validates since step 3")


@pytest.mark.parametrize("seconds", [0, -1, "soon", True])
def test_a_time_that_is_none_is_refused_by_name(seconds) -> None:
    with pytest.raises(SettingError, match=rf"^callbacks\.watchdog\.seconds={shown(seconds)}: give a number above 0"):
        Watchdog(seconds)


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)


def test_a_run_restarts_three_times_without_a_new_checkpoint_and_no_more(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    again = ProcessInfo(attempt=1)
    assert [restarts.count_restart(tmp_path, again) for _ in range(3)] == [1, 2, 3]
    assert restarts.restart(tmp_path, again).startswith("stopped after 3 restarts without a new checkpoint")
    checkpoint(tmp_path, 8)
    assert restarts.restart(tmp_path, again) == "resume=auto goes on from the last checkpoint"
    assert restarts.count_restart(tmp_path, again) == 1


def test_a_person_who_starts_the_run_begins_the_count_anew(tmp_path: Path) -> None:
    for _ in range(3):
        restarts.count_restart(tmp_path, ProcessInfo(attempt=2))
    assert restarts.count_restart(tmp_path, ProcessInfo()) == 0
    assert restarts.count_restart(tmp_path, ProcessInfo(attempt=1)) == 1


def test_a_start_after_too_many_ends_in_one_line(run, command, monkeypatch) -> None:
    monkeypatch.setattr(restarts, "count_restart", lambda folder, here: restarts.MAX_RESTARTS + 1)
    found = run()
    assert found.status == 1
    assert "stopped after 3 restarts without a new checkpoint" in found.err
    assert len(found.err.splitlines()) == 1


def test_one_rank_of_an_attempt_asks_for_the_restart(tmp_path: Path) -> None:
    assert restarts.is_first_to_ask(tmp_path)
    assert not restarts.is_first_to_ask(tmp_path)
    restarts.count_restart(tmp_path, ProcessInfo())
    assert restarts.is_first_to_ask(tmp_path)
