"""The start of a run: what a requeued job resumes from."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from common.atomic_files import write_atomic
from lit_modules.launching import consistency, run_folder, start
from lit_modules.launching.process import ProcessInfo

HERE = ProcessInfo(job="slurm 12.batch")


@pytest.fixture
def started(monkeypatch):
    def become(here: ProcessInfo) -> None:
        monkeypatch.setattr(start, "this_process", lambda: here)
        monkeypatch.setattr(consistency, "this_process", lambda: here)

    return become


@pytest.fixture
def cfg():
    return OmegaConf.create(
        {"dry_run": False, "resume": None, "trainer": {"devices": 1, "num_nodes": 1, "accelerator": "cpu"}}
    )


def test_a_requeued_start_goes_on_in_its_folder_and_another_start_has_its_own(started, cfg, tmp_path):
    started(HERE)
    first = start.run_folder(True, str(tmp_path), "demo", None)
    assert start.prepare_rank(cfg, run_folder.Path(first))
    started(replace(HERE, job="slurm 13.batch"))
    other = start.run_folder(True, str(tmp_path), "demo", None)
    assert start.prepare_rank(cfg, run_folder.Path(other))
    assert other != first
    started(replace(HERE, attempt=1))
    assert start.run_folder(True, str(tmp_path), "demo", None) == first
    assert start.run_folder(True, str(tmp_path), "demo", "auto") == first
    started(replace(HERE, job="slurm 14.batch", attempt=1))
    assert start.run_folder(True, str(tmp_path), "demo", None) not in (first, other)


def test_a_requeued_run_that_has_finished_has_nothing_left_to_do(started, cfg, tmp_path):
    started(replace(HERE, attempt=1))
    assert start.prepare_rank(cfg, tmp_path)
    run_folder.write_summary(tmp_path, {"loss": 1.0})
    assert not start.prepare_rank(cfg, tmp_path)


def test_a_folder_where_nothing_can_be_written_is_one_line(started, tmp_path):
    started(HERE)
    write_atomic(tmp_path / "a-file", "")
    with pytest.raises(ValueError, match=r"^runs_dir=.*a-file/demo cannot be written \(Not a directory\)"):
        start.run_folder(True, str(tmp_path / "a-file"), "demo", None)


def test_a_dry_run_without_a_launcher_is_refused(started, cfg, tmp_path):
    started(HERE)
    cfg.dry_run = True
    with pytest.raises(ValueError, match=r"dry_run=true .*: give -m hydra/launcher=slurm as well"):
        start.prepare_rank(cfg, tmp_path)


def test_only_the_first_rank_writes_hydras_files(started, tmp_path):
    started(HERE)
    assert start.hydra_folder(True, str(tmp_path)) == ".hydra"
    started(replace(HERE, rank=1, world_size=2))
    assert start.hydra_folder(True, str(tmp_path)) is None


def test_a_run_on_processors_asks_slurm_for_no_gpus():
    assert start.gpus_per_node("cpu", 4) is None
    assert start.gpus_per_node("auto", 4) == 4
