"""Reading a checkpoint does not execute code in it."""

import pickle
import shutil

import pytest
import torch

from lit_modules import checkpoints
from lit_modules.parallel.strategies import OneDevice
from tests.lit_modules.checkpoints import training

pytestmark = pytest.mark.core


class Foreign:
    """Unpickled, it writes a file."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    training.train(folder, OneDevice("cpu"), 2, every=2)
    return folder / "checkpoints" / "step_00000002"


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / trained.name)


def test_a_metadata_file_with_a_foreign_pickle_is_refused_and_not_run(copy, tmp_path):
    (copy / ".metadata").write_bytes(pickle.dumps(Foreign(tmp_path / "written")))
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of a checkpoint: it names io\.open"):
        checkpoints.read_unsharded_weights(copy)
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata"):
        training.train(tmp_path / "run", OneDevice("cpu"), resume=copy)
    assert not (tmp_path / "written").exists()


def test_a_metadata_file_that_hides_bytes_among_the_tensors_is_refused(copy):
    """Torch would unpickle these without any care."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    (copy / ".metadata").write_bytes(pickle.dumps(Metadata({"weights.a": BytesStorageMetadata()})))
    with pytest.raises(ValueError, match=r"names .*BytesStorageMetadata"):
        checkpoints.read_unsharded_weights(copy)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_a_metadata_file_that_is_something_else_is_named(copy, content):
    (copy / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of a checkpoint"):
        checkpoints.read_unsharded_weights(copy)


def test_a_trainer_file_with_a_foreign_pickle_is_refused_and_not_run(copy, tmp_path):
    torch.save({"state": Foreign(tmp_path / "written")}, copy / "trainer.pt")
    with pytest.raises(ValueError, match=r"trainer\.pt cannot be read"):
        checkpoints.read_trainer_state(copy)
    assert not (tmp_path / "written").exists()


def test_a_missing_shard_is_one_line(copy):
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"cannot be read by rank 0: .*__0_0\.distcp") as caught:
        checkpoints.read_unsharded_weights(copy)
    assert "\n" not in str(caught.value)


def test_the_folder_does_not_know_where_it_was_written(trained):
    files = [file for file in trained.iterdir() if str(trained.parent).encode() in file.read_bytes()]
    assert files == []
