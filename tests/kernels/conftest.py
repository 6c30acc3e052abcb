"""What the tests of all kernels share: one measure of closeness."""

import pytest
import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm, in float64; the plain norm where nothing but 0 is expected."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    size = torch.linalg.vector_norm(expected.double())
    return (difference / size if size > 0 else difference).item()


@pytest.fixture(scope="session")
def assert_close():
    """assert_close(actual, expected, tolerance): each named tensor of two dicts, by relative error; NaN fails.

    or_as_close_as: what another computation in the same dtype gave; four times its error is allowed where that is more.
    """

    def check(
        actual: dict[str, torch.Tensor],
        expected: dict[str, torch.Tensor],
        tolerance: float,
        or_as_close_as: dict[str, torch.Tensor] | None = None,
    ) -> None:
        assert actual.keys() == expected.keys()
        for name in expected:
            assert actual[name].shape == expected[name].shape, name
            if not expected[name].numel():
                continue
            error, allowed = relative_error(actual[name], expected[name]), tolerance
            if or_as_close_as is not None:
                allowed = max(allowed, 4 * relative_error(or_as_close_as[name], expected[name]))
            assert error <= allowed, f"{name}: relative error {error:.2e} is over {allowed:.0e}"

    return check
