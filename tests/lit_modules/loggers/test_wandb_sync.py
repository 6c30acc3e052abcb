"""wandb on an unreliable network: always one run, nothing lost, and only short waits."""

import csv
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lit_modules.callbacks import device_stats
from lit_modules.launching import run_folder
from lit_modules.loggers import wandb, wandb_sync
from lit_modules.loggers.wandb import Wandb, run_id
from tests.lit_modules.wandb_server import Server, serve


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, serve(patch) as server:
        yield server


@pytest.fixture
def server(running, monkeypatch) -> Iterator[Server]:
    """wandb's server, which answers; the client waits for it for two seconds at an end."""
    monkeypatch.setattr(wandb, "END_SECONDS", 2.0)
    yield running
    running.down = False
    running.silent.clear()


def part(folder: Path, *steps: int, **settings: object) -> Wandb:
    """Return a run's start and the steps that it logged."""
    logger = Wandb(folder, {"seed": 0}, **settings)
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step}, step)
    return logger


def kept(folder: Path, *steps: int) -> None:
    """A part of a run, kept offline, that is on the disk: wandb's process writes it a moment after it has ended."""
    before = len(wandb_sync.unsent_parts(folder))
    part(folder, *steps or (1,), mode="offline").close(0)
    until = time.monotonic() + 10
    while len(wandb_sync.unsent_parts(folder)) == before and time.monotonic() < until:
        time.sleep(0.05)


def sync(folder: Path | None = None, runs_dir: Path | None = None) -> None:
    wandb_sync.run(OmegaConf.create({"run": folder and str(folder), "runs_dir": str(runs_dir)}))


def test_a_server_that_goes_away_in_mid_run_holds_nothing_up_and_gets_the_rest_later(server, tmp_path, caplog, capfd):
    logger = part(tmp_path, 1, 2)
    server.down = True
    began = time.monotonic()
    for step in range(3, 200):
        logger.log_metrics({"train/loss": 1 / step}, step)
    assert time.monotonic() - began < 2, "logging does not wait for the server"
    logger.close(0)
    logger.close(1)
    assert time.monotonic() - began < 10
    assert caplog.text.count(f"`palimpsest job=sync run={tmp_path}` sends the rest") == 1
    server.down = False
    sync(tmp_path)
    assert set(server.runs[run_id(tmp_path)].column("trainer/global_step")) == set(range(1, 200))
    assert "1 of 1 parts sent" in capfd.readouterr().out
    sync(tmp_path)
    assert "nothing to send" in capfd.readouterr().out


def test_the_parts_of_a_resumed_run_become_one_run_in_the_order_in_which_they_began(server, tmp_path, capfd):
    folder = tmp_path / "fox" / "2026-01-31_12-00-00"
    kept(folder, 1, 2, 3)
    time.sleep(1.1)  # the parts' names have seconds
    kept(folder, 3, 4, 5)
    assert run_id(folder) not in server.runs
    sync(runs_dir=tmp_path)
    found = server.runs[run_id(folder)]
    assert found.column("trainer/global_step") == [1, 2, 3, 3, 4, 5]
    assert found.exit_code == 0
    assert f"2 of 2 parts sent to the wandb run {run_id(folder)}" in capfd.readouterr().out


def test_a_run_that_is_resumed_with_a_network_sends_first_what_it_kept_without_one(server, tmp_path):
    kept(tmp_path, 1, 2)
    part(tmp_path, 3, 4).close(0)
    assert server.runs[run_id(tmp_path)].column("trainer/global_step") == [1, 2, 3, 4]


def test_a_resumed_run_stays_offline_where_what_it_kept_cannot_be_sent_before_it(server, tmp_path, monkeypatch, caplog):
    kept(tmp_path, 1, 2)
    monkeypatch.setattr(wandb, "send", lambda parts: parts)
    part(tmp_path, 3).close(0)
    assert "1 earlier parts of the run could not be sent" in caplog.text
    assert run_id(tmp_path) not in server.runs
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) >= 1


def test_a_run_that_ended_as_it_should_online_is_not_sent_again(server, tmp_path, capfd):
    part(tmp_path, 1, 2).close(0)
    assert server.runs[run_id(tmp_path)].column("train/loss") == [1.0, 0.5]
    assert server.runs[run_id(tmp_path)].config["seed"] == 0
    sync(tmp_path)
    assert "nothing to send" in capfd.readouterr().out


def test_the_address_of_the_runs_page_is_kept_once_the_run_was_online(server, tmp_path):
    kept(tmp_path, 1)
    assert not (tmp_path / "wandb" / wandb_sync.RUN_URL).exists()
    part(tmp_path, 2).close(0)
    assert (tmp_path / "wandb" / wandb_sync.RUN_URL).read_text().strip().endswith(f"/runs/{run_id(tmp_path)}")


def test_a_preempted_run_is_said_to_go_on(server, tmp_path):
    part(tmp_path, 1).close(75, preempted=True)
    found = server.runs[run_id(tmp_path)]
    assert found.preempting
    assert found.exit_code == 75


