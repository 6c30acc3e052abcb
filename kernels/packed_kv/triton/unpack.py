"""Packed tokens for many queries at once: unpacked into a buffer, some rows of the batch at a time.

Attention of a prompt's chunk takes far longer than reading its keys and values: there the fastest attention over 16
bits is worth more than not to write them down. The buffer holds the packed tokens of a few rows and one layer, and the
dense tokens behind them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention import forgetting_attention
from kernels.packed_kv.formats import Packed, PackedPast
from kernels.packed_kv.reference import error_variance, read_squares
from kernels.packed_kv.triton.products import scale_and_offset
from kernels.rounding import next_power_of_2

BUFFER_BYTES = 2**29
"""Keys and values that are unpacked at once, one row at least."""

MAX_EXCESS = 1e4
"""Weights of less than `exp(-MAX_EXCESS)` are 0; larger sums would cost their neighbors precision."""


def attend_unpacked(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
) -> Tensor:
    """Compute `packed_attention` for more than MANY_QUERIES queries; same arguments."""
    tokens = past.keys.blocks * past.keys.block + dense_keys.shape[2]
    of_row = tokens * (dense_keys[0, :, 0].numel() + dense_values[0, :, 0].numel()) * q.element_size()
    step = max(1, BUFFER_BYTES // of_row)
    parts = []
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        some = PackedPast(
            *(side.map(lambda x, rows=rows: x[rows]) for side in (past.keys, past.values)),
            past.blocks[rows],
            None if past.decay is None else past.decay[rows],
            past.key_rotation,
            past.value_rotation,
            past.debias,
        )
        start, sums = (None if x is None else x[rows] for x in (dense_start, decay))
        parts.append(
            _attend_rows(q[rows], dense_keys[rows], dense_values[rows], dense_end[rows], start, sums, some, scale)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_rows(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
) -> Tensor:
    packed = past.keys.blocks * past.keys.block
    unused = packed - past.blocks * past.keys.block  # before the packed tokens
    padding = torch.zeros_like(dense_end) if dense_start is None else dense_start
    keys, values = (
        _side_by_side(side, past.blocks, dense, padding, None if turn is None else turn.mT)
        for side, dense, turn in (
            (past.keys, dense_keys, past.key_rotation),
            (past.values, dense_values, past.value_rotation),
        )
    )
    # What is taken from logits by key alone is a sum of gates up to it.
    past_sums, dense_sums = None if past.decay is None else past.decay.flatten(2), decay
    if past.debias:
        squares = read_squares(q, past.key_rotation, dense_end, dense_start, scale)
        excess = error_variance(past.keys, squares)[:, :, 0] / 2
        slot = torch.arange(packed, device=q.device)
        excess = excess.masked_fill(slot >= (packed - unused)[:, None, None], 0.0).clamp(max=MAX_EXCESS)
        past_sums = excess if past_sums is None else past_sums + excess
        dense_sums = excess.new_zeros(*q.shape[:2], dense_keys.shape[2]) if decay is None else decay
    sums = None
    if past_sums is not None:
        assert dense_sums is not None
        sums = torch.cat((_at_the_end(past_sums, unused), _from_the_start(dense_sums, padding)), 2)
    out = forgetting_attention(
        *(x.transpose(1, 2) for x in (q, keys, values)),
        None if sums is None else sums.transpose(1, 2),
        scale=scale,
        kv_start=unused,
        kv_end=packed + dense_end - padding,
        cumulative=sums is not None,
    )
    assert isinstance(out, Tensor)  # a pair only with return_lse
    out = out.transpose(1, 2)
    if dense_start is not None:
        own = dense_end[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
        out = out.masked_fill((own < dense_start[:, None])[:, None, :, None], 0.0)  # a query of padding sees nothing
    return out


def _side_by_side(side: Packed, blocks: Tensor, dense: Tensor, padding: Tensor, back: Tensor | None) -> Tensor:
    """Return `[B, H, packed + slots, D]`: a row's packed tokens end at place `packed`, its dense ones begin there."""
    batch, heads, count, block = *side.low.shape[:3], side.block
    packed, dim = count * block, side.head_dim
    out = dense.new_empty(batch, heads, packed + dense.shape[2], dim)
    out[:, :, packed:] = _from_the_start(dense, padding)
    # In float32 where it is rotated back: a rotated float16 may leave its range.
    target = out if back is None else out.new_empty(batch, heads, packed, dim, dtype=back.dtype)
    high = side.format.high_of(dim)
    group = 0 if side.format.groups_along == "tokens" else side.format.group
    with torch.cuda.device_of(dense):
        _unpack_block[(count, heads, batch)](
            side.low, side.high, side.metadata.view(torch.int32), blocks, target, *target.stride()[:2],
            dim, block, high, group, side.by_channel, next_power_of_2(dim), min(64, next_power_of_2(block)),
            num_warps=4,
        )  # fmt: skip
    if back is not None:
        out[:, :, :packed] = target @ back
    return out


