import os

import pytest

from common.atomic_files import write_atomic


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_atomic(path, "first")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["table.csv"]
