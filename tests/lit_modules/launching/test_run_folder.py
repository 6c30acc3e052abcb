import os
import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lit_modules.launching import run_folder
from tests.conftest import ROOT


def begin(folder, finished=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run_folder.CONFIG).write_text("seed: 0\n")
    if finished:
        run_folder.write_summary(folder, {"loss": 1.0})
    return folder


def test_runs_started_in_the_same_second_get_folders_of_their_own(tmp_path):
    made = [run_folder.new_folder(tmp_path / "demo") for _ in range(20)]
    assert len(set(made)) == 20
    assert all(folder.is_dir() for folder in made)


def test_auto_takes_the_newest_unfinished_run_of_the_experiment(tmp_path):
    begin(tmp_path / "demo" / "2026-01-01_00-00-00")
    newest = begin(tmp_path / "demo" / "2026-01-02_00-00-00")
    begin(tmp_path / "demo" / "2026-01-03_00-00-00", finished=True)
    begin(tmp_path / "other" / "2026-01-04_00-00-00")
    assert run_folder.choose_run_folder(True, str(tmp_path), "demo", "auto") == str(newest)


def test_auto_starts_a_new_run_where_none_is_unfinished(tmp_path):
    begin(tmp_path / "demo" / "2026-01-03_00-00-00", finished=True)
    folder = run_folder.choose_run_folder(True, str(tmp_path), "demo", "auto")
    assert os.listdir(folder) == []


def test_auto_leaves_a_run_alone_that_another_process_holds(tmp_path):
    older = begin(tmp_path / "demo" / "2026-01-01_00-00-00")
    held = begin(tmp_path / "demo" / "2026-01-02_00-00-00")
    code = "import sys, pathlib; from lit_modules.launching import run_folder; "
    code += "held = run_folder.lock_folder(pathlib.Path(sys.argv[1])); "
    code += "print(1, flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "1\n"
        assert run_folder.newest_unfinished(tmp_path / "demo") == older
        with pytest.raises(ValueError, match="in use by another process"):
            run_folder.lock_folder(held)
    finally:
        other.communicate()
    assert run_folder.newest_unfinished(tmp_path / "demo") == held  # the lock died with its process


@pytest.mark.parametrize("finished", [False, True])
def test_resume_of_what_is_no_unfinished_run_is_refused(tmp_path, finished):
    folder = begin(tmp_path / "run", finished=True) if finished else tmp_path
    with pytest.raises(ValueError, match="resume="):
        run_folder.choose_run_folder(True, str(tmp_path), "demo", str(folder))


def test_a_resumed_run_may_change_its_logger_but_not_its_model(tmp_path):
    began = {"model": {"hidden_size": 64}, "logger": {}, "data": {"num_workers": 0, "source": {"path": "here"}}}
    with run_folder.write_initial_config(tmp_path, began):
        pass
    run_folder.resolved_config(
        tmp_path, OmegaConf.create(began | {"logger": {"wandb": 1}, "data": {**began["data"], "num_workers": 4}})
    )
    moved = {"num_workers": 0, "source": {"path": "elsewhere"}, "full_hash": False, "most_skipped": 0.5}
    run_folder.resolved_config(tmp_path, OmegaConf.create(began | {"data": moved}))  # two keys of a later version
    with pytest.raises(ValueError, match=r"data.full_hash=true differs"):
        run_folder.resolved_config(tmp_path, OmegaConf.create(began | {"data": moved | {"full_hash": True}}))
    with pytest.raises(ValueError, match=r"model.hidden_size=128 differs .* model.hidden_size=64"):
        run_folder.resolved_config(tmp_path, OmegaConf.create(began | {"model": {"hidden_size": 128}}))
    with pytest.raises(ValueError, match=r"seed=1 differs"):
        run_folder.resolved_config(tmp_path, OmegaConf.create(began | {"seed": 1}))
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / run_folder.CONFIG)) == began


def test_a_run_of_an_earlier_version_is_resumed_though_its_classes_have_moved(tmp_path):
    began = {"data": {"_target_": "data_pipeline.datamodule.TextData", "block_length": 64}}
    with run_folder.write_initial_config(tmp_path, began):
        pass
    now = {"data": {"_target_": "data_pipeline.tokens.datamodule.TextData", "block_length": 64}}
    assert run_folder.resolved_config(tmp_path, OmegaConf.create(now)) == now


