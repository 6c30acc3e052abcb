import errno
import os

import pytest

from data_pipeline.rewriting.journal import Journal


def written(path, count):
    journal = Journal(path)
    for number in range(count):
        journal.append({"n": number, "text": "é \ud800 \n" * number})
    journal.close()
    return path.read_bytes()


def test_records_come_back_as_they_were(tmp_path):
    written(tmp_path / "j", 5)
    assert [r["n"] for r in Journal(tmp_path / "j").read()] == [0, 1, 2, 3, 4]
    assert list(Journal(tmp_path / "j").read())[2]["text"] == "é \ud800 \n" * 2
    assert list(Journal(tmp_path / "none").read()) == []


def test_a_torn_end_is_cut_off_wherever_it_was_torn(tmp_path):
    whole = written(tmp_path / "j", 3)
    starts = [0, *(n + 1 for n, byte in enumerate(whole) if byte == 10)]
    for length in range(len(whole)):
        (tmp_path / "j").write_bytes(whole[:length])
        journal = Journal(tmp_path / "j")
        complete = sum(start <= length for start in starts[1:])
        assert [r["n"] for r in journal.read()] == list(range(complete))
        assert (tmp_path / "j").read_bytes() == whole[: starts[complete]]
        journal.append({"n": 9})
        journal.close()
        assert [r["n"] for r in Journal(tmp_path / "j").read()] == [*range(complete), 9]


def test_a_record_that_changed_on_the_disk_is_passed_over_with_a_warning(tmp_path, caplog):
    whole = bytearray(written(tmp_path / "j", 3))
    whole[whole.index(b'"n":1') + 4] ^= 1
    (tmp_path / "j").write_bytes(whole)
    assert [r["n"] for r in Journal(tmp_path / "j").read()] == [0, 2]
    assert "broken record" in caplog.text
    assert (tmp_path / "j").read_bytes() == whole


def test_a_write_that_fails_half_way_leaves_no_half(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j")
    journal.append({"n": 0})
    before, real = (tmp_path / "j").read_bytes(), os.write
    calls = []

    def half(handle, data):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:5])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        journal.append({"n": 1})
    assert (tmp_path / "j").read_bytes() == before
