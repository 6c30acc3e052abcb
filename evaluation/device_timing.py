"""Times of work on a GPU, by CUDA events around replays of a captured graph, without the host's launch work."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MEASURED_SECONDS, REPEATS = 0.01, 5
"""Seconds of replays between two events, and how often they are timed: the median counts."""


def replay_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of a call, from replays of a CUDA graph of all of them, in their order."""

    def run() -> None:
        for call in calls:
            call()

    graph = captured(run)
    times = max(1, round(MEASURED_SECONDS / elapsed(graph.replay, 1)))
    return statistics.median(elapsed(graph.replay, times) for _ in range(REPEATS)) / times / len(calls)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of what `run` launches, which it does twice: first so that kernels are compiled."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph


def elapsed(run: Callable[[], None], times: int) -> float:
    """Return the seconds between two events around `times` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def fastest_copy(source: Tensor, target: Tensor, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Return the bytes/s of a copy within a device, read plus written.

    Args:
        source, target: tensors of one shape and dtype.
        seconds: times a call.
    """
    # A kernel that copies can be faster than the driver's copy: take the better of the two.
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target))
    return 2 * source.nbytes / min(map(seconds, ways))
