"""Compile the kernels for GPUs that are not there, and print as JSON what each took: a program, run by its test.

    python compile_recurrence_offline.py 90:key:128:bfloat16 89:head:64:float16 ...

Each argument is an architecture, what gates are of ("alone": heads, each with a state of its own), the head_dim of keys
and values, their dtype, and a kernel if no other shall be compiled. The kernels' own host code runs, forward and
backward, on CPU tensors; where it would launch a kernel, the kernel is compiled instead.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "forgetting_attention"))

from compile_offline import Compiler

from kernels.gated_recurrence.hopper import per_head as hopper_per_head
from kernels.gated_recurrence.operator import triton_recurrence, triton_recurrence_backward
from kernels.gated_recurrence.triton import per_head as triton_per_head
from kernels.gated_recurrence.triton import scan as triton_scan
from kernels.gated_recurrence.triton import scores as triton_scores

# Bytes of shared memory that a program may use, by architecture (CUDA programming guide, compute capabilities).
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
LENGTH, HEADS = 600, (4, 2)  # long enough for segments, with heads that share states


class RecurrenceCompiler(Compiler):
    only = ""

    def compile(self, kernel, args: tuple, kwargs: dict) -> None:
        if self.only in ("", kernel.__name__):
            super().compile(kernel, args, kwargs)


def compile_case(gate: str, head_dim: int, dtype: torch.dtype) -> None:
    query_heads = HEADS[gate == "alone"]
    q, k, v = (torch.zeros(1, LENGTH, heads, head_dim, dtype=dtype) for heads in (query_heads, HEADS[1], HEADS[1]))
    log_decay = torch.zeros(k.shape[:3] if gate in ("head", "alone") else k.shape)
    state = torch.zeros(1, HEADS[1], head_dim, head_dim)
    options = ("value" if gate == "value" else "key", 1.0)
    out, final, *kept = triton_recurrence(q, k, v, log_decay, state, None, *options, 2**40)
    triton_recurrence_backward(out, final, q, k, v, log_decay, state, None, *kept, *options)


def main(cases: list[str]) -> None:
    compiler = RecurrenceCompiler(for_hopper_alone=True)
    for module in (triton_scores, triton_scan, triton_per_head):
        module.shared_memory = lambda device: SHARED[compiler.driver.architecture]
    hopper_per_head._is_hopper = lambda device: compiler.driver.architecture == 90
    for case in cases:
        architecture, gate, head_dim, dtype, *only = case.split(":")
        compiler.driver.architecture, compiler.only = int(architecture), "".join(only)
        compile_case(gate, int(head_dim), getattr(torch, dtype))
        for record in compiler.records:
            record.setdefault("case", case)
            record.setdefault("allowed", SHARED[int(architecture)])
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main(sys.argv[1:])
