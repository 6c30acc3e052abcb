"""Shared parts of all kernel tests: the device, tests that need a GPU, one measure of closeness, and a faster
interpreter.

`make test-gpu` runs the tests marked `gpu`, in processes that share one GPU and Triton's cache on disk.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

COMPILED = pytest.StashKey[list[tuple[str, float]]]()
"""The name of each kernel that was compiled, and the seconds it took; for xdist's controller those of all workers."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the kernels: a GPU, or the CPU with Triton's interpreter. Its tests are marked `gpu`."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def absent(needs: str) -> str:
    """Return the device that a test needs and this machine lacks, "CUDA" or "Hopper"; empty if none."""
    if not torch.cuda.is_available():
        return f"needs {needs}: no GPU, and Triton's interpreter will not do"
    return "needs a Hopper GPU" if needs == "Hopper" and torch.cuda.get_device_capability()[0] != 9 else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests that run kernels, and skip tests whose device is missing, before pytest selects by marks.

    Processes that share a GPU take the tests in an order of their own: tests that compile the same kernels are far
    apart, so that the second finds them in the cache, and those with many examples, which compile most, come first.
    """
    of_kernels = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in of_kernels:
        if "device" in item.fixturenames:
            item.add_marker(pytest.mark.gpu)
        for needs in {mark.kwargs["needs"] for mark in item.iter_markers("gpu") if mark.kwargs}:
            if reason := absent(needs):
                item.add_marker(pytest.mark.skip(reason=reason))
    alone = len(of_kernels) == len(items)
    yield
    if alone and torch.cuda.is_available() and "PYTEST_XDIST_WORKER" in os.environ:
        random.Random(0).shuffle(items)
        items.sort(key=lambda item: not getattr(item.function, "is_hypothesis_test", False))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPILED] = []
    if not torch.cuda.is_available():
        return
    from triton import knobs

    def compiled(*, src, times, cache_hit: bool, **_) -> None:
        if not cache_hit:
            config.stash[COMPILED].append((src.name, times.total / 1e6))

    knobs.compilation.listener = compiled


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiled"] = session.config.stash[COMPILED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[COMPILED].extend(getattr(node, "workeroutput", {}).get("compiled", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if kernels := sorted(config.stash[COMPILED], key=lambda kernel: -kernel[1]):
        slowest = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in kernels[:10])
        total = sum(seconds for _, seconds in kernels)
        terminalreporter.write_line(f"{len(kernels)} kernels compiled in {total:.0f} s of one core, slowest: {slowest}")


@pytest.fixture(autouse=True, scope="session")
def share_of_the_gpu() -> None:
    """Limit each process's memory to its share of the GPU."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.9 / workers)


@pytest.fixture(autouse=True)
def a_fault_ends_its_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process after an illegal address, as it is unusable: xdist names the test and starts another."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{request.node.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)


@pytest.fixture(autouse=True, scope="session")
def quicker_interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels.interpreter import quickened

    with quickened():
        yield


@pytest.fixture
def right_bfloat16(monkeypatch) -> None:
    """Fix the interpreter's bfloat16: round casts to nearest (it truncates), multiply values (it multiplies bits)."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounded(builder: InterpreterBuilder, x: TensorHandle, to: tl.dtype) -> TensorHandle:
        if to.scalar != tl.bfloat16 or x.dtype.scalar != tl.float32:
            return cast(builder, x, to)
        bits = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(bits, tl.bfloat16)

    def wide(builder: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
        return cast(builder, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(self, a), wide(self, b), *rest)
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| in the 2-norm, in float64; the absolute norm if expected is all 0."""
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