def test_a_server_that_answers_but_begins_no_run_leaves_the_run_offline_with_a_line(
    server, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(wandb, "START_SECONDS", 2.0)
    server.silent.set()
    logger = part(tmp_path, 1)
    assert "wandb could not begin" in caplog.text
    assert "kept offline for `palimpsest job=sync`" in caplog.text
    logger.close(0)
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


def test_mode_online_is_not_quietly_something_else(server, tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "START_SECONDS", 2.0)
    server.silent.set()
    with pytest.raises(ValueError, match=r"logger\.wandb\.mode=online, and wandb could not begin"):
        part(tmp_path, 1, mode="online")


def test_a_wandb_that_fails_costs_one_line_and_not_the_run(server, tmp_path, caplog, monkeypatch):
    logger = part(tmp_path, 1, mode="offline")

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError("the process is gone")

    monkeypatch.setattr(logger.experiment, "log", gone)
    logger.log_metrics({"train/loss": 1.0}, 2)
    logger.log_metrics({"train/loss": 1.0}, 3)
    assert caplog.text.count("the process is gone") == 1
    logger.close(0)


def test_a_run_that_is_going_on_is_left_for_later(server, tmp_path, capfd):
    kept(tmp_path)
    with run_folder.lock_folder(tmp_path):
        sync(tmp_path)
    assert "is going on; left for later" in capfd.readouterr().out
    assert run_id(tmp_path) not in server.runs


def test_a_server_that_takes_only_a_part_leaves_the_rest_marked_as_unsent(server, tmp_path, monkeypatch, capfd):
    for name in ("a", "b"):
        kept(tmp_path / name)
    real = wandb_sync.send
    monkeypatch.setattr(wandb_sync, "send", lambda parts: real(parts[:1]) + parts[1:])
    with pytest.raises(run_folder.RunFailed, match="1 parts were not sent"):
        sync(runs_dir=tmp_path)
    monkeypatch.setattr(wandb_sync, "send", real)
    sync(runs_dir=tmp_path)
    assert run_id(tmp_path / "b") in server.runs


def test_without_a_key_or_a_network_one_line_says_so(server, tmp_path, monkeypatch):
    kept(tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("WANDB_API_KEY")
        patch.setenv("HOME", str(tmp_path))
        with pytest.raises(ValueError, match=r"no key for 127\.0\.0\.1 .*nothing was sent"):
            sync(tmp_path)
    server.down = True
    with pytest.raises(run_folder.RunFailed, match=r"does not answer .*503.*nothing was sent"):
        sync(tmp_path)
    with pytest.raises(ValueError, match=r"run=/nowhere has no wandb/run-id\.txt"):
        sync(Path("/nowhere"))
    with pytest.raises(ValueError, match=r"runs_dir=.*/none is not there"):
        sync(runs_dir=tmp_path / "none")


def test_what_was_killed_before_anything_was_written_is_not_counted_as_unsent(tmp_path):
    folder = tmp_path / "wandb" / "offline-run-20260131_120000-abc"
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(b":W&B\x00\x00\x00")
    assert wandb_sync.unsent_parts(tmp_path) == []


def test_training_goes_on_when_the_server_goes_away(server, run, command, monkeypatch, capfd):
    """Run from start to end; the server disappears after the first step."""
    real = Wandb.log_metrics

    def log_metrics(self, metrics, step=None):
        real(self, metrics, step)
        server.down = True

    monkeypatch.setattr(Wandb, "log_metrics", log_metrics)
    settings = ("max_tokens=2048", "validate_every_tokens=2048", "log_every_tokens=512", "schedule.warmup_tokens=0")
    found = run("logger=wandb", *settings)
    assert found.status == 0, found.err
    (folder,) = command.runs()
    with open(folder / "metrics.csv", newline="") as handle:
        assert [row["step"] for row in csv.DictReader(handle) if row["train/loss"]] == ["1", "2", "3", "4"]
    server.down = False
    found = run("job=sync", f"run={folder}", tiny=False)
    assert found.status == 0, found.err
    assert "1 of 1 parts sent" in found.out
    received = server.runs[run_id(folder)]
    assert received.column("train/loss")[-1] < received.column("train/loss")[0]
    assert received.config["ranks"] == {"world_size": 1, "nodes": 1, "strategy": "OneDevice", "gpu": None}
    assert received.config["hosts"]
    assert any(key.endswith("forward_seconds") for row in received.rows.values() for key in row)


def test_the_log_says_why_a_run_is_kept_offline(server, caplog):
    caplog.set_level(logging.INFO)
    server.down = True
    assert wandb.resolve_mode() == "offline"
    assert "503" in caplog.text
    assert "job=sync" in caplog.text


def test_the_environments_mode_holds_where_the_configuration_leaves_it_open(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    part(tmp_path, 1).close(0)
    assert run_id(tmp_path) not in server.runs
    assert list(tmp_path.glob("wandb/*run-2*")) == []


def test_the_ranks_settings_name_the_strategy_and_the_world():
    strategy = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
    found = device_stats.describe_ranks(SimpleNamespace(world_size=16, num_nodes=2, strategy=strategy))
    assert found == {"world_size": 16, "nodes": 2, "strategy": "SimpleNamespace", "gpu": None}
