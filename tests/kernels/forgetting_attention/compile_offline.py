"""Compile the kernels for absent GPUs, and print the resources each needs as JSON: a program run by the tests.

    python compile_offline.py 90:hopper_forward:128 89:backward:64 ...

Each argument is an architecture and a row of `triton_configs.TABLE`. The kernels' own host code runs, on CPU tensors;
where it would launch a kernel, the kernel is compiled for the architecture instead.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kernels.forgetting_attention.hopper import backward as hopper_backward
from kernels.forgetting_attention.hopper import forward as hopper_forward
from kernels.forgetting_attention.triton import backward as triton_backward
from kernels.forgetting_attention.triton import forward as triton_forward
from kernels.forgetting_attention.triton.configs import TABLE
from kernels.forgetting_attention.triton.decay import gradient_of_gates, sum_gates
from kernels.forgetting_attention.triton.ranges import find_ranges, largest_norms

LENGTH, HEADS = 256, 2


def barriers_nobody_takes(module: str) -> list[str]:
    """Return the names of the mbarriers that a kernel initializes but no group of its warps uses.

    Args:
        module: the kernel in Triton's GPU dialect, as text.
    """
    before, specialized, groups = module.partition("ttg.warp_specialize(")
    if not specialized:
        return []
    arrays = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", before))
    initialized = {arrays.get(name, name) for name in re.findall(r"ttng\.init_barrier (%\w+),", before)}
    return sorted(name for name in initialized if not re.search(rf"{name}\b", groups))


def registers_nothing_sets(assembly: str) -> list[int]:
    """Return the numbers of uniform registers that a program reads but never sets, except from themselves.

    Triton 3.6's ptxas emits such programs when uniform registers run out: addresses of matrix products are then
    arbitrary.

    Args:
        assembly: as `nvdisasm -c` prints it, for Hopper.
    """
    read, written = set(), set()
    for line in assembly.splitlines():
        if not (found := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*([^;]*);", line)):
            continue
        name, operands = found[1], [operand.strip() for operand in found[2].split(",")]
        if name.startswith("HGMMA"):
            # Four registers hold the addresses of both factors; the first two are free if one factor is in registers.
            first = int(re.search(r"gdesc\[UR(\d+)\]", found[2])[1])
            read.update(range(first + (2 if re.fullmatch(r"R\d+(\.\w+)*", operands[1]) else 0), first + 4))
            continue
        sets_first = re.fullmatch(r"UR\d+", operands[0]) and not name.startswith(("UTMA", "UBLK", "SYNCS"))
        used = {int(number) for number in re.findall(r"\bUR(\d+)\b", ",".join(operands[1 if sets_first else 0 :]))}
        if sets_first:
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            first = int(operands[0][2:])
            written.update(set(range(first, first + width)) - used)
        read |= used
    return sorted(read - written)


class AbsentDriver:
    """Answers Triton's queries of a driver before compiling. The device's number is its architecture."""

    def __init__(self):
        self.architecture = 90

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # The same instructions as cuobjdump's, in less time: no encodings, and no analysis of the flow of data.
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Compiler:
    """Replaces launching of kernels; `records` has one entry for each compiled kernel.

    for_hopper_alone: for other architectures nothing is assembled, which takes most of the time. Shared memory, all
    that is then told of them, is known before.
    disassembles: whether records tell of registers that nothing sets; a third of the time, and only matrix products
    have met such registers.
    """

    def __init__(self, *, for_hopper_alone: bool = False, disassembles: bool = True):
        self.for_hopper_alone, self.disassembles = for_hopper_alone, disassembles
        self.driver, self.records, self.seen = AbsentDriver(), [], set()
        triton.runtime.driver.set_active(self.driver)
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.runtime.add_stages_inspection_hook = self.choose_stages
        KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: self.compile(kernel, args, kwargs)

    def is_assembled(self) -> bool:
        return self.driver.architecture == 90 or not self.for_hopper_alone

    def choose_stages(self, backend=None, stages=None, options=None, language=None, capability=None):
        """Implement Triton's hook: first return its cache key, then change the stages."""
        if stages is None:
            return (f"assembled: {self.is_assembled()}",) * 2
        if not self.is_assembled():
            stages["ptx"] = lambda module, metadata: metadata.setdefault("name", "unnamed")
            stages["cubin"] = lambda module, metadata: b""
        return None

    def compile(self, kernel, args: tuple, kwargs: dict) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = kernel.run(*args, grid=(1,), warmup=True, **kwargs)
        if compiled.hash in self.seen:
            return
        self.seen.add(compiled.hash)
        record = {
            "kernel": kernel.__name__,
            "architecture": self.driver.architecture,
            "shared": compiled.metadata.shared,
        }
        if self.is_assembled():
            assert "bytes spill stores" in log.getvalue(), "the assembler's log is missing"
            record["spilled"] = sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue())))
            record["dead_barriers"] = barriers_nobody_takes(compiled.asm["ttgir"])
            if self.disassembles and self.driver.architecture == 90:
                record["unset_registers"] = registers_nothing_sets(disassembled(compiled.asm["cubin"]))
            record["instructions"] = compiled.asm["ptx"].count(";\n")
            record["serialized"] = "wgmma.mma_async instructions are serialized" in log.getvalue()
        self.records.append(record)


def compile_row(name: str, head_dim: int, config, gated: bool) -> None:
    """Compile one row of the table, in bfloat16: with gates, documents and pruning where supported, and lse."""
    q, k, v, out, grad_out = (torch.zeros(1, LENGTH, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(1, HEADS, LENGTH)
    grad_lse = torch.zeros(1, LENGTH, HEADS) if gated else None
    gates = torch.zeros(1, LENGTH, HEADS) if gated else None
    bounds = torch.tensor([0, LENGTH], dtype=torch.int32) if gated else None
    pruning = (-10.0, None, largest_norms(q, k)) if gated else ()
    decay, first = sum_gates(gates, None, None, bounds, None, False, 1, LENGTH, q.device)
    ranges = None if first is None else find_ranges(first, decay, None, LENGTH, LENGTH, *pruning)
    if name == "hopper_forward":
        hopper_forward.forward(q, k, v, decay, ranges, 1.0, config)
    elif name == "forward":
        triton_forward.forward(q, k, v, decay, ranges, None, None, 1.0, config)
        triton_forward.natural_lse(lse, decay, None, LENGTH, LENGTH)
    else:
        if name == "hopper_backward":
            together = config.block_m
            results = hopper_backward.backward(grad_out, q, k, v, out, lse, decay, ranges, 1.0, config, grad_lse)
        else:
            together = 1
            results = triton_backward.backward(
                grad_out, q, k, v, out, lse, decay, ranges, None, None, 1.0, config, grad_lse
            )
        if gated:
            gradient_of_gates(gates, *results[3:], together, None, None, bounds, LENGTH, False)


def main(rows: list[str]) -> None:
    compiler = Compiler(for_hopper_alone=True)
    for row in rows:
        architecture, name, head_dim = row.split(":")
        compiler.driver.architecture = int(architecture)
        config = TABLE[int(architecture) // 10, name, int(head_dim)]
        # Elsewhere the kernels without gates are the same with less in them.
        for gated in (True, False) if name.startswith("hopper") else (True,):
            compile_row(name, int(head_dim), config, gated)
            for record in compiler.records:
                record.setdefault("row", row)
                record.setdefault("gated", gated)
    print(json.dumps(compiler.records))


if __name__ == "__main__":
    main(sys.argv[1:])
