"""Shared parts of the two Hopper kernels: supported inputs, tile descriptors, tiles in accumulators."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.forgetting_attention.triton.configs import capability
from kernels.rounding import next_power_of_2

SWIZZLED_TILE = gl.NVMMASharedLayout(128, 16, 4)
# Triton 3.7 renamed the first, 3.9 the second.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def supports(q: Tensor, v: Tensor, kv_start: Tensor | None, kv_end: Tensor | None, scale: float) -> bool:
    """Return whether the Hopper kernels fit: half precision, head dimensions up to 128, no padding, scale > 0."""
    return (
        capability(q.device) == 9
        and q.element_size() == 2
        and max(q.shape[3], v.shape[3]) <= 128
        and kv_start is None
        and kv_end is None
        and scale > 0
    )


def width(x: Tensor) -> int:
    """Return the channels of a tile; its rows are whole 128-byte swizzles."""
    return max(64, next_power_of_2(x.shape[3]))


def tiles(x: Tensor, block: int) -> TensorDescriptor:
    """Describe tiles [1, 1, block, head_dim rounded up] of x [B, N, H, D]; reads out of bounds give 0."""
    heads_first = x.transpose(1, 2)
    shape = [1, 1, block, width(x)]
    return TensorDescriptor(heads_first, list(heads_first.shape), list(heads_first.stride()), shape, SWIZZLED_TILE)


@gluon.jit
def rows_alike(vector, shape_of):
    """The vector in shared memory as every row of an accumulator, each number in a register of its own.

    Where two rows share a register the compiler copies it after the fence of the next product, and so makes that wait.
    """
    _, rows = gl.broadcast(shape_of, vector.load(gl.SliceLayout(0, shape_of.type.layout))[None, :])
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [rows], dtype=gl.float32, is_pure=False, pack=1)
