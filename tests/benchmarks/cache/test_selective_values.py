"""The benchmark of selected values on sizes for a CPU, with its kernels in Triton's interpreter."""

import sys

import pytest
import torch

from benchmarks.cache import selective_values

HEADS = {"few": (4, 1, 2)}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the benchmark; return its page."""
    monkeypatch.setattr(selective_values, "HEADS", HEADS)
    monkeypatch.setattr(selective_values, "copy_rate", lambda device: 1000.0)
    sizes = ["--batches", "1", "2", "--lengths", "70", "--top-values", "9"]
    monkeypatch.setattr(sys, "argv", ["selective_values", "--output", str(tmp_path), *sizes])

    def call() -> str:
        selective_values.main()
        return (tmp_path / "selective_values.md").read_text()

    return call


def test_the_page_has_times_bytes_and_errors_of_each_size(run):
    lines = [line for line in run().splitlines() if line.startswith("| few")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[1:3] for row in rows] == [["1", "70"], ["2", "70"]]
    for row in rows:
        all_values, selected, ratio = map(float, row[3:6])
        assert ratio == pytest.approx(selected / all_values, abs=0.01)
        # 70 keys, and 9 of each of 4 query heads in place of 70 of each of 2 value heads.
        assert float(row[6]) == pytest.approx((70 + 36) / (70 + 140), abs=0.01)
        assert 0 < float(row[13]) < 0.02
        assert 0 < float(row[14]) < 0.02


def test_a_kernel_that_is_wrong_is_not_timed(run, monkeypatch):
    monkeypatch.setattr(selective_values, "selective_attention", lambda q, k, v, top: torch.zeros_like(q))
    with pytest.raises(RuntimeError, match=r"selective attention: relative error 1\.0e\+00"):
        run()
