"""The tuner of a few rows' products: candidates fit, wrong ones are not timed, and today's tiles come back."""

import pytest
import torch

from benchmarks.linearization import tune_small_batch_linear as tuner
from kernels.small_batch_linear import triton_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", tuner.SHAPES)
def test_candidates_fit_the_shared_memory(name):
    shape = tuner.SHAPES[name]
    found = tuner.candidates(shape, 32)
    assert 20 < len(found) <= len(tuner.CANDIDATES)
    for tiles in found:
        rows = tiles.outputs * (1 + shape.gated) + 32
        assert 2 * tiles.inputs * rows * (tiles.stages - 1) <= triton_linear.SHARED_BYTES


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(tuner, "SHAPES", {"small": tuner.Shape(16, 64, norm=True, gated=True)})
    monkeypatch.setattr(tuner, "compile_at_once", lambda function: None)
    monkeypatch.setattr(tuner, "replay_seconds", lambda calls: [call() for call in calls] and 2e-6)
    before = triton_linear._tiles
    right = tuner.small_batch_linear

    def wrong(x, weight, **options):
        return right(x, weight, **options) * (2 if triton_linear._tiles(16, 16, 64, True, 2)[0] == 64 else 1)

    monkeypatch.setattr(tuner, "small_batch_linear", wrong)
    tuner.tune("small", 3, CPU)
    out = capsys.readouterr().out
    assert "outputs=64, inputs=64, stages=3, warps=2): off by 1.0e+00" in out
    timed = out.partition("small, 3 rows:\n")[2].splitlines()
    assert len(timed) == 7
    assert all("outputs=64" not in line for line in timed)
    assert timed[-2].endswith("GB/s  as today")
    assert timed[-1].endswith("GB/s  torch's operations")
    assert triton_linear._tiles is before
