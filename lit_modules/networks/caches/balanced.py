"""The invertible map that leaves the smallest error of what is read when data are rounded to few bits."""

import torch
from torch import Tensor

from lit_modules.networks.caches.rotations import Transform, covariance_rotation

FLOOR = 1e-6
"""Least eigenvalue of a covariance, of its largest: directions without data or readers have a finite scale."""


def balanced_transform(metric: Tensor, covariance: Tensor, mean: Tensor | None = None) -> Transform:
    """Return a map for data x of a covariance C whose errors e count as `e M e^T`, both `[D, D]`.

    Rounding `x A` to groups with a scale each leaves an error whose size follows that of `x A`, and which is about the
    same in all channels once a Hadamard matrix has spread them. Undone, it counts as `tr(A^T C A) tr(A^-1 M A^-T)`. Of
    all invertible A those with `A A^T = P` are best whose P solves `P C P = M`: the geometric mean of M and `C^-1`,
    `M^(1/2) (M^(-1/2) C^-1 M^(-1/2))^(1/2) M^(1/2)` (Bhatia, Positive Definite Matrices, 2007, chapter 4). In them
    `A^T C A` and `A^-1 M A^-T` are the same up to a factor and a rotation, which control theory calls balanced (Moore
    1981). An orthogonal A cannot make directions smaller that hold much and are read little.

    The symmetric root of P is followed by `covariance_rotation`, and scaled so that mapped data are as large as before,
    because scales are float16.

    Args:
        metric: M, symmetric and positive; for keys the covariance of the queries.
        covariance: C, about `mean` if it is given, else about 0.
        mean: `[H, D]`, of each head, taken from the data before they are mapped; None: nothing is.

    Raises:
        ValueError: there are numbers that are not finite.
    """
    if not all(x is None or x.isfinite().all() for x in (metric, covariance, mean)):
        raise ValueError("a covariance has numbers that are not finite")
    m, c = _regular(metric), _regular(covariance)
    half, inverse_half = _power(m, 0.5), _power(m, -0.5)
    root = _power(half @ _power(inverse_half @ _power(c, -1) @ inverse_half, 0.5) @ half, 0.5)
    mapped = root @ c @ root
    matrix = (c.trace() / mapped.trace()).sqrt() * root @ covariance_rotation(mapped).double()
    inverse = torch.linalg.inv(matrix).mT
    return Transform(matrix.float(), inverse.float().contiguous(), None if mean is None else mean.float().cpu())


def _regular(covariance: Tensor) -> Tensor:
    """Return a covariance with a mean eigenvalue of about 1 and none near 0, float64 on the CPU; the identity for 0."""
    exact = covariance.double().cpu()
    scale = exact.diagonal().mean()
    if scale <= 0:
        return torch.eye(len(exact), dtype=torch.float64)
    values, vectors = torch.linalg.eigh((exact + exact.mT) / (2 * scale))
    return (vectors * values.clamp(min=FLOOR * values[-1])) @ vectors.mT


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Return a power of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values**exponent) @ vectors.mT
