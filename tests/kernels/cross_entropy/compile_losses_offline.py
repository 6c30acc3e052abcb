"""Compile the kernel for an absent GPU, and print the resources it needs as JSON: a program run by its test."""

import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "forgetting_attention"))

from compile_offline import Compiler

from kernels.cross_entropy.triton_token_losses import fused_token_losses


class WidthCompiler(Compiler):
    """Also records the widest load and store of a thread, in units of 4 bytes."""

    def compile(self, kernel, args: tuple, kwargs: dict) -> None:
        super().compile(kernel, args, kwargs)
        ptx = kernel.run(*args, grid=(1,), warmup=True, **kwargs).asm["ptx"]
        for name, access in (("load_width", "ld"), ("store_width", "st")):
            widths = re.findall(rf"{access}\.global[.\w:]*\.v(\d)\.b32", ptx)
            self.records[-1][name] = max(map(int, widths), default=1)


def main() -> None:
    compiler = WidthCompiler(disassembles=False)
    logits, teacher = (torch.zeros(4, 50304, dtype=torch.bfloat16) for _ in range(2))
    targets, mask, weights = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), torch.ones(2)
    for given in ((targets, None, None), (None, teacher, None), (targets, teacher, mask)):
        fused_token_losses(logits, *given, weights, 50257, 2.0, True)
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main()
