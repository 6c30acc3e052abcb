"""Rows times a rotation: queries are rotated before attention to packed keys, its output is rotated back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import cdiv, next_power_of_2

CHUNK = 32
"""Channels that a program makes of each of its rows."""
FEW_ROWS = 64
"""Rows up to which a program has one: to read the rotation again takes less time than a matrix product's start."""


def rows_of_program(rows: int) -> int:
    """Return the rows that a program rotates."""
    return 1 if rows <= FEW_ROWS else 16


@triton.jit
def load_chunk(rotation, every, channel, from_stride, to_stride, DIM: tl.constexpr):
    """Load the columns `channel` of a rotation [DIM, DIM]."""
    return tl.load(
        rotation + every[:, None] * from_stride + channel * to_stride,
        mask=(every[:, None] < DIM) & (channel < DIM), other=0.0,
    )  # fmt: skip


@triton.jit
def product(rows, chunk, ROWS: tl.constexpr):
    """Compute rows [ROWS, channels], or one row [channels], times the columns of a rotation, in float32."""
    return tl.dot(rows, chunk, input_precision="tf32x3") if ROWS > 1 else tl.sum(rows[:, None] * chunk, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    x, rotation, added, out, num_rows, from_stride, to_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute `x @ rotation + added` for ROWS rows [DIM] and CHUNK channels; added may be None."""
    channel, every = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, PADDED)
    chunk = load_chunk(rotation, every, channel, from_stride, to_stride, DIM)
    row = tl.program_id(0) * ROWS
    if ROWS > 1:
        row += tl.arange(0, ROWS)[:, None]
    rows = tl.load(x + row * DIM + every, mask=(row < num_rows) & (every < DIM), other=0.0).to(tl.float32)
    turned = product(rows, chunk, ROWS)
    mask = (row < num_rows) & (channel < DIM)
    if added is not None:
        turned += tl.load(added + row * DIM + channel, mask=mask, other=0.0)
    tl.store(out + row * DIM + channel, turned.to(out.dtype.element_ty), mask=mask)


def rotated(x: Tensor, rotation: Tensor, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """Return contiguous `x` `[..., D]` times `rotation` `[D, D]` float32, plus `added` of its shape, in `dtype`."""
    out, dim = torch.empty_like(x, dtype=dtype), x.shape[-1]
    rows, padded = x.numel() // dim, max(CHUNK, next_power_of_2(dim))
    together = rows_of_program(rows)
    with torch.cuda.device_of(x):
        _rotate_rows[(cdiv(rows, together), cdiv(dim, CHUNK))](
            x, rotation, added, out, rows, *rotation.stride(), dim, padded, together, CHUNK,
            num_warps=4 if together == 1 else 2,
        )  # fmt: skip
    return out
