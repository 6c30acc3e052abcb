"""What stands around attention: queries are rotated before it, and splits are joined and rotated back after it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    x, rotation, out, num_rows, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Compute `x @ rotation` for ROWS rows [DIM] and CHUNK channels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    every = tl.arange(0, PADDED)
    rows = tl.load(x + row * DIM + every, mask=(row < num_rows) & (every < DIM), other=0.0).to(tl.float32)
    turn = tl.load(rotation + every[:, None] * DIM + channel, mask=(every[:, None] < DIM) & (channel < DIM), other=0.0)
    turned = tl.dot(rows, turn, input_precision="tf32x3")
    tl.store(out + row * DIM + channel, turned.to(out.dtype.element_ty), mask=(row < num_rows) & (channel < DIM))


def rotated(q: Tensor, rotation: Tensor | None) -> Tensor:
    """Return contiguous `q` `[..., D]` times `rotation` `[D, D]` float32, in q's dtype; q itself for None."""
    if rotation is None:
        return q
    out, dim = torch.empty_like(q), q.shape[-1]
    rows, padded = q.numel() // dim, max(16, next_power_of_2(dim))
    with torch.cuda.device_of(q):
        _rotate_rows[(-(-rows // 16), -(-padded // 32))](
            q, rotation.contiguous(), out, rows, dim, padded, ROWS=16, CHUNK=min(32, padded), num_warps=2
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_queries", "rows_of_batch", "past_splits", "num_splits"])
def join(
    partial, lse, out, rotation, dense_end, dense_start, num_rows, num_queries, rows_of_batch, past_splits, num_splits,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of ROWS rows, CHUNK channels; `rotation` [DIM, DIM] turns the packed tokens' output back."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    for first in range(0, num_splits, SPLITS):
        split_lse = _split_lse(lse, row, num_rows, first, num_splits, SPLITS)
        largest = tl.maximum(largest, tl.max(split_lse, 0))
    reference = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros((ROWS,), tl.float32)
    if rotation is None:
        result, total = _weighted(
            partial, lse, row, num_rows, reference, channel, total, 0, num_splits, DIM, CHUNK, SPLITS
        )
    else:
        every = tl.arange(0, PADDED)
        turned, total = _weighted(
            partial, lse, row, num_rows, reference, every, total, 0, past_splits, DIM, PADDED, SPLITS
        )
        result, total = _weighted(
            partial, lse, row, num_rows, reference, channel, total, past_splits, num_splits, DIM, CHUNK, SPLITS
        )
        mask = (every[:, None] < DIM) & (channel < DIM)
        back = tl.load(rotation + channel * DIM + every[:, None], mask=mask, other=0.0)  # the transpose
        result = tl.dot(turned, back, result, input_precision="tf32x3")
    seen = total > 0
    if dense_start is not None:
        # A query of padding sees nothing, not even packed tokens.
        batch = row // rows_of_batch
        held = row < num_rows
        own_slot = tl.load(dense_end + batch, mask=held, other=0) - num_queries + row % num_queries
        seen = seen & (own_slot >= tl.load(dense_start + batch, mask=held, other=0))
    result = tl.where(seen[:, None], result / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    mask = (row[:, None] < num_rows) & (channel < DIM)
    tl.store(out + row[:, None].to(tl.int64) * DIM + channel, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_lse(lse, row, num_rows, first, stop, SPLITS: tl.constexpr):
    """Load the lse of SPLITS splits, [SPLITS, rows]; -inf from stop on."""
    split = first + tl.arange(0, SPLITS)[:, None]
    written = (split < stop) & (row < num_rows)
    return tl.load(lse + split.to(tl.int64) * num_rows + row, mask=written, other=-float("inf"))


@triton.jit
def _weighted(
    partial, lse, row, num_rows, reference, channel, total, begin, stop, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the splits' outputs [rows, CHANNELS] by weight, and `total` with the weights added."""
    acc = tl.zeros((total.shape[0], CHANNELS), tl.float32)
    for first in range(begin, stop, SPLITS):
        weights = tl.exp2(_split_lse(lse, row, num_rows, first, stop, SPLITS) - reference)
        split = first + tl.arange(0, SPLITS)[:, None, None]
        offset = (split.to(tl.int64) * num_rows + row[None, :, None]) * DIM + channel
        mask = (split < stop) & (row[None, :, None] < num_rows) & (channel < DIM)
        outs = tl.load(partial + offset, mask=mask, other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(weights[:, :, None] * outs, 0)
    return acc, total
