import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lit_modules import runs


def begin(folder, finished=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / runs.CONFIG).write_text("seed: 0\n")
    if finished:
        runs.write_summary(folder, {"loss": 1.0})
    return folder


def test_runs_started_in_the_same_second_get_folders_of_their_own(tmp_path):
    made = [runs.new_folder(tmp_path / "demo") for _ in range(20)]
    assert len(set(made)) == 20
    assert all(folder.is_dir() for folder in made)


def test_auto_takes_the_newest_unfinished_run_of_the_experiment(tmp_path):
    begin(tmp_path / "demo" / "2026-01-01_00-00-00")
    newest = begin(tmp_path / "demo" / "2026-01-02_00-00-00")
    begin(tmp_path / "demo" / "2026-01-03_00-00-00", finished=True)
    begin(tmp_path / "other" / "2026-01-04_00-00-00")
    assert runs.run_folder(True, str(tmp_path), "demo", "auto") == str(newest)


def test_auto_starts_a_new_run_where_none_is_unfinished(tmp_path):
    begin(tmp_path / "demo" / "2026-01-03_00-00-00", finished=True)
    folder = runs.run_folder(True, str(tmp_path), "demo", "auto")
    assert os.listdir(folder) == []


def test_auto_leaves_a_run_alone_that_another_process_holds(tmp_path):
    older = begin(tmp_path / "demo" / "2026-01-01_00-00-00")
    held = begin(tmp_path / "demo" / "2026-01-02_00-00-00")
    code = "import sys, pathlib; from lit_modules import runs; held = runs.hold(pathlib.Path(sys.argv[1])); "
    code += "print(1, flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "1\n"
        assert runs.newest_unfinished(tmp_path / "demo") == older
        with pytest.raises(ValueError, match="in use by another process"):
            runs.hold(held)
    finally:
        other.communicate()
    assert runs.newest_unfinished(tmp_path / "demo") == held  # the lock died with its process


@pytest.mark.parametrize("finished", [False, True])
def test_resume_of_what_is_no_unfinished_run_is_refused(tmp_path, finished):
    folder = begin(tmp_path / "run", finished=True) if finished else tmp_path
    with pytest.raises(ValueError, match="resume="):
        runs.run_folder(True, str(tmp_path), "demo", str(folder))


def test_a_resumed_run_may_change_its_logger_but_not_its_model(tmp_path):
    began = {"model": {"hidden_size": 64}, "logger": {}, "data": {"num_workers": 0}}
    runs.record_config(tmp_path, began)
    runs.resolved_config(tmp_path, OmegaConf.create(began | {"logger": {"wandb": 1}, "data": {"num_workers": 4}}))
    with pytest.raises(ValueError, match=r"model.hidden_size=128 differs .* model.hidden_size=64"):
        runs.resolved_config(tmp_path, OmegaConf.create(began | {"model": {"hidden_size": 128}}))
    with pytest.raises(ValueError, match=r"seed=1 differs"):
        runs.resolved_config(tmp_path, OmegaConf.create(began | {"seed": 1}))
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / runs.CONFIG)) == began


def test_a_run_that_was_refused_leaves_no_folder_but_one_that_began_does(tmp_path):
    for name in ("refused", "begun"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
    begin(tmp_path / "begun")
    for name in ("refused", "begun"):
        runs.discard_unbegun(tmp_path / name)
    assert os.listdir(tmp_path) == ["begun"]


def test_a_refused_run_takes_nothing_away_that_is_not_its_own(tmp_path):
    (tmp_path / ".hydra").mkdir()
    for name in (".hydra/config.yaml", ".hydra/mine.yaml", "thesis.tex", "palimpsest.log"):
        (tmp_path / name).write_text("x")
    runs.discard_unbegun(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["mine.yaml", "thesis.tex"]


def test_a_worker_that_outlives_its_run_does_not_hold_it(tmp_path):
    folder = begin(tmp_path / "run")
    code = """
import os, pathlib, sys, time
from lit_modules import runs
held = runs.hold(pathlib.Path(sys.argv[1]))
if os.fork() == 0:
    print(1, flush=True)  # the child has let go of the run by now
    time.sleep(30)
    os._exit(0)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "1\n"
    assert runs.is_held(folder)
    parent.kill()
    parent.wait()
    assert not runs.is_held(folder)
