"""Compile the kernel for a few tokens for GPUs that are not there, and print as JSON what it took: run by its test."""

import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "forgetting_attention"))

from compile_offline import Compiler

from kernels.gated_recurrence.decode.triton_step import short_recurrence, step

# By architecture: every kind of width on Hopper, and on Ampere those that models have and that take most.
HEAD_DIMS = {80: [(128, 128), (256, 256)], 90: [(128, 128), (64, 64), (256, 256), (100, 72), (1, 1)]}


class WidthCompiler(Compiler):
    """Records also how many numbers of the state a thread loads and stores at a time, at most."""

    def compile(self, kernel, args: tuple, kwargs: dict) -> None:
        super().compile(kernel, args, kwargs)
        ptx = kernel.run(*args, grid=(1,), warmup=True, **kwargs).asm["ptx"]
        width = lambda access: max(map(int, re.findall(rf"{access}\.global[.\w:]*\.v(\d)\.b32", ptx)), default=1)  # noqa: E731
        self.records[-1].update(load_width=width("ld"), store_width=width("st"))


def main() -> None:
    compiler = WidthCompiler(disassembles=False)
    for architecture, widths in HEAD_DIMS.items():
        compiler.driver.architecture = architecture
        for key_dim, value_dim in widths:
            q, k = (torch.zeros(2, 3, heads, key_dim, dtype=torch.bfloat16) for heads in (4, 2))
            v, state = torch.zeros(2, 3, 2, value_dim, dtype=torch.bfloat16), torch.zeros(2, 2, key_dim, value_dim)
            for gate, shape in (("key", k.shape), ("value", v.shape), ("head", k.shape[:3])):
                log_decay = torch.zeros(shape)
                axis = "value" if gate == "value" else "key"
                step(q, k, v, log_decay, state, axis, 1.0)
                short_recurrence(q, k, v, log_decay, None, axis, 1.0, torch.zeros(4, key_dim))
                for record in compiler.records:
                    record.setdefault("gate", gate)
                    record.setdefault("head_dims", (key_dim, value_dim))
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main()