def test_a_new_run_can_be_resumed_unless_it_is_refused(tmp_path):
    config = tmp_path / run_folder.CONFIG
    with pytest.raises(KeyboardInterrupt), run_folder.write_initial_config(tmp_path, {"seed": 1}):
        raise KeyboardInterrupt
    assert run_folder.choose_run_folder(True, str(tmp_path), "demo", str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="refused"), run_folder.write_initial_config(tmp_path, {"seed": 2}):
        raise ValueError("refused")
    assert OmegaConf.load(config).seed == 1, "of the run that is resumed"
    config.unlink()
    with pytest.raises(ValueError, match="refused"), run_folder.write_initial_config(tmp_path, {"seed": 2}):
        raise ValueError("refused")
    assert not config.exists()


def test_a_run_that_was_refused_leaves_no_folder_but_one_that_began_does(tmp_path):
    for name in ("refused", "begun"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
    begin(tmp_path / "begun")
    for name in ("refused", "begun"):
        run_folder.discard_unstarted(tmp_path / name)
    assert os.listdir(tmp_path) == ["begun"]


def test_a_refused_run_takes_nothing_away_that_is_not_its_own(tmp_path):
    (tmp_path / ".hydra").mkdir()
    for name in (".hydra/config.yaml", ".hydra/mine.yaml", "thesis.tex", "palimpsest.log"):
        (tmp_path / name).write_text("x")
    run_folder.discard_unstarted(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["mine.yaml", "thesis.tex"]


def test_a_worker_that_outlives_its_run_does_not_hold_it(tmp_path):
    folder = begin(tmp_path / "run")
    code = """
import os, pathlib, sys, time
from lit_modules.launching import run_folder
from tests.conftest import ROOT
held = run_folder.lock_folder(pathlib.Path(sys.argv[1]))
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
    assert run_folder.is_locked(folder)
    parent.kill()
    parent.wait()
    assert not run_folder.is_locked(folder)


def test_a_sweep_is_resumed_in_its_folder_and_a_run_as_a_sweep_of_one(tmp_path):
    parent = tmp_path / "demo"
    sweep, alone = parent / "2026-01-31_12-00-00", parent / "2026-01-31_11-00-00"
    for run in (sweep / "0", sweep / "10", sweep / "2", alone):
        run.mkdir(parents=True)
        (run / run_folder.CONFIG).touch()
    (sweep / "0" / run_folder.SUMMARY).touch()
    assert run_folder.newest_unfinished(parent) == sweep / "2"
    assert run_folder.choose_run_folder(True, str(tmp_path), "demo", "auto") == str(sweep / "2")
    for resume in ("auto", str(sweep)):
        assert run_folder.choose_sweep_folder(str(tmp_path), "demo", resume) == str(sweep)
    assert [run_folder.sweep_run(str(sweep), number) for number in (0, 1)] == ["0", "1"]
    for run in (alone, sweep / "2"):
        assert run_folder.choose_sweep_folder(str(tmp_path), "demo", str(run)) == str(run)
        assert run_folder.sweep_run(str(run), 0) == "."
        with pytest.raises(ValueError, match=r"is one run, and this sweep \(-m\) has several"):
            run_folder.sweep_run(str(run), 1)
    for number in ("2", "10"):
        (sweep / number / run_folder.SUMMARY).touch()
    assert run_folder.choose_sweep_folder(str(tmp_path), "demo", "auto") == str(alone)
    with pytest.raises(ValueError, match=r"^resume=.* has finished: it has a summary\.json"):
        run_folder.choose_sweep_folder(str(tmp_path), "demo", str(sweep))
    with pytest.raises(ValueError, match=r"is not the folder of a run or of a sweep: give one below"):
        run_folder.choose_sweep_folder(str(tmp_path), "demo", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"is not a run's folder: .* \(that is a sweep's: give one of its runs, or -m\)"
    ):
        run_folder.choose_run_folder(True, str(tmp_path), "demo", str(sweep))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked source, not a git checkout")
def test_a_run_names_the_commit_of_the_checkout_that_runs():
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert run_folder.code_commit().removesuffix("-dirty") == head.strip()


def test_the_page_lists_the_settings_that_a_resume_may_change():
    page = (run_folder.ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    table = page[page.index("These settings may change at a resume") :]
    listed = set(re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert listed == {*run_folder.CHANGEABLE_KEYS} - {"resume"}
