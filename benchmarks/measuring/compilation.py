"""Compilation in a run: time in torch.compile and Triton, and parallel compilation of kernels."""

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
    """Seconds since construction in torch.compile, and in each Triton kernel that this process compiled.

    Compilation in Inductor's worker processes counts as torch.compile's.
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
        """Describe what was compiled since the last call."""
        now, kernels = _torch_seconds(), self.kernels
        seconds, self._before, self.kernels = now - self._before, now, []
        words = f"torch.compile {seconds:.0f} s"
        if kernels:
            slowest = ", ".join(f"{name} {took:.0f} s" for name, took in sorted(kernels, key=lambda x: -x[1])[:3])
            words += f", {len(kernels)} Triton kernels {sum(took for _, took in kernels):.0f} s (slowest: {slowest})"
        return words


def _torch_seconds() -> float:
    """Return torch.compile's seconds so far. Backward passes are compiled later than the rest."""
    names, sums = compile_times("csv", aggregate=True)
    return sum(float(took) for name, took in zip(names, sums, strict=True) if name in (FORWARD, BACKWARD))


def compile_at_once(function: Callable[..., object], *arguments: object) -> None:
    """Call the function without launching its Triton kernels, and compile them in parallel on all cores.

    Its results are meaningless. Without this, kernels compile one by one at their first launch, on one core.

    Raises:
        ImportError: this Triton lacks the needed functions.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def compiled(kernel: KernelInterface, grid: Any) -> Callable[..., Any]:
        return partial(kernel.run, grid=grid, warmup=True)

    def call() -> None:
        # The mode is local to this thread, so backward passes must stay in it.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool), one_thread:
            function(*arguments)

    KernelInterface.__getitem__ = compiled
    try:
        contextvars.copy_context().run(call)  # if a kernel fails, the mode would stay on
    finally:
        KernelInterface.__getitem__ = launch
