"""Compile the kernels for GPUs that are not there, and print as JSON what each took: a program, run by its test.

    python compile_recurrence_offline.py 90:key:128:bfloat16 90:key:128:bfloat16:gradients_of_strong:16 ...

Each argument is an architecture, what gates are of ("alone": heads, each with a state of its own), the head_dim of keys
and values, their dtype, a kernel if no other shall be compiled, and the query heads if not 4 for 2 states. The kernels'
own host code runs, forward and backward, on CPU tensors; where it would launch a kernel, that kernel is compiled.
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
LENGTH, QUERY_HEADS, STATES = 600, 4, 2  # long enough for segments, with heads that share states


class RecurrenceCompiler(Compiler):
    only = ""

    def compile(self, kernel, args: tuple, kwargs: dict) -> None:
        if self.only in ("", kernel.__name__):
            super().compile(kernel, args, kwargs)


def compile_case(gate: str, head_dim: int, dtype: torch.dtype, query_heads: int) -> None:
    q, k, v = (torch.zeros(1, LENGTH, heads, head_dim, dtype=dtype) for heads in (query_heads, STATES, STATES))
    log_decay = torch.zeros(k.shape[:3] if gate in ("head", "alone") else k.shape)
    state = torch.zeros(1, STATES, head_dim, head_dim)
    options = ("value" if gate == "value" else "key", 1.0)
    out, final, *kept = triton_recurrence(q, k, v, log_decay, state, None, *options, 2**40)
    triton_recurrence_backward(out, final, q, k, v, log_decay, state, None, *kept, *options)


def main(cases: list[str]) -> None:
    compiler = RecurrenceCompiler(for_hopper_alone=True)
    for module in (triton_scores, triton_scan, triton_per_head):
        module.shared_memory = lambda device: SHARED[compiler.driver.architecture]
    hopper_per_head._is_hopper = lambda device: compiler.driver.architecture == 90
    for case in cases:
        architecture, gate, head_dim, dtype, *rest = case.split(":")
        compiler.driver.architecture, compiler.only = int(architecture), rest[0] if rest else ""
        heads = int(rest[1]) if len(rest) > 1 else STATES if gate == "alone" else QUERY_HEADS
        compile_case(gate, int(head_dim), getattr(torch, dtype), heads)
        for record in compiler.records:
            record.setdefault("case", case)
            record.setdefault("allowed", SHARED[int(architecture)])
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main(sys.argv[1:])
