"""A wheel, built from the sdist, is the whole command: it runs in any folder, with the user's own settings there."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT

PACKAGES = ("common", "data_pipeline", "evaluation", "kernels", "lit_modules")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, folder: Path) -> Path:
    """Call the build backend as pip and build do; it writes into `source`."""
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the files that the wheel installs into site-packages."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    for name in ("LICENSE", "README.md", "palimpsest.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in ("conf", *PACKAGES):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "local"))
    (source / "conf" / "local").mkdir()
    (source / "conf" / "local" / "launcher.yaml").write_text("account: mine\n")
    with tarfile.open(build("build_sdist", source, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(build("build_wheel", unpacked, folder)) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def files(folder: Path) -> set[Path]:
    """All that is read from a folder, below it."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc"))
    return {path.relative_to(folder) for path in found}


def test_every_module_and_every_setting_is_installed_and_nothing_of_this_machines_own(installed):
    for package in PACKAGES:
        assert files(installed / package) == files(ROOT / package)
    settings = {path for path in files(ROOT / "conf") if path.parts[0] != "local"}
    assert files(installed / "palimpsest_conf") == settings
    assert not (installed / "conf").exists()


def test_the_command_runs_in_any_folder_with_the_settings_there(installed, tmp_path):
    own = tmp_path / "conf"
    for name, text in (("experiment/mine", "defaults:\n  - demo\nmax_tokens: 77\n"), ("local/default", "seed: 5\n")):
        (own / name).parent.mkdir(parents=True)
        (own / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    command = [sys.executable, "-m", "palimpsest", "experiment=mine", "--cfg", "job"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    cfg = OmegaConf.create(found.stdout)
    assert (cfg.max_tokens, cfg.seed, cfg.runs_dir, cfg.model.hidden_size) == (77, 5, "runs", 128)
    assert sorted(tmp_path.iterdir()) == [own]
