"""Compile the kernels for absent GPUs, and print the resources each needs as JSON: a program run by its test."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "forgetting_attention"))

from compile_offline import Compiler

from kernels.selective_attention.triton import launch

CASES = (
    # Sigma's heads; the widest tiles, with forget gates and padding.
    ((32, 4, 16), 64, torch.bfloat16, False),
    ((4, 4, 4), 256, torch.float32, True),
)


def main() -> None:
    compiler = Compiler(for_hopper_alone=True, disassembles=False)
    for compiler.driver.architecture in (89, 90):
        for heads, dim, dtype, padded in CASES:
            q, k, v = (torch.zeros(2, n, h, dim, dtype=dtype) for n, h in zip((1, 500, 500), heads, strict=True))
            bound = torch.zeros(2, dtype=torch.int32)
            decay = torch.zeros(2, heads[0], 500).transpose(1, 2) if padded else None
            launch.attend(q, k, v, 100, decay, bound if padded else None, bound, 0.1, 30.0 if padded else None, 4)
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main()
