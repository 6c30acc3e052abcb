"""Completeness of checkpoints, and handling of incomplete ones."""

import json
import os
import shutil

import pytest

from lit_modules import checkpoints
from lit_modules.checkpoints import folders
from lit_modules.parallel.strategies import OneDevice
from tests.lit_modules.checkpoints import training


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A `checkpoints/` with steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    training.train(folder, OneDevice("cpu"), 4, every=2)
    return folder / "checkpoints"


@pytest.fixture
def written(trained, tmp_path):
    """Copy it, for a test to damage."""
    return shutil.copytree(trained, tmp_path / "checkpoints", symlinks=True)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def test_the_newest_checkpoint_is_found(written, tmp_path):
    assert checkpoints.newest_intact(written) == written / "step_00000004"
    assert checkpoints.newest_intact(tmp_path / "none") is None
    assert checkpoints.newest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "damaged"])
def test_each_file_that_is_harmed_is_named_and_the_checkpoint_before_is_taken(written, caplog, name, harm):
    path = written / "step_00000004" / name
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        flip(path, 0.5)
    assert checkpoints.newest_intact(written) == written / "step_00000002"
    (line,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert line.endswith(": trying the checkpoint before it")
    if (name, harm) != ("manifest.json", "damaged"):  # which may blame the file that it tells of
        assert line.startswith(f"{path} is ")
        assert harm in line


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.7, 0.999])
def test_a_flipped_bit_anywhere_in_the_tensors_is_noticed(written, place):
    flip(written / "step_00000004" / "__0_0.distcp", place)
    assert "does not match its checksum" in checkpoints.find_damage(written / "step_00000004")


def test_a_manifest_cannot_name_files_outside(written):
    path = written / "step_00000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(manifest))
    assert checkpoints.find_damage(path.parent) == "manifest.json is not of format 1"


def test_when_every_checkpoint_is_damaged_the_run_is_not_started_from_nothing(written):
    for _, path in checkpoints.step_folders(written):
        (path / "trainer.pt").unlink()
    with pytest.raises(ValueError, match="no undamaged checkpoint"):
        checkpoints.newest_intact(written)


def test_the_best_is_a_relative_link_that_is_replaced_at_once(written, monkeypatch, tmp_path):
    for step in (2, 4):
        folders.link_best(written / f"step_0000000{step}")
        assert os.readlink(written / "best") == f"step_0000000{step}"
    moved = shutil.move(written, tmp_path / "moved")
    assert checkpoints.is_checkpoint(moved / "best")
    assert checkpoints.read_trainer_state(moved / "best")["global_step"] == 4


def test_the_newest_and_the_best_are_kept_and_what_a_resume_has_passed_over_is_left(tmp_path):
    for step in (1, 2, 3, 4, 9):
        (tmp_path / f"step_{step:08d}").mkdir()
    folders.link_best(tmp_path / "step_00000002")
    folders.remove_older(tmp_path, 1, 4)
    assert [step for step, _ in checkpoints.step_folders(tmp_path)] == [2, 4, 9]
    assert sorted(os.listdir(tmp_path)) == ["best", "step_00000002", "step_00000004", "step_00000009"]
