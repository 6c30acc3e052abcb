"""Shared code of the two Hopper scans with a gate per head: supported inputs, and tiles in memory."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gated_recurrence.triton.decays import CHUNK

WIDTHS = (64, 64), (128, 64), (128, 128)  # of k and v
SWIZZLED_TILE = gl.NVMMASharedLayout(128, 16, 4)
# Renamed in Triton 3.7 and 3.9.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether these kernels support the inputs: bfloat16 on Hopper, WIDTHS, one state per head of q."""
    alike = q.dtype == torch.bfloat16 and q.shape == k.shape
    return alike and (k.shape[3], v.shape[3]) in WIDTHS and _is_hopper(q.device)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def aligned(x: Tensor) -> Tensor:
    """Return x, copied if unreadable for the tensor memory accelerator, which needs strides of 16-byte units."""
    if x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(step > 0 and step % 8 == 0 for step in x.stride()[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiles(x: Tensor) -> TensorDescriptor:
    """Describe tiles [1, 1, 64, D] of x [B, T, H, D]; elements outside read as 0."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, CHUNK, x.shape[3]], SWIZZLED_TILE)


def state_tiles(states: Tensor) -> TensorDescriptor:
    """Describe tiles [D, E] of states [num_chunks, H, D, E]."""
    return TensorDescriptor(states, list(states.shape), list(states.stride()), [1, 1, *states.shape[2:]], SWIZZLED_TILE)


@gluon.jit
def clear_rows(smem, held, CHUNK: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of tokens outside this chunk, which may hold anything, even NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    tile = smem.load(LAYOUT)
    smem.store(gl.where((token < held)[:, None], tile, gl.zeros_like(tile)))


@gluon.jit
def store_rows(
    smem, tile, out, row, head, heads, length, first, held,
    CHUNK: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store a tile from shared memory to out [B, T, H, WIDTH]; tile: its descriptor, for whole chunks."""
    if held == CHUNK:
        store_tile(tile, [row, head, first, 0], smem)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
        token = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
        channel = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        address = out + ((row.to(gl.int64) * length + first + token) * heads + head)[:, None] * WIDTH
        mask = (token < held)[:, None] & (channel < WIDTH)[None, :]
        gl.store(address + channel[None, :], smem.load(LAYOUT), mask=mask)
