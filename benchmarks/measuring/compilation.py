"""What compilers take of a run: how long torch.compile and Triton were at work, and kernels compiled all at once."""

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import compile_times

FORWARD, BACKWARD = "_compile.compile_inner", "compile_fx.<locals>.bw_compiler"


class CompilationTimes:
    """From its making on: seconds of torch.compile, and those of each Triton kernel that this process compiled.

    What Inductor has compiled by processes of its own counts as torch.compile's.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float]] = []
        self._before = _torch_seconds()
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.kernels.append((src.name, times.total / 1e6))

    def since_asked(self) -> str:
        """In words, what has been compiled since this was asked last."""
        now, kernels = _torch_seconds(), self.kernels
        seconds, self._before, self.kernels = now - self._before, now, []
        words = f"torch.compile {seconds:.0f} s"
        if kernels:
            slowest = ", ".join(f"{name} {took:.0f} s" for name, took in sorted(kernels, key=lambda x: -x[1])[:3])
            words += f", {len(kernels)} Triton kernels {sum(took for _, took in kernels):.0f} s (slowest: {slowest})"
        return words


def _torch_seconds() -> float:
    """Of torch.compile, by now. Backward passes are compiled later than the rest."""
    names, sums = compile_times("csv", aggregate=True)
    return sum(float(took) for name, took in zip(names, sums, strict=True) if name in (FORWARD, BACKWARD))


def compile_at_once(function: Callable[..., object], *arguments: object) -> None:
    """Call the function for the Triton kernels that it would launch: none is, all are compiled, on all cores at once.

    Nothing that it computes has a meaning. One by one, as they are first launched, kernels are compiled on one core.

    Raises:
        ImportError: a Triton without what this takes.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def compiled(kernel: KernelInterface, grid: Any) -> Callable[..., Any]:
        return partial(kernel.run, grid=grid, warmup=True)

    def call() -> None:
        # The mode is this thread's, in which passes backward have to stay.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool), one_thread:
            function(*arguments)

    KernelInterface.__getitem__ = compiled
    try:
        contextvars.copy_context().run(call)  # where a kernel is refused, the mode would be left on
    finally:
        KernelInterface.__getitem__ = launch
