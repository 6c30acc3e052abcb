"""Tune flash-linear-attention's kernel configurations at the timed size, compiled by many processes.

One process takes minutes to compile the hundreds of candidates. Here each of several processes compiles a part of every
list without timing, since they would wait for each other on the one GPU; then this process tunes and finds all
candidates in the compiler's cache.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.linearization.linearization_peers import chunk_gla


def tune(batch: int, length: int, heads: int, head_dim: int, dtype: torch.dtype, processes: int) -> None:
    """Tune chunk_gla's kernels, forward and backward, for `[batch, length, heads, head_dim]` of a dtype on CUDA."""
    shape = (batch, length, heads, head_dim)
    context = multiprocessing.get_context("spawn")
    helpers = [context.Process(target=_compile, args=(rank, processes, shape, dtype)) for rank in range(processes)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    _call(shape, dtype)


def _compile(rank: int, processes: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def part(self: Autotuner, arguments: dict) -> list:
        candidates = prune(self, arguments)
        return candidates[rank::processes] or candidates[:1]

    def launch_once(launch: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        launch()
        return [0.0] * len(quantiles)

    Autotuner.prune_configs = part
    Autotuner.do_bench = property(lambda self: launch_once)
    _call(shape, dtype)


def _call(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    new = partial(torch.randn, shape, device="cuda")
    q, k, v = (new(dtype=dtype).requires_grad_() for _ in range(3))
    log_decay = (torch.nn.functional.logsigmoid(new(dtype=dtype)) / 16).requires_grad_()
    chunk_gla(q.device)(q, k, v, log_decay).sum().backward()
    torch.cuda.synchronize()
