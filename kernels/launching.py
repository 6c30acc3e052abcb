"""Kernels that are compiled side by side: what Triton would compile one after another, each as it is launched first."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor

import triton

_put_off: contextvars.ContextVar[list | None] = contextvars.ContextVar("launches put off", default=None)
_compiled: set[Hashable] = set()


def on_grid(kernel: triton.JITFunction, grid: tuple[int, ...]) -> Callable:
    """kernel[grid], or what puts the launch off until `compiled_side_by_side` ends."""
    launches = _put_off.get()
    if launches is None:
        return kernel[grid]
    return lambda *args, **kwargs: launches.append((kernel, grid, args, kwargs))


@contextlib.contextmanager
def _all_at_once(kind: Hashable) -> Iterator[None]:
    launches: list = []
    outer = _put_off.set(launches)
    try:
        yield
    finally:
        _put_off.reset(outer)
    # In a context of its own: Triton leaves the mode set where a wait is interrupted.
    contextvars.copy_context().run(_compile, launches)
    for kernel, grid, args, kwargs in launches:
        kernel[grid](*args, **kwargs)
    _compiled.add(kind)


def compiled_side_by_side(kind: Hashable) -> contextlib.AbstractContextManager:
    """Within, launches by `on_grid` are put off until all their kernels are compiled; then they run in order.

    So only once for each `kind`, which names what the kernels depend on: what it leaves out is compiled as it is
    launched. Within, nothing but kernels launched so may read what they write. Not for kernels that are interpreted.
    """
    return contextlib.nullcontext() if kind in _compiled else _all_at_once(kind)


def _compile(launches: list) -> None:
    """In threads, which Triton's compiler and the assembler leave free to run. Errors are for the launch to raise."""
    workers = max(1, min(len(launches), len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for kernel, grid, args, kwargs in launches:
            kernel.warmup(*args, grid=grid, **kwargs)
