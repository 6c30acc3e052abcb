"""Packing slots of a cache into its blocks in one launch, as `kernels.packed_kv.reference.pack` defines it."""
# ruff: noqa: RUF005  # Triton has no starred expressions

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed_kv.formats import MAX_OFFSET, MAX_SCALE, Packed
from kernels.packed_kv.triton.products import ROUNDING, padded
from kernels.rounding import next_power_of_2

GREATEST_SCALE, GREATEST_OFFSET = tl.constexpr(MAX_SCALE), tl.constexpr(MAX_OFFSET)


def can_pack(x: Tensor) -> bool:
    """Return whether `pack_slots` takes these numbers."""
    return x.is_cuda and x.dtype != torch.float64


def pack_slots(x: Tensor, slots: Tensor, side: Packed, cells: Tensor) -> None:
    """Quantize the tokens in some slots, and write them as whole blocks.

    Args:
        x: `[B, H, S, D]`, float16, bfloat16 or float32.
        slots: int64 `[B or 1, G or 1, n]`, n a multiple of the block: the tokens of each row and group of heads.
        side: written to.
        cells: int64 `[3, c]`: rows, which of their n / block new blocks, and where each belongs in `side`.
    """
    batch, heads, _, dim = x.shape
    block, format = side.block, side.format
    slots = slots.expand(batch, -1, -1)
    x = x if x.stride(3) == 1 else x.contiguous()
    groups = 0 if format.groups_along == "tokens" else dim // format.group
    kept = format.group - format.clip_rank if format.clip < 1 else 0
    with torch.cuda.device_of(x):
        _pack_block[(cells.shape[1], heads)](
            x, slots, side.low, side.high, side.metadata.view(torch.int32), cells, *x.stride()[:3], *slots.stride()[:2],
            slots.stride(2), heads // slots.shape[1], cells.shape[1], side.blocks, dim, block, groups,
            format.high_of(dim), kept, side.by_channel, padded(dim // 4, 1), next_power_of_2(block), num_warps=8,
        )  # fmt: skip


@triton.jit
def _bound(tiles, exists, FIRST: tl.constexpr, END: tl.constexpr, KEPT: tl.constexpr, AXIS: tl.constexpr):
    """Return the KEPT-th largest absolute value along an axis of the tiles from FIRST to END, bit by bit."""
    none = tl.sum(tl.zeros(tiles[0].shape, tl.int32), AXIS, keep_dims=True)
    bound = none
    for bit in range(31):
        # Floats of one sign are in the order of their bits.
        candidate = bound | (1 << (30 - bit))
        count = none
        for tile in tl.static_range(FIRST, END):
            bits = tl.abs(tiles[tile]).to(tl.int32, bitcast=True)
            count += tl.sum((exists & (bits >= candidate)).to(tl.int32), AXIS, keep_dims=True)
        bound = tl.where(count >= KEPT, candidate, bound)
    return bound.to(tl.float32, bitcast=True)


@triton.jit
def _clamped(x, bound):
    return tl.minimum(tl.maximum(x, -bound), bound)


@triton.jit
def _extremes(numbers, exists, AXIS: tl.constexpr):
    """Return the least and the largest number along an axis, and whether there is a NaN."""
    least = tl.min(tl.where(exists, numbers, float("inf")), AXIS, keep_dims=True)
    most = tl.max(tl.where(exists, numbers, -float("inf")), AXIS, keep_dims=True)
    return least, most, tl.max((exists & (numbers != numbers)).to(tl.int32), AXIS, keep_dims=True)


@triton.jit
def _quantized(least, most, has_nan, levels):
    """Return scale and offset, rounded to float16, and what a number is divided by; `levels` is float32."""
    scale = tl.maximum(tl.div_rn(most - least, levels), tl.abs(least) * (1 / GREATEST_OFFSET))
    scale = tl.minimum(scale, GREATEST_SCALE).to(tl.float16)
    step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
    offset = tl.div_rn(least, step).to(tl.float16)
    return tl.where(has_nan != 0, float("nan"), scale.to(tl.float32)).to(tl.float16), offset, step


@triton.jit
def _codes(numbers, offset, step, levels):
    """Return the codes as int32."""
    codes = tl.div_rn(numbers, tl.broadcast_to(step, numbers.shape)) - offset.to(tl.float32)
    codes = tl.minimum(tl.maximum(codes, 0.0), levels)
    # The nearest whole number lies in the low bits; of two equally near, the even one.
    return (codes + ROUNDING).to(tl.int32, bitcast=True) & 15


@triton.jit
def _as_pair(scale, offset):
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (offset.to(tl.int16, bitcast=True).to(tl.int32) << 16)


# Not specialized: a cache packs in the middle of decoding, where a compilation would be a long pause.
@triton.jit(
    do_not_specialize=[
        "x_b", "x_h", "x_s", "slots_b", "slots_g", "slots_n", "heads_per_group", "num_cells", "capacity",
    ]
)  # fmt: skip
def _pack_block(
    x, slots, low, high, metadata, cells, x_b, x_h, x_s, slots_b, slots_g, slots_n, heads_per_group, num_cells,
    capacity,
    DIM: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, KEPT: tl.constexpr,
    BY_CHANNEL: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of one head. GROUPS is 0 for groups along tokens, KEPT where nothing is clipped."""
    MIXED: tl.constexpr = HIGH != 0 and HIGH != DIM
    WORDS: tl.constexpr = DIM // 4
    cell, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(cells + cell)
    source, target = tl.load(cells + num_cells + cell), tl.load(cells + 2 * num_cells + cell)
    token, word = tl.arange(0, TOKENS)[:, None], tl.arange(0, PADDED)[None]
    exists = (token < BLOCK) & (word < WORDS)
    of_slots = slots + row * slots_b + (head // heads_per_group) * slots_g + (source * BLOCK + token) * slots_n
    slot = tl.load(of_slots, mask=token < BLOCK, other=0)
    place = ((row * tl.num_programs(1) + head) * capacity + target).to(tl.int64)
    at = x + row * x_b + head.to(tl.int64) * x_h + slot * x_s
    tiles, leasts, mosts, nans, bounds = (), (), (), (), ()
    axis: tl.constexpr = 0 if GROUPS == 0 else 1
    for tile in tl.static_range(4):
        numbers = tl.load(at + tile * WORDS + word, mask=exists, other=0.0).to(tl.float32)
        least, most, has_nan = _extremes(numbers, exists, axis)
        tiles, leasts, mosts, nans = tiles + (numbers,), leasts + (least,), mosts + (most,), nans + (has_nan,)
    if KEPT:
        SHARED: tl.constexpr = 1 if GROUPS == 0 else 4 // GROUPS  # tiles of a group
        for first in tl.static_range(0, 4, SHARED):
            bounds = bounds + (_bound(tiles, exists, first, first + SHARED, KEPT, axis),)
    low_words = tl.zeros((TOKENS, PADDED), tl.int32)
    high_words = tl.zeros((TOKENS, PADDED), tl.int32)
    for tile in tl.static_range(4):
        least, most, has_nan, numbers = leasts[tile], mosts[tile], nans[tile], tiles[tile]
        if GROUPS:
            for other in tl.static_range(4):
                if other * GROUPS // 4 == tile * GROUPS // 4:
                    least = tl.minimum(least, leasts[other])
                    most = tl.maximum(most, mosts[other])
                    has_nan = tl.maximum(has_nan, nans[other])
        if KEPT:
            bound = bounds[tile // SHARED]
            least, most, numbers = _clamped(least, bound), _clamped(most, bound), _clamped(numbers, bound)
        levels = tl.where(tile * WORDS + word < HIGH, 15.0, 3.0)
        if GROUPS:
            levels = tl.full((1, 1), 15.0 if HIGH else 3.0, tl.float32)
        scale, offset, step = _quantized(least, most, has_nan, levels)
        codes = _codes(numbers, offset, step, levels)
        low_words |= (codes & 3) << (2 * tile)
        high_words |= (codes >> 2) << (2 * tile)
        if GROUPS == 0:
            tl.store(metadata + place * DIM + tile * WORDS + word, _as_pair(scale, offset), mask=word < WORDS)
        elif tile * GROUPS // 4 != (tile - 1) * GROUPS // 4:  # the first tile of a group
            group = tile * GROUPS // 4
            tl.store(metadata + (place * GROUPS + group) * BLOCK + token, _as_pair(scale, offset), mask=token < BLOCK)
    inside = word * BLOCK + token if BY_CHANNEL else token * WORDS + word
    tl.store(low + place * (BLOCK * WORDS) + inside, low_words.to(tl.uint8), mask=exists)
    if MIXED:
        # The high plane's tiles are others: its few channels are quantized once more.
        high_words = _high_words(at, exists & (word < HIGH // 4), word, HIGH // 4, KEPT)
        inside = word * BLOCK + token if BY_CHANNEL else token * (HIGH // 4) + word
        tl.store(high + place * (BLOCK * HIGH // 4) + inside, high_words.to(tl.uint8), mask=exists & (word < HIGH // 4))
    elif HIGH:
        tl.store(high + place * (BLOCK * WORDS) + inside, high_words.to(tl.uint8), mask=exists)


@triton.jit
def _high_words(at, exists, word, WORDS: tl.constexpr, KEPT: tl.constexpr):
    """Return the high plane of channels with groups along tokens."""
    words = tl.zeros(exists.shape, tl.int32)
    for tile in tl.static_range(4):
        numbers = tl.load(at + tile * WORDS + word, mask=exists, other=0.0).to(tl.float32)
        least, most, has_nan = _extremes(numbers, exists, 0)
        if KEPT:
            bound = _bound((numbers,), exists, 0, 1, KEPT, 0)
            least, most, numbers = _clamped(least, bound), _clamped(most, bound), _clamped(numbers, bound)
        levels = tl.full((1, 1), 15.0, tl.float32)
        _scale, offset, step = _quantized(least, most, has_nan, levels)
        words |= (_codes(numbers, offset, step, levels) >> 2) << (2 * tile)
    return words
