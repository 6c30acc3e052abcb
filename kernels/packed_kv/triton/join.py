"""The splits of attention are joined, and the packed tokens' share is rotated back."""

import triton
import triton.language as tl

from kernels.packed_kv.triton.rotation import load_chunk, product


@triton.jit(do_not_specialize=["num_rows", "num_queries", "rows_of_batch", "past_splits", "num_splits"])
def join(
    partial, lse, out, past_out, rotation, dense_end, dense_start, num_rows, num_queries, rows_of_batch, past_splits,
    num_splits, from_stride, to_stride,
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
        turn = load_chunk(rotation, every, channel, from_stride, to_stride, DIM)
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
    turned = product(past, turn, 1) if TURNS else past
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
