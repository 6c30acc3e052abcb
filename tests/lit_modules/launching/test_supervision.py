"""Ranks that end by a signal, and the processes above them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning
import pytest

from lit_modules.launching import supervision
from lit_modules.launching.children import WatchingLauncher
from lit_modules.parallel.strategies import DataParallel
from tests.conftest import ROOT

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
}
RANK = """
import os, signal, sys, time
from pathlib import Path
from lit_modules.launching import supervision
supervision.fork_supervisor()
supervision.send_folder(Path(sys.argv[1]))
"""


def rank_that(does: str, folder: Path, **settings) -> subprocess.Popen:
    """Rank 1 of 2 under torchrun."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{RANK}{does}", str(folder)],
        env={**os.environ, **TORCHRUN, "PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "node2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def test_a_rank_that_is_killed_is_named_by_the_process_above_it(tmp_path):
    rank = rank_that("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    _, said = rank.communicate(timeout=60)
    assert rank.returncode == 128 + signal.SIGKILL
    assert said == (
        "palimpsest: rank 1 of 2 on node2 was killed (out of memory?); torchrun starts it again from the last "
        f"checkpoint, if it has restarts left (--max-restarts); its log is {tmp_path}/logs/rank_00001.log\n"
    )
    assert json.loads((tmp_path / "failed.json").read_text())["killed"] is True


def test_a_rank_that_ends_for_another_one_is_not_named(tmp_path):
    (tmp_path / "failed.json").write_text(
        json.dumps({"rank": 0, "world_size": 2, "host": "node1", "error": "no", "mistake": False, "log": "a"})
    )
    rank = rank_that("os.abort()", tmp_path)
    _, said = rank.communicate(timeout=60)
    assert (rank.returncode, said) == (128 + signal.SIGABRT, "")


def test_a_rank_that_ends_by_itself_ends_the_process_above_it_alike(tmp_path):
    rank = rank_that("sys.exit(75)", tmp_path)
    assert (rank.communicate(timeout=60)[1], rank.returncode) == ("", 75)


def test_signals_are_passed_on_and_a_rank_ends_with_the_process_above_it(tmp_path):
    waits = "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); print(os.getpid(), flush=True); "
    rank = rank_that(waits + "[time.sleep(0.1) for _ in range(600)]", tmp_path)
    process = int(rank.stdout.readline())
    assert process != rank.pid
    rank.terminate()
    assert rank.stdout.readline() == "told\n"
    rank.kill()
    assert rank.communicate(timeout=10) == ("", "")  # the pipes are closed: the rank below has ended, too


def test_elsewhere_no_process_is_put_above(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forks"))
    supervision.fork_supervisor()


def test_of_the_ranks_on_one_machine_the_one_that_is_killed_is_named(tmp_path, monkeypatch, capfd):
    class Ended(Exception):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    for name, value in {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "3", "SLURMD_NODENAME": "here"}.items():
        monkeypatch.setenv(name, value)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    children[1].kill()
    with pytest.raises(Ended, match="1"):
        supervision.watch_children(children, tmp_path, lambda: False)
    assert capfd.readouterr().err == (
        "palimpsest: rank 2 of 3 on here was killed (out of memory?); resume=auto goes on from the last checkpoint; "
        f"its log is {tmp_path}/logs/rank_00002.log\n"
    )
    assert children[0].wait(timeout=10) == -signal.SIGKILL


def test_ranks_that_this_process_ends_are_not_named(tmp_path, capfd):
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    time.sleep(0.1)
    supervision.watch_children([child], tmp_path, lambda: True)
    child.wait()
    assert capfd.readouterr().err == ""


def test_lightning_starts_the_ranks_through_the_launcher_that_names_them():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DataParallel(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert type(trainer.strategy.launcher) is WatchingLauncher
