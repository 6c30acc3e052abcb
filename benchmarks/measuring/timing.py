"""Measurement of calls: time on the device and the host, memory, relative error, and failures in one line."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from evaluation.device_timing import fastest_copy

INFERENCE, FORWARD, BOTH = "forward, no gradients", "forward", "forward + backward"
LAUNCHED = "launched"  # note of a time that includes launches by the host


@dataclass
class Call:
    """A forward pass without arguments, and the inputs of its backward pass, if it has one.

    heads_first: tensors are [B, H, T, D].
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    d_out: Tensor | None = None
    heads_first: bool = False

    def inference(self) -> Tensor:
        """Return the output, saving nothing for a backward pass."""
        with torch.no_grad():
            return self.forward()

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Return the output and the gradients of the leaves."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.leaves, self.d_out)

    def passes(self, which: str) -> Callable[[], object]:
        """Return the function to time as INFERENCE, FORWARD or BOTH."""
        return {INFERENCE: self.inference, FORWARD: self.forward, BOTH: self.forward_backward}[which]


def default_device() -> torch.device:
    """Return the GPU, or the CPU, on which a benchmark only tests itself."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return `||found - exact|| / ||exact||`; infinity for NaN."""
    error = (torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)).item()
    return math.inf if math.isnan(error) else error


def refuse_divergence(loss: Tensor) -> None:
    """Raise if a loss is not finite.

    Raises:
        RuntimeError: it is infinite or not a number.
    """
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the loss is {loss.item()}")


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """Return the median milliseconds of a call, and "" or LAUNCHED.

    On a GPU it times replays of the call's CUDA graph, without the host's launch work. A call that cannot be captured
    is launched.
    """
    if device.type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        run()
        torch.cuda.synchronize()
        try:
            return do_bench_cudagraph(run, rep=30, return_mode="median"), ""
        except RuntimeError:
            torch.cuda.synchronize()
            return do_bench(run, return_mode="median"), LAUNCHED
    timer = Timer("run()", globals={"run": run})
    return timer.blocked_autorange(min_run_time=0.02).median * 1e3, ""


def host_microseconds(run: Callable[[], object], calls: int = 50) -> float:
    """Return the median wall-clock time of a call on the host, with negligible work on the device."""
    times = []
    for _ in range(calls + 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[10:]) * 1e6


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak device memory of a call, results included, above the memory allocated before."""
    run()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def copy_rate(device: torch.device) -> float:
    """Return GB/s of a large copy within the device, read plus written."""
    # A separate generator: a failed capture breaks the device's default one.
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(2**30 if device.type == "cuda" else 2**24, device=device, generator=generator)
    return fastest_copy(source, torch.empty_like(source), lambda way: timed(way, device)[0] / 1e3) / 1e9


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """Return the host's time in seconds, after the device has finished its queued work."""
    synchronize(device)
    return time.perf_counter()


def timestamp(device: torch.device) -> torch.cuda.Event | float:
    """Return a point in time of the device's work, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Return the seconds between two timestamps."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def free_memory() -> None:
    """Free what nothing refers to, also in circles, and restart the count of the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated(device: torch.device) -> int:
    """Return the bytes allocated on the device; 0 without a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_allocated(device: torch.device) -> int:
    """Return the most bytes allocated since the count began; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def one_line(error: Exception) -> str:
    """Return in one line why an implementation could not be measured."""
    if isinstance(error, ImportError):
        return "not installed"
    return f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0][:150].replace('|', '/')}"
