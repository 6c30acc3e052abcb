"""SLURM cluster shared by all tests of a session."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, cluster, missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A cluster of two nodes with two CPUs each, which commands of this process speak to, too."""
    if missing():
        pytest.skip(f"SLURM is not installed here (no {missing()}): apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # shorter than pytest's: a socket's path has a limit
    try:
        with cluster(folder) as running, pytest.MonkeyPatch.context() as patch:
            for name in ("SLURM_CONF", "PATH"):
                patch.setenv(name, running.environment[name])
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)
