"""Find the block sizes of forgetting attention on this GPU: `python -m benchmarks.attention.tune_forgetting_attention`.

Every candidate is compiled (in parallel processes), checked against float64 on a short odd length, and only then timed,
with gates, forward or backward alone. It prints the candidates, best first; the best belongs in
kernels/forgetting_attention/triton/configs.py.
"""

import argparse
import multiprocessing
from dataclasses import astuple
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from benchmarks.attention.attention_checks import BOUNDS
from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.hopper import backward as hopper_backward
from kernels.forgetting_attention.hopper import forward as hopper_forward
from kernels.forgetting_attention.triton import backward as triton_backward
from kernels.forgetting_attention.triton import forward as triton_forward
from kernels.forgetting_attention.triton.configs import Config, select
from kernels.forgetting_attention.triton.decay import sum_gates
from kernels.forgetting_attention.triton.ranges import find_ranges

CANDIDATES = {
    "forward": [Config(m, n, w, s) for m, n, w, s in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))],
    "backward": [Config(m, n, w, s) for m, n, w, s in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))],
    # The Hopper kernels have 64 queries or keys per warpgroup, which leaves few choices.
    "hopper_forward": [Config(128, n, 4, s) for n, s in product((64, 128), (2, 3, 4))],
    "hopper_backward": [Config(64, 128, 4, s) for s in (2, 3, 4)],
}
TUNED_AT = {64: (1, 16384, 24), 128: (1, 16384, 16), 256: (1, 16384, 8)}  # head_dim: batch, length, heads
CHECKED_AT = (2, 333, 2)


class Problem:
    """Random q, k, v, gates and gradient of the output, with a forward pass by the current table."""

    def __init__(self, batch: int, length: int, heads: int, head_dim: int):
        shape = (batch, length, heads, head_dim)
        self.q, self.k, self.v, self.grad = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
        self.gates = F.logsigmoid(torch.randn(shape[:3], device="cuda") + 3)
        self.scale = head_dim**-0.5
        decay, first = sum_gates(self.gates, None, None, None, None, False, batch, length, self.q.device)
        self.visible = decay, find_ranges(first, decay, None, length, length)
        self.out, self.lse = self.run("forward", select("forward", self.q, self.v))

    def run(self, kernel: str, config: Config) -> tuple[Tensor, ...]:
        """Return out and lse of a forward pass, or the results of a backward pass, gradients of q, k and v first."""
        qkv = (self.q, self.k, self.v)
        saved = (self.grad, *qkv, self.out, self.lse) if "backward" in kernel else qkv
        if kernel == "hopper_forward":
            return hopper_forward.forward(*saved, *self.visible, self.scale, config)
        if kernel == "hopper_backward":
            return hopper_backward.backward(*saved, *self.visible, self.scale, config)
        module = triton_forward.forward if kernel == "forward" else triton_backward.backward
        return module(*saved, *self.visible, None, None, self.scale, config)


def check(kernel: str, head_dim: int, config: Config) -> str:
    """Return why a candidate is unusable, or an empty string."""
    torch.manual_seed(0)
    try:
        problem = Problem(*CHECKED_AT, head_dim)
        results = problem.run(kernel, config)
        torch.cuda.synchronize()
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    expected = forgetting_attention_reference(*leaves, problem.gates.double())
    wanted = {"out": expected}
    if "backward" in kernel:
        gradients = torch.autograd.grad(expected, leaves, problem.grad.double())
        wanted = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    for (name, right), result in zip(wanted.items(), results, strict=False):
        error = ((result.double() - right).norm() / right.norm()).item()
        if not error <= BOUNDS[name]:
            return f"wrong: {name} is off by {error:.1e}"
    return ""


def main() -> None:
    """Print the times of each kernel's candidates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--head-dims", type=int, nargs="+", choices=TUNED_AT, default=[64, 128])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    arguments = parser.parse_args()
    jobs = [(k, d, c) for k, d in product(arguments.kernels, arguments.head_dims) for c in CANDIDATES[k]]
    # Compiled kernels are stored in Triton's disk cache, where this process finds them.
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        found = dict(zip(jobs, pool.starmap(check, jobs), strict=True))
    for kernel, head_dim in product(arguments.kernels, arguments.head_dims):
        problem, times = Problem(*TUNED_AT[head_dim], head_dim), []
        for config in CANDIDATES[kernel]:
            if reason := found[kernel, head_dim, config]:
                print(f"{kernel}, head_dim {head_dim}, {astuple(config)}: {reason}")
                continue
            times.append((do_bench(partial(problem.run, kernel, config), return_mode="median"), config))
        for milliseconds, config in sorted(times, key=lambda time: time[0])[:5]:
            print(f"{kernel}, head_dim {head_dim}: {milliseconds:7.3f} ms  {config}")


if __name__ == "__main__":
    main()
