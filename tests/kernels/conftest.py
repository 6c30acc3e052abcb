"""What the tests of all kernels share: one measure of closeness, and a quicker interpreter."""

import functools
import os
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_a_kernel() -> Iterator[None]:
    """The interpreter puts its own operations into triton.language when a kernel begins, and anew at every call of a
    function in the kernel, which changes nothing and took a third of these tests' time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run_kernel = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[frozenset[str]] = set()

    @functools.cache
    def modules(function: FunctionType) -> frozenset[str]:
        return frozenset(x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)

    def patch_once(function: FunctionType) -> interpreter._LangPatchScope:
        if modules(function) in done:
            return interpreter._LangPatchScope()
        done.add(modules(function))
        return patch(function)

    def run_anew(executor: interpreter.GridExecutor, *args, **kwargs) -> None:
        done.clear()
        run_kernel(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_anew)
        yield


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
