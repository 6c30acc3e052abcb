"""What stands around attention: queries are rotated before it, and splits are joined and rotated back after it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    x, rotation, added, out, num_rows, rotation_from, rotation_to,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute `x @ rotation + added` for ROWS rows [DIM] and CHUNK channels; added may be None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    every = tl.arange(0, PADDED)
    rows = tl.load(x + row * DIM + every, mask=(row < num_rows) & (every < DIM), other=0.0).to(tl.float32)
    turn = tl.load(
        rotation + every[:, None] * rotation_from + channel * rotation_to,
        mask=(every[:, None] < DIM) & (channel < DIM), other=0.0,
    )  # fmt: skip
    turned = tl.dot(rows, turn, input_precision="tf32x3")
    mask = (row < num_rows) & (channel < DIM)
    if added is not None:
        turned += tl.load(added + row * DIM + channel, mask=mask, other=0.0)
    tl.store(out + row * DIM + channel, turned.to(out.dtype.element_ty), mask=mask)


def rotated(x: Tensor, rotation: Tensor, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """Return contiguous `x` `[..., D]` times `rotation` `[D, D]` float32, plus `added` of its shape, in `dtype`."""
    out, dim = torch.empty_like(x, dtype=dtype), x.shape[-1]
    rows, padded = x.numel() // dim, max(16, next_power_of_2(dim))
    with torch.cuda.device_of(x):
        _rotate_rows[(-(-rows // 16), -(-padded // 32))](
            x, rotation, added, out, rows, *rotation.stride(), dim, padded, ROWS=16, CHUNK=min(32, padded), num_warps=2
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_queries", "rows_of_batch", "past_splits", "num_splits"])
def join(
    partial, lse, out, past_out, rotation, dense_end, dense_start, num_rows, num_queries, rows_of_batch, past_splits,
    num_splits, rotation_from, rotation_to,
    DIM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of a row, CHUNK channels.

    With past_out the packed tokens' share goes there. With a rotation it is multiplied by that, [DIM, DIM], here.
    """
    TURNS: tl.constexpr = rotation is not None
    APART: tl.constexpr = TURNS or past_out is not None
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    every = tl.arange(0, PADDED)
    if TURNS:
        # Loaded first: it waits for nothing.
        turn = tl.load(
            rotation + every[:, None] * rotation_from + channel * rotation_to,
            mask=(every[:, None] < DIM) & (channel < DIM), other=0.0,
        )  # fmt: skip
    largest, total = -float("inf"), 0.0
    past = tl.zeros((PADDED if TURNS else CHUNK,), tl.float32)
    dense = tl.zeros((CHUNK,), tl.float32)
    # All loads of a step are independent of each other: its time is that of one.
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        written, is_past = split < num_splits, split < past_splits
        place = split.to(tl.int64) * num_rows + row
        split_lse = tl.load(lse + place, mask=written, other=-float("inf"))
        past_outs = _split_outs(partial, place, is_past if APART else written, every if TURNS else channel, DIM)
        if APART:
            dense_outs = _split_outs(partial, place, written & (split >= past_splits), channel, DIM)
        new_largest = tl.maximum(largest, tl.max(split_lse, 0))
        # -inf - -inf is NaN: a row that has seen nothing yet uses the reference 0.
        reference = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights, shrink = tl.exp2(split_lse - reference), tl.exp2(largest - reference)
        past = past * shrink + tl.sum(weights[:, None] * past_outs, 0)
        if APART:
            dense = dense * shrink + tl.sum(weights[:, None] * dense_outs, 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new_largest
    turned = tl.sum(past[:, None] * turn, 0) if TURNS else past
    seen = total != 0  # NaN is seen
    if dense_start is not None:
        # A query of padding sees nothing, not even packed tokens.
        batch = row // rows_of_batch
        own_slot = tl.load(dense_end + batch) - num_queries + row % num_queries
        seen = seen & (own_slot >= tl.load(dense_start + batch))
    share = 1 / tl.where(total == 0, 1.0, total)
    place, mask = row.to(tl.int64) * DIM + channel, channel < DIM
    if past_out is not None:
        tl.store(past_out + place, tl.where(seen, turned * share, 0.0), mask=mask)
    else:
        dense += turned
    tl.store(out + place, tl.where(seen, dense * share, 0.0).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_outs(partial, place, used, channel, DIM: tl.constexpr):
    """Load the outputs [splits, channels] of the splits at these places, 0 for those that are not used."""
    mask = used[:, None] & (channel < DIM)
    return tl.load(partial + place[:, None] * DIM + channel, mask=mask, other=0.0)
