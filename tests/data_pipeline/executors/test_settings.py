"""The executors as named on the command line, and errors before anything runs."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from data_pipeline.executors import Local, Ray, Slurm
from tests.conftest import ROOT
from tests.data_pipeline.executors.steps import phase


def composed(name: str, *overrides: str) -> object:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return instantiate(compose(f"executor/{name}", overrides=list(overrides)).executor)


def test_each_executor_is_a_word_on_the_command_line() -> None:
    local, ray = composed("local", "executor.workers=3"), composed("ray")
    slurm = composed("slurm", "executor.partition=cpu", "executor.time=1:00:00", "executor.sbatch_args={account: us}")
    assert (type(local), type(ray), type(slurm)) == (Local, Ray, Slurm)
    assert local.workers == 3
    assert slurm.settings["time"] == "1:00:00"
    assert slurm.settings["sbatch_args"] == {"kill-on-invalid-dep": "yes", "account": "us"}


def test_a_cluster_is_described_once_in_the_local_folder(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "slurm.yaml").write_text("partition: big\nsbatch_args: {account: us}\n")
    (tmp_path / "local" / "ray.yaml").write_text("address: head:6379\n")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    slurm = composed("slurm", search)
    assert slurm.settings["partition"] == "big"
    assert slurm.settings["sbatch_args"]["account"] == "us"
    assert composed("slurm", search, "executor.partition=small").settings["partition"] == "small"
    assert composed("ray", search).address == "head:6379"
    assert composed("local", search)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": None, "time": "1:00:00"}, r"^executor\.partition: give the SLURM partition"),
        ({"partition": "cpu", "time": 86400}, r"^executor\.time=86400: give it in quotes"),
        ({"partition": "cpu", "time": "1:00:00", "workers": 0}, r"^executor\.workers=0: give a number at least 1"),
        (
            {"partition": "cpu", "time": "1:00:00", "mem_per_cpu_gb": 0},
            r"^executor\.mem_per_cpu_gb=0: give a number",
        ),
    ],
)
def test_settings_that_no_cluster_could_take_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Slurm(**settings)


def test_a_machine_without_slurm_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^executor=slurm: there is no sbatch on this machine: .* executor=local$"):
        Slurm("cpu", "1:00:00").run([phase(tmp_path / "traces", "read")], tmp_path / "logs")


def test_a_folder_whose_jobs_cannot_be_asked_after_is_warned_of(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "submitted.json").write_text(json.dumps({"jobs": [{"phase": "a", "job": "1", "tasks": 1}]}))
    assert Local(1).run([phase(tmp_path / "traces", "read")], tmp_path / "logs")
    assert "there is no squeue to see whether they run" in caplog.text


@pytest.mark.parametrize("given", ["settings", "environment"])
def test_an_address_where_nothing_listens_is_one_line(tmp_path: Path, monkeypatch, given: str) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    executor = Ray(address="127.0.0.1:1" if given == "settings" else None)
    with pytest.raises(ValueError, match=r"^executor\.address=127\.0\.0\.1:1: no Ray cluster answers there \("):
        executor.run([], tmp_path / "logs")
