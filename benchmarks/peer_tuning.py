"""Let flash-linear-attention choose its kernels' configurations at the size that is timed, compiled by many processes.

One process alone takes minutes to compile the hundreds of candidates. Here several begin at different places of the
lists and fill the compiler's cache for one another; then this process tunes with what is there.
"""

import multiprocessing
from functools import partial

import torch

from benchmarks.linearization_peers import chunk_gla


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

    def begin_elsewhere(self: Autotuner, arguments: dict) -> list:
        candidates = prune(self, arguments)
        first = rank * len(candidates) // processes
        return candidates[first:] + candidates[:first]

    Autotuner.prune_configs = begin_elsewhere
    _call(shape, dtype)


def _call(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    new = partial(torch.randn, shape, device="cuda")
    q, k, v = (new(dtype=dtype).requires_grad_() for _ in range(3))
    log_decay = (torch.nn.functional.logsigmoid(new(dtype=dtype)) / 16).requires_grad_()
    chunk_gla(q.device)(q, k, v, log_decay).sum().backward()
    torch.cuda.synchronize()
