"""Processes of the soak: some repeat one kernel and compare its results, and one multiplies matrices.

An illegal memory access ends the kernel's CUDA context, and so its process, but no other. The parent reads the
process's last message, and starts another process for the next kernel.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from benchmarks.measuring.timing import one_line, relative_error

Make = Callable[[str, torch.device], Callable[[], dict[str, Tensor]]]
START_LIMIT = 300.0  # seconds for process start, compilation and a first pass
GRACE = 60.0  # seconds over the requested time after which a kernel counts as hung


@dataclass
class Repeated:
    """Results of one process.

    Attributes:
        passes: passes completed and compared.
        worst: the largest relative difference of each result from the first pass; infinity for NaN.
        first_wrong: the first pass with a result out of its bound, 0 if none.
        fault: how the process ended, empty if it is well.
    """

    passes: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    first_wrong: int = 0
    fault: str = ""


def difference(found: Tensor, reference: Tensor) -> float:
    """Return 0 for equal bits (or 0 and -0), else the relative difference; infinity if one is NaN."""
    if torch.equal(found, reference):
        return 0.0
    return relative_error(found, reference.double())


def out_of_bounds(worst: dict[str, float], bounds: dict[str, float]) -> list[str]:
    """Return the results that differ by more than their bound, 0 by default."""
    return [name for name, value in worst.items() if not value <= bounds.get(name, 0.0)]


def repeat(
    run: Callable[[], dict[str, Tensor]],
    reference: dict[str, Tensor],
    bounds: dict[str, float],
    seconds: float,
    passes,
) -> Repeated:
    """Repeat a run for `seconds`, at least once, and compare it with the reference. passes: a shared counter."""
    seen = Repeated(worst=dict.fromkeys(reference, 0.0))
    passes.value = 0
    end = time.monotonic() + seconds
    while not seen.passes or time.monotonic() < end:
        found = run()
        for name, expected in reference.items():
            seen.worst[name] = max(seen.worst[name], difference(found[name], expected))
        seen.passes += 1
        passes.value = seen.passes
        if not seen.first_wrong and out_of_bounds(seen.worst, bounds):
            seen.first_wrong = seen.passes
    return seen


def _serve(connection: Connection, passes, make: Make, device: torch.device, share: float) -> None:
    """Answer ("prepare", name) and ("repeat", (seconds, bounds)) until the parent closes the connection.

    An answer is (True, result) or (False, error).
    """
    run = reference = None
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            return
        try:
            if command == "prepare":
                run = reference = answer = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                run = make(argument, device)
                reference = {name: x.detach().clone() for name, x in run().items()}
                wrong = [name for name, x in reference.items() if not x.isfinite().all()]
                if wrong:
                    raise ArithmeticError(f"{', '.join(wrong)} not finite in the first pass")
            else:
                seconds, bounds = argument
                answer = repeat(run, reference, bounds, seconds, passes)
        except Exception as error:
            connection.send((False, one_line(error).removeprefix("failed: ")))
            connection.close()
            os._exit(1)  # after an illegal address no GPU call works, not even clean-up
        connection.send((True, answer))


class Worker:
    """A process that repeats kernels."""

    def __init__(self, context: multiprocessing.context.BaseContext, make: Make, device: torch.device, share: float):
        self.passes = context.Value("q", 0)
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.passes, make, device, share), daemon=True)
        self._process.start()
        theirs.close()
        self.alive = True
        self.prepared: object = None

    def ask(self, command: str, argument: object) -> None:
        self.passes.value = 0
        if command == "prepare":
            self.prepared = argument
        try:
            self.connection.send((command, argument))
        except OSError:
            self.alive = False

    def answer(self, limit: float) -> Repeated:
        """Return the process's answer within `limit` seconds; otherwise end the process and return the fault."""
        fault = "ended before it was asked"
        if self.alive and not self.connection.poll(limit):
            fault = f"did not come back within {limit:.0f} s"
        elif self.alive:
            try:
                well, answer = self.connection.recv()
                if well:
                    return answer or Repeated()
                fault = answer
            except EOFError:
                self._process.join(5)
                fault = f"ended with status {self._process.exitcode}"
        self.close()
        return Repeated(passes=self.passes.value, fault=fault)

    def close(self) -> None:
        self.alive = False
        self.connection.close()
        self._process.kill()
        self._process.join()


def _multiply(working, products, device: torch.device, size: int) -> None:
    dtype = torch.bfloat16
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    parent = multiprocessing.parent_process()
    while parent.is_alive():
        if not working.wait(1.0):
            continue
        for _ in range(8):
            torch.mm(a, b, out=out)
        out[0, 0].item()
        products.value += 8


class Products:
    """A process that multiplies bfloat16 matrices for as long as the `with` block lasts."""

    def __init__(self, context: multiprocessing.context.BaseContext, device: torch.device, size: int = 8192):
        self._working, self.count = context.Event(), context.Value("q", 0)
        self._process = context.Process(target=_multiply, args=(self._working, self.count, device, size), daemon=True)
        self._process.start()

    def __enter__(self) -> "Products":
        before, limit = self.count.value, time.monotonic() + START_LIMIT
        self._working.set()
        while self.count.value == before:
            if not self._process.is_alive() or time.monotonic() > limit:
                raise RuntimeError("the process that multiplies matrices does not: there is nothing beside the kernels")
            time.sleep(0.001)
        return self

    def __exit__(self, *error: object) -> None:
        self._working.clear()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
