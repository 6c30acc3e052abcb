"""The map between a covariance of data and one of those who read them: what defines it, and that no other is better."""

import pytest
import torch

from lit_modules.networks.caches.balanced import balanced_transform
from lit_modules.networks.caches.rotations import covariance_rotation, hadamard


def covariance(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4 * size, size, generator=generator, dtype=torch.float64)
    rows = rows * torch.linspace(0.1, 3, size) @ torch.linalg.qr(rows[:size]).Q
    return rows.mT @ rows / len(rows)


def loss(metric: torch.Tensor, data: torch.Tensor, matrix: torch.Tensor) -> float:
    """What errors of the size of the mapped data, alike in all channels, count after they are mapped back."""
    matrix = matrix.double()
    inverse = torch.linalg.inv(matrix)
    return ((matrix.mT @ data @ matrix).trace() * (inverse @ metric @ inverse.mT).trace()).item()


@pytest.mark.parametrize("size", [1, 8, 24, 64, 80, 128])
def test_data_and_readers_have_the_same_covariance_in_it_and_every_channel_holds_as_much(size):
    metric, data = covariance(size, 0), covariance(size, 1)
    matrix, inverse, mean = balanced_transform(metric, data)
    assert mean is None
    matrix, inverse = matrix.double(), inverse.double()
    assert torch.allclose(matrix.mT @ inverse, torch.eye(size, dtype=torch.float64), atol=1e-4)
    of_data, of_readers = matrix.mT @ data @ matrix, inverse.mT @ metric @ inverse
    assert torch.allclose(of_data / of_data.trace(), of_readers / of_readers.trace(), atol=1e-5)
    assert torch.allclose(of_data.trace(), data.trace(), rtol=1e-5)
    if size in (8, 64, 128):
        assert torch.allclose(of_data.diagonal(), of_data.diagonal().mean(), rtol=1e-4)


@pytest.mark.parametrize("size", [1, 8, 24, 64])
def test_unspread_its_channels_are_apart_and_in_the_order_of_what_they_hold(size):
    metric, data = covariance(size, 0), covariance(size, 1)
    spread_out = balanced_transform(metric, data, torch.zeros(2, size))
    matrix, inverse, mean = spread_out.unspread()
    assert mean is spread_out.mean
    matrix, inverse = matrix.double(), inverse.double()
    assert torch.allclose(matrix.mT @ inverse, torch.eye(size, dtype=torch.float64), atol=1e-4)
    held = matrix.mT @ data @ matrix
    assert torch.allclose(held, torch.diag(held.diagonal()), atol=1e-4 * held.max())
    assert (held.diagonal().diff() <= 1e-4 * held.max()).all()
    read = inverse.mT @ metric @ inverse
    assert torch.allclose(held / held.trace(), read / read.trace(), atol=1e-4)


def test_no_other_matrix_loses_less():
    metric, data = covariance(16, 2), covariance(16, 3)
    best = loss(metric, data, balanced_transform(metric, data).matrix)
    generator = torch.Generator().manual_seed(0)
    others = [torch.eye(16), hadamard(16), covariance_rotation(metric)]
    found = balanced_transform(metric, data).matrix
    others += [found + 0.05 * found.abs().mean() * torch.randn(16, 16, generator=generator) for _ in range(200)]
    assert min(loss(metric, data, other) for other in others) > best * (1 - 1e-6)
    assert best < 0.8 * loss(metric, data, covariance_rotation(metric))


def test_it_depends_on_no_scale_and_is_the_same_again():
    metric, data = covariance(24, 4), covariance(24, 5)
    first, again, scaled = (balanced_transform(*x) for x in ((metric, data), (metric, data), (1e6 * metric, data)))
    assert first.matrix.equal(again.matrix)
    assert torch.allclose(first.matrix, scaled.matrix, atol=1e-5)


def test_data_that_do_not_vary_and_readers_that_do_not_read_have_a_map():
    row, zero, one = torch.randn(1, 16), torch.zeros(16, 16), torch.eye(16)
    for metric, data in ((row.mT @ row, one), (one, row.mT @ row), (zero, one), (one, zero), (zero, zero)):
        matrix, inverse, _ = balanced_transform(metric, data)
        assert (matrix.mT.double() @ inverse.double() - one).abs().max() < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    one = torch.eye(4)
    for arguments in ((value * one, one), (one, value * one), (one, one, torch.full((2, 4), value))):
        with pytest.raises(ValueError, match="not finite"):
            balanced_transform(*arguments)