def _from_the_start(x: Tensor, padding: Tensor) -> Tensor:
    """Return `x` `[B, H, S, ...]` with each row's slots moved to the front by its padding."""
    place = torch.arange(x.shape[2], device=x.device) + padding[:, None].long()
    return _gathered(x, place.clamp(max=x.shape[2] - 1))


def _at_the_end(x: Tensor, unused: Tensor) -> Tensor:
    """Return `x` `[B, H, S]` with each row's numbers moved to the end by what is unused."""
    return _gathered(x, (torch.arange(x.shape[2], device=x.device) - unused[:, None].long()).clamp(min=0))


def _gathered(x: Tensor, place: Tensor) -> Tensor:
    place = place.reshape(len(place), 1, -1, *(1,) * (x.ndim - 3))
    return x.gather(2, place.expand(-1, x.shape[1], -1, *x.shape[3:]))


@triton.jit
def _unpack_block(
    low, high, metadata, blocks, out, out_b, out_h,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, BY_CHANNEL: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write a block's numbers; a row's blocks in use end where its storage ends. GROUP is 0 for groups along tokens."""
    count, heads = tl.num_programs(0), tl.num_programs(1)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    used = tl.load(blocks + row)
    if block < used:
        source = (row * heads + head) * count + block
        channel = tl.arange(0, PADDED)
        exists = channel < DIM
        for first in range(0, BLOCK, TOKENS):
            token = first + tl.arange(0, TOKENS)[:, None]
            mask = exists & (token < BLOCK)
            codes = _codes(low + source * (BLOCK * DIM // 4), token, channel, mask, DIM, BLOCK, BY_CHANNEL)
            if HIGH:
                codes += 4 * _codes(
                    high + source * (BLOCK * HIGH // 4),
                    token,
                    channel,
                    mask & (channel < HIGH),
                    HIGH,
                    BLOCK,
                    BY_CHANNEL,
                )
            if GROUP:
                group = source * (DIM // GROUP) + channel // GROUP
                pair = tl.load(metadata + group * BLOCK + token, mask=mask, other=0)
            else:
                pair = tl.load(metadata + source * DIM + channel, mask=exists, other=0)[None]
            scale, offset = scale_and_offset(pair)
            numbers = scale * (codes.to(tl.float32) + offset)
            place = (count - used + block) * BLOCK + token
            target = out + row * out_b + head * out_h + place.to(tl.int64) * DIM + channel
            tl.store(target, numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _codes(words, token, channel, mask, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return the codes of one plane as int32, 0 outside the mask."""
    word = channel % (CHANNELS // 4)
    place = word * BLOCK + token if BY_CHANNEL else token * (CHANNELS // 4) + word
    held = tl.load(words + place, mask=mask, other=0).to(tl.int32)
    return (held >> (2 * (channel // (CHANNELS // 4)))) & 3
