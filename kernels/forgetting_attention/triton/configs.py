"""Block sizes: a table by architecture, kernel and head dimensions. Nothing is tuned at run time.

The entries for Hopper with head dimensions up to 128 were the fastest on an H200, as measured by
benchmarks/attention/tune_forgetting_attention.py; the others are the largest that fit a chip's shared memory (99 KiB on
Ada).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """Block sizes of a kernel: block_m queries and block_n keys per tile, warps per program, tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (minimum compute capability, kernel, maximum head dimension): the first entry that fits is used.
TABLE = {
    (9, "forward", 64): Config(64, 128, 4, 3),
    (9, "forward", 128): Config(64, 64, 4, 3),
    (9, "forward", 256): Config(64, 64, 4, 2),
    (9, "hopper_forward", 64): Config(128, 128, 4, 3),
    (9, "hopper_forward", 128): Config(128, 128, 4, 2),
    (9, "hopper_backward", 64): Config(64, 128, 4, 4),
    (9, "hopper_backward", 128): Config(64, 128, 4, 2),
    (9, "backward", 128): Config(64, 64, 4, 2),
    (8, "forward", 64): Config(128, 64, 4, 3),
    (8, "forward", 128): Config(128, 64, 8, 2),
    (8, "forward", 256): Config(64, 32, 4, 2),
    (8, "backward", 64): Config(64, 64, 4, 2),
    (8, "backward", 128): Config(32, 64, 4, 2),
    (8, "backward", 256): Config(32, 32, 4, 1),
}
# float32 serves tests; this entry fits every chip.
FLOAT32 = Config(32, 32, 4, 1)


@functools.cache
def capability(device: torch.device) -> int:
    """Return the major compute capability of a GPU; 8 on other devices, for Triton's interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


def select(kernel: str, q: Tensor, v: Tensor) -> Config:
    """Return the block sizes of a kernel for q [..., Dk] and v [..., Dv].

    Raises:
        ValueError: the head dimension or the chip is not supported.
    """
    head_dim = max(q.shape[-1], v.shape[-1])
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim}: the Triton kernels take head dimensions up to 256")
    if q.dtype == torch.float32:
        return FLOAT32
    chip = capability(q.device)
    for (least, name, largest), config in TABLE.items():
        if name == kernel and chip >= least and head_dim <= largest:
            return config
    raise ValueError(f"compute capability {chip}: the Triton kernels need 8 (Ampere) or more")
