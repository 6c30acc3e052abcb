"""Attention over packed and 16-bit tokens in Triton: one launch over all splits of the tokens, and one that joins them.

    s_ij = scale q_i . k_j + c_i - c_j        o_i = sum_j softmax_j(s_ij) v_j

A program owns a group of query heads that share a key head and a value head, a tile of rows (query x head), and one
split of the tokens: of the packed blocks, or of the dense slots. Eight 2-bit codes lie in each 16-bit word, for eight
tiles of D / 8 channels. Two words fill a 32-bit register, and at most two instructions make two operands of tile i
from it:

    (register >> 6 (i / 3)) & mask_i  =  4^e_i code 2^-24        with e_i = i mod 3

as the bits of two float16 numbers below the normal range, which tensor cores multiply exactly: no number is converted.
What is left is linear algebra on the small side of each product:

    keys, groups along channels:  q . k_j   = sum_g scale_jg (q_g . code_j + offset_jg sum(q_g))
    keys, groups along tokens:    q . k_j   = (q * scale) . (code_j + offset)
    values, along channels:       sum p v   = sum_j (p_j scale_j) code_j + sum_j (p_j scale_j) offset_j
    values, along tokens:         sum p v   = scale * (sum_j p_j code_j + offset sum_j p_j)

with 4^-e_i in the query or in the result, both exact. Rotations: the query comes rotated for the packed tokens, and the
join turns their output back. A row's blocks are divided evenly among the splits on the device: a captured launch stays
right as the cache grows.
"""
# ruff: noqa: RUF005  # Triton has no starred expressions

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed_kv.formats import Packed, PackedPast
from kernels.rounding import next_power_of_2

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN_2 = math.log(2.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

MAX_TOKENS = 128
"""Packed tokens of one step."""
DENSE_TILE = 32
"""Dense tokens of one step."""
SLOTS_PER_SPLIT = 128
"""Dense slots of one program."""
BLOCKS_PER_DENSE_SPLIT = 3
"""Packed blocks that take as long as SLOTS_PER_SPLIT dense slots."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs that a multiprocessor runs at once: their registers fill it."""
JOIN_CHUNK, JOIN_SPLITS = 32, 128
"""Channels of one program of the join, and the most splits of one of its steps."""
NUM_STAGES = 3
"""Depth of the pipeline that loads blocks."""
MAX_QUERIES = 16
"""Queries up to which one launch also covers the dense tokens."""


@triton.jit
def _tile(words, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of tile TILE of int16 words, times `_unit`, in DTYPE."""
    SHIFT: tl.constexpr = 6 * (TILE // 3)
    MASK: tl.constexpr = 3 << (2 * (TILE % 3))
    if DTYPE == tl.float32:  # noqa: SIM300
        return ((words >> SHIFT) & MASK).to(tl.float32)
    elif INTERPRETED:  # noqa: RET505  # Triton compiles what follows a return, but no other branch
        return ((words >> SHIFT) & MASK).to(tl.float16, bitcast=True)
    else:
        # Two words of a register at once.
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; and.b32 $0, t, {MASK | (MASK << 16)}; }}",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.constexpr_function
def _unit(tile, dtype):
    """Return what `_tile` makes of the code 1."""
    return 4.0 ** (tile % 3) * (1.0 if dtype == tl.float32 else 2.0**-24)


@triton.constexpr_function
def _padded(size, least):
    """Return the power of 2 that holds `size` channels or words."""
    return max(least, triton.next_power_of_2(size))


@triton.jit
def _query_tiles(q, row_offset, row_used, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the rows' queries as eight tiles [PADDED, rows] of WORDS channels each, 0 beyond."""
    word = tl.arange(0, PADDED)[:, None]
    mask = row_used & (word < WORDS)
    tiles = ()
    for tile in tl.static_range(8):
        tiles = tiles + (tl.load(q + row_offset + tile * WORDS + word, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _largest(tiles):
    """Return the power of 2 that the absolute values of each row of the tiles do not exceed, [rows] float32."""
    largest = tl.full((tiles[0].shape[1],), 2.0**-60, tl.float32)
    for tile in tl.static_range(8):
        largest = tl.maximum(largest, tl.max(tl.abs(tiles[tile].to(tl.float32)), 0))
    return tl.exp2(tl.ceil(tl.log2(largest)))


@triton.jit
def _divided(tiles, divisor, DTYPE: tl.constexpr):
    """Return the tiles divided by `divisor` [rows], in DTYPE."""
    new = ()
    for tile in tl.static_range(8):
        new = new + ((tiles[tile].to(tl.float32) / divisor).to(DTYPE),)
    return new


@triton.jit
def _scaled(queries, WEIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the tiles of the queries, divided by the powers of 4 in the codes' units, times WEIGHT."""
    tiles = ()
    for tile in tl.static_range(8):
        scaled = queries[tile].to(tl.float32) * (WEIGHT / _unit(tile % 3, tl.float32))
        tiles = tiles + (scaled.to(DTYPE),)
    return tiles


@triton.jit
def _scaled_by_channel(
    queries, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr, WEIGHT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return `_scaled` with a block's scales in it."""
    word = tl.arange(0, PADDED)[:, None]
    tiles = ()
    for tile in tl.static_range(8):
        scale = tl.load(metadata + tile * WORDS + word, mask=word < WORDS, other=0.0).to(tl.float32)
        scaled = queries[tile].to(tl.float32) * (scale * (WEIGHT / _unit(tile % 3, tl.float32)))
        tiles = tiles + (scaled.to(DTYPE),)
    return tiles


@triton.jit
def _offset_scores(queries, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return `(q * scale) . offset` of a block whose scales belong to channels, [rows]."""
    word = tl.arange(0, PADDED)[:, None]
    terms = tl.zeros(queries[0].shape, tl.float32)
    for tile in tl.static_range(8):
        channel = tile * WORDS + word
        scale = tl.load(metadata + channel, mask=word < WORDS, other=0.0).to(tl.float32)
        offset = tl.load(metadata + HEAD_DIM + channel, mask=word < WORDS, other=0.0).to(tl.float32)
        terms += queries[tile].to(tl.float32) * (scale * offset)
    return tl.sum(terms, 0)


@triton.jit
def _group_sum(tiles, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sum over the channels of a group of the tiles, [rows] float32."""
    total = tl.zeros((tiles[0].shape[1],), tl.float32)
    for tile in tl.static_range(8):
        if tile * GROUPS // 8 == GROUP:
            total += tl.sum(tiles[tile].to(tl.float32), 0)
    return total


@triton.jit
def _add_products(scores, queries, words, GROUP: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """Add to scores [tokens, rows] the products of a group's tiles with the codes of one plane [tokens, PADDED]."""
    for tile in tl.static_range(8):
        if tile * GROUPS // 8 == GROUP:
            scores = tl.dot(_tile(words, tile, DTYPE), queries[tile], scores, input_precision=PRECISION)
    return scores


@triton.jit
def _weighted_codes(acc, weights, words, high_words, TILE: tl.constexpr, FOUR_BITS: tl.constexpr,
                    DTYPE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the codes of tile TILE times `weights` [tokens, rows] to acc [PADDED, rows]; codes are in their units."""
    acc = tl.dot(_tile(words, TILE, DTYPE), weights, acc, input_precision=PRECISION)
    if FOUR_BITS:
        high = (weights.to(tl.float32) * 4).to(DTYPE)
        acc = tl.dot(_tile(high_words, TILE, DTYPE), high, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _add_values_along_tokens(
    accs, shrink, weights, words, high_words, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the eight tiles of values with a block's added: its scales and offsets belong to channels."""
    word = tl.arange(0, PADDED)[:, None]
    rounded = weights.to(DTYPE)
    total = tl.sum(weights, 0)
    new = ()
    for tile in tl.static_range(8):
        codes = tl.zeros((PADDED, weights.shape[1]), tl.float32)
        codes = _weighted_codes(codes, rounded, words, high_words, tile, FOUR_BITS, DTYPE, PRECISION)
        channel = tile * WORDS + word
        scale = tl.load(metadata + channel, mask=word < WORDS, other=0.0).to(tl.float32)
        offset = tl.load(metadata + HEAD_DIM + channel, mask=word < WORDS, other=0.0).to(tl.float32)
        new = new + (accs[tile] * shrink + (codes * (1 / _unit(tile, DTYPE)) + total * offset) * scale,)
    return new


@triton.jit
def _add_values_along_channels(
    accs, sums, shrink, weights, words, high_words, metadata, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the eight tiles of weighted codes with a block's added, and each group's sum of weight * scale * offset.

    The sum is a product too, in rows that are all the same: Triton's pipeline loads only what leads to a product.
    """
    token = tl.arange(0, TOKENS)
    new, new_sums = (), ()
    for group in tl.static_range(GROUPS):
        scale = tl.load(metadata + group * BLOCK + token[:, None]).to(tl.float32)
        rounded = (weights * scale).to(DTYPE)
        offset = tl.load(metadata + (GROUPS + group) * BLOCK + token[None]).to(DTYPE)
        offset = tl.broadcast_to(offset, (16, TOKENS))
        new_sums = new_sums + (tl.dot(offset, rounded, sums[group] * shrink, input_precision=PRECISION),)
        for tile in tl.static_range(8):
            if tile * GROUPS // 8 == group:
                acc = accs[tile] * shrink
                new = new + (_weighted_codes(acc, rounded, words, high_words, tile, FOUR_BITS, DTYPE, PRECISION),)
    return new, new_sums


@triton.jit
def _softmax_step(scores, row_max, row_sum):
    """Return the weights of scores [tokens, rows], the factor on what came before, the new maximum and sum (base 2)."""
    new_max = tl.maximum(row_max, tl.max(scores, 0))
    # -inf - -inf is NaN: a row that has seen nothing yet uses the reference 0.
    reference = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference)
    shrink = tl.exp2(row_max - reference)
    return weights, shrink, new_max, row_sum * shrink + tl.sum(weights, 0)


@triton.jit
def _store_lse(lse, result_row, row_used, row_max, row_sum):
    """Store the lse of the rows; return the reciprocal of their sums, 1 where nothing was seen."""
    total = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(lse + result_row, row_max + tl.log2(total), mask=row_used)
    return 1 / total


@triton.jit
def _attend_blocks(
    q, row_offset, row_used, row_head, own_decay, begin, stop, key_words, key_high, key_metadata, value_words,
    value_high, value_metadata, past_decay, partial, lse, result_row, scale, block_capacity,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, HIGH_KEYS: tl.constexpr, FOUR_BIT_VALUES: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks from begin to stop; pointers are the head's. *_GROUPS is 0 for groups along tokens."""
    WORDS: tl.constexpr = KEY_DIM // 8
    HIGH_WORDS: tl.constexpr = HIGH_KEYS // 8
    VALUE_WORDS: tl.constexpr = VALUE_DIM // 8
    PADDED: tl.constexpr = _padded(WORDS, 16)  # the least sum that a product on tensor cores takes
    HIGH_PADDED: tl.constexpr = _padded(HIGH_WORDS, 16)
    VALUE_PADDED: tl.constexpr = _padded(VALUE_WORDS, 16)
    KEY_METADATA: tl.constexpr = 2 * KEY_DIM if KEY_GROUPS == 0 else 2 * KEY_GROUPS * BLOCK
    VALUE_METADATA: tl.constexpr = 2 * VALUE_DIM if VALUE_GROUPS == 0 else 2 * VALUE_GROUPS * BLOCK
    word = tl.arange(0, PADDED)
    high_word, value_word = tl.arange(0, HIGH_PADDED), tl.arange(0, VALUE_PADDED)
    queries = _query_tiles(q, row_offset, row_used, WORDS, PADDED)
    high_queries = queries
    if HIGH_KEYS and HIGH_KEYS != KEY_DIM:
        high_queries = _query_tiles(q, row_offset, row_used, HIGH_WORDS, HIGH_PADDED)
    # Queries of 1 at most, times scales that fill float16's range, stay in it and above its smallest numbers.
    largest = _largest(queries)
    queries, high_queries = _divided(queries, largest, DTYPE), _divided(high_queries, largest, DTYPE)
    scale *= largest
    low_scaled, high_scaled = _scaled(queries, 1, DTYPE), _scaled(high_queries, 4, DTYPE)
    totals = ()
    for group in tl.static_range(KEY_GROUPS):
        totals = totals + (_group_sum(queries, group, KEY_GROUPS) * scale,)
    unit = scale * (1 / _unit(0, DTYPE))
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    accs, sums = (), ()
    for _ in tl.static_range(8):
        accs = accs + (tl.zeros((VALUE_PADDED, ROWS), tl.float32),)
    for _ in tl.static_range(VALUE_GROUPS):
        sums = sums + (tl.zeros((16, ROWS), tl.float32),)
    for block in tl.range(begin, stop):
        of_keys = key_metadata + block * KEY_METADATA
        of_values = value_metadata + block * VALUE_METADATA
        if KEY_GROUPS == 0:
            low_scaled = _scaled_by_channel(queries, of_keys, WORDS, PADDED, 1, DTYPE)
            if HIGH_KEYS:
                high_scaled = _scaled_by_channel(high_queries, of_keys, HIGH_WORDS, HIGH_PADDED, 4, DTYPE)
            rest = _offset_scores(queries, of_keys, WORDS, PADDED, KEY_DIM) * scale
        for part in tl.static_range(BLOCK // TOKENS):
            token = part * TOKENS + tl.arange(0, TOKENS)
            words = tl.load(
                key_words + block * (BLOCK * WORDS) + token[:, None] * WORDS + word, mask=word[None] < WORDS, other=0
            )
            value_offset = block * (BLOCK * VALUE_WORDS) + value_word[:, None] * BLOCK + token
            value_mask = value_word[:, None] < VALUE_WORDS
            value_tile = tl.load(value_words + value_offset, mask=value_mask, other=0)
            high_tile, high_value_tile = words, value_tile
            if HIGH_KEYS:
                high_tile = tl.load(
                    key_high + block * (BLOCK * HIGH_WORDS) + token[:, None] * HIGH_WORDS + high_word,
                    mask=high_word[None] < HIGH_WORDS, other=0,
                )  # fmt: skip
            if FOUR_BIT_VALUES:
                high_value_tile = tl.load(value_high + value_offset, mask=value_mask, other=0)
            scores = tl.zeros((TOKENS, ROWS), tl.float32)
            if KEY_GROUPS == 0:
                scores = _add_products(scores, low_scaled, words, 0, 1, DTYPE, PRECISION)
                if HIGH_KEYS:
                    scores = _add_products(scores, high_scaled, high_tile, 0, 1, DTYPE, PRECISION)
                scores = scores * unit + rest
            for group in tl.static_range(KEY_GROUPS):
                product = tl.zeros((TOKENS, ROWS), tl.float32)
                product = _add_products(product, low_scaled, words, group, KEY_GROUPS, DTYPE, PRECISION)
                if HIGH_KEYS:
                    product = _add_products(product, high_scaled, high_tile, group, KEY_GROUPS, DTYPE, PRECISION)
                group_scale = tl.load(of_keys + group * BLOCK + token[:, None]).to(tl.float32)
                group_offset = tl.load(of_keys + (KEY_GROUPS + group) * BLOCK + token[:, None]).to(tl.float32)
                scores += (product * unit + totals[group] * group_offset) * group_scale
            if past_decay is not None:
                decay_offset = (row_head * block_capacity + block) * BLOCK + token[:, None]
                key_decay = tl.load(past_decay + decay_offset, mask=row_used, other=0.0)
                scores += (own_decay - key_decay) * LOG2_E
            weights, shrink, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
            if VALUE_GROUPS == 0:
                accs = _add_values_along_tokens(
                    accs, shrink, weights, value_tile, high_value_tile, of_values, VALUE_WORDS, VALUE_PADDED,
                    VALUE_DIM, FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                accs, sums = _add_values_along_channels(
                    accs, sums, shrink, weights, value_tile, high_value_tile, of_values + part * TOKENS,
                    TOKENS, BLOCK, VALUE_GROUPS, FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
    share = _store_lse(lse, result_row, row_used, row_max, row_sum)
    for tile in tl.static_range(8):
        out = accs[tile]
        if VALUE_GROUPS:
            out = out * (1 / _unit(tile, DTYPE)) + tl.sum(sums[tile * VALUE_GROUPS // 8], 0) / 16
        tl.store(
            partial + result_row * VALUE_DIM + tile * VALUE_WORDS + value_word[:, None], out * share,
            mask=row_used & (value_word[:, None] < VALUE_WORDS),
        )  # fmt: skip


@triton.jit
def _attend_slots(
    q, row_offset, row_used, row_head, own_decay, own_slot, begin, stop, keys, values, decay, partial, lse, result_row,
    scale, slot_capacity, key_stride, value_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the dense slots from begin to stop that are not after a row's own slot."""
    KEY_PADDED: tl.constexpr = _padded(KEY_DIM, 16)
    VALUE_PADDED: tl.constexpr = _padded(VALUE_DIM, 16)
    token, channel, value_channel = tl.arange(0, TILE), tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    query = tl.load(q + row_offset + channel[:, None], mask=row_used & (channel[:, None] < KEY_DIM), other=0.0)
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((VALUE_PADDED, ROWS), tl.float32)
    for first in tl.range(begin, stop, TILE, num_stages=2):
        slot = first + token[:, None]
        held = slot < stop
        key = tl.load(keys + slot * key_stride + channel, mask=held & (channel < KEY_DIM), other=0.0)
        scores = tl.dot(key, query, input_precision=PRECISION) * scale
        if decay is not None:
            key_decay = tl.load(decay + row_head * slot_capacity + slot, mask=row_used & held, other=0.0)
            scores += (own_decay - key_decay) * LOG2_E
        scores = tl.where(held & (slot <= own_slot), scores, -float("inf"))
        weights, shrink, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
        # Slots out of use may hold NaN, and 0 * NaN is NaN.
        value = tl.load(
            values + slot * value_stride + value_channel, mask=held & (value_channel < VALUE_DIM), other=0.0
        )
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * shrink, input_precision=PRECISION)
    share = _store_lse(lse, result_row, row_used, row_max, row_sum)
    tl.store(
        partial + result_row * VALUE_DIM + value_channel[:, None], acc * share,
        mask=row_used & (value_channel[:, None] < VALUE_DIM),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries", "slot_capacity", "block_capacity", "past_splits"])
def _attend_split(
    q, past_q, key_words, key_high, key_metadata, value_words, value_high, value_metadata, blocks, past_decay,
    dense_keys, dense_values, dense_end, dense_start, decay, partial, lse,
    key_stride_b, key_stride_h, key_stride_s, value_stride_b, value_stride_h, value_stride_s,
    num_queries, slot_capacity, block_capacity, past_splits, scale,
    NUM_HEADS: tl.constexpr, HEADS_PER_KEY_HEAD: tl.constexpr, HEADS_PER_VALUE_HEAD: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, HIGH_KEYS: tl.constexpr, FOUR_BIT_VALUES: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one group of heads, one tile of rows, one batch row."""
    GROUPS: tl.constexpr = NUM_HEADS // HEADS
    split, batch = tl.program_id(0), tl.program_id(2)
    group, row_tile = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    row = tl.arange(0, ROWS)
    row_head = row % PADDED_HEADS
    row_query = row_tile * (ROWS // PADDED_HEADS) + row // PADDED_HEADS
    row_used = (row_head < HEADS) & (row_query < num_queries)
    first_head = group * HEADS
    key_head, value_head = first_head // HEADS_PER_KEY_HEAD, first_head // HEADS_PER_VALUE_HEAD
    # A cache may hold more than 2^31 numbers.
    in_batch = batch.to(tl.int64)
    of_row = (batch * NUM_HEADS + first_head + row_head) * num_queries + row_query
    row_offset = of_row * KEY_DIM
    result_row = (split.to(tl.int64) * tl.num_programs(2)) * (NUM_HEADS * num_queries) + of_row
    end = tl.load(dense_end + batch)
    own_slot = end - num_queries + row_query
    own_decay = tl.zeros((ROWS,), tl.float32)
    if decay is not None:
        decay += (in_batch * NUM_HEADS + first_head) * slot_capacity
        own_decay = tl.load(decay + row_head * slot_capacity + own_slot, mask=row_used & (own_slot >= 0), other=0.0)
    if split < past_splits:
        used = tl.load(blocks + batch)
        share = tl.cdiv(used, past_splits)
        begin = split * share
        stop = tl.minimum(begin + share, used)
        keys = (in_batch * (NUM_HEADS // HEADS_PER_KEY_HEAD) + key_head) * block_capacity
        values = (in_batch * (NUM_HEADS // HEADS_PER_VALUE_HEAD) + value_head) * block_capacity
        key_words += keys * (BLOCK * KEY_DIM // 8)
        value_words += values * (BLOCK * VALUE_DIM // 8)
        if HIGH_KEYS:
            key_high += keys * (BLOCK * HIGH_KEYS // 8)
        if FOUR_BIT_VALUES:
            value_high += values * (BLOCK * VALUE_DIM // 8)
        key_metadata += keys * (2 * KEY_DIM if KEY_GROUPS == 0 else 2 * KEY_GROUPS * BLOCK)
        value_metadata += values * (2 * VALUE_DIM if VALUE_GROUPS == 0 else 2 * VALUE_GROUPS * BLOCK)
        if past_decay is not None:
            past_decay += (in_batch * NUM_HEADS + first_head) * block_capacity * BLOCK
        _attend_blocks(
            past_q, row_offset, row_used, row_head, own_decay, begin, stop, key_words, key_high, key_metadata,
            value_words, value_high, value_metadata, past_decay, partial, lse, result_row, scale, block_capacity,
            ROWS, BLOCK, TOKENS, KEY_DIM, VALUE_DIM, KEY_GROUPS, VALUE_GROUPS, HIGH_KEYS, FOUR_BIT_VALUES, DTYPE,
            PRECISION,
        )  # fmt: skip
    else:
        start = 0
        if dense_start is not None:
            start = tl.load(dense_start + batch)
        share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(0) - past_splits), TILE) * TILE
        begin = start + (split - past_splits) * share
        stop = tl.minimum(begin + share, end)
        _attend_slots(
            q, row_offset, row_used, row_head, own_decay, own_slot, begin, stop,
            dense_keys + in_batch * key_stride_b + key_head * key_stride_h.to(tl.int64),
            dense_values + in_batch * value_stride_b + value_head * value_stride_h.to(tl.int64),
            decay, partial, lse, result_row, scale, slot_capacity, key_stride_s, value_stride_s,
            ROWS, TILE, KEY_DIM, VALUE_DIM, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_queries", "rows_of_batch", "past_splits", "num_splits"])
def _join(
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
        mask = (channel[:, None] < DIM) & (every < DIM)
        back = tl.load(rotation + channel[:, None] * DIM + every, mask=mask, other=0.0)
        result, total = _weighted(
            partial, lse, row, num_rows, reference, channel, total, past_splits, num_splits, DIM, CHUNK, SPLITS
        )
        result += tl.sum(turned[:, None] * back[None], 2)
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


def attend(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
) -> Tensor:
    """Compute `packed_attention` in two launches, for MAX_QUERIES queries or fewer; same arguments."""
    partial, lse, past_splits = _launch(q, dense_keys, dense_values, dense_end, dense_start, decay, past, scale, True)
    rows, dim = lse[0].numel(), dense_values.shape[3]
    out = q.new_empty(*q.shape[:3], dim)
    padded = next_power_of_2(dim)
    chunk = min(JOIN_CHUNK, padded)
    rotation = None if past.value_rotation is None else past.value_rotation.contiguous()
    with torch.cuda.device_of(q):
        _join[(rows, -(-dim // chunk))](
            partial, lse, out, rotation, dense_end, dense_start, rows, q.shape[2], q.shape[1] * q.shape[2],
            past_splits, len(lse), dim, padded, 1, chunk,
            SPLITS=min(JOIN_SPLITS, next_power_of_2(len(lse))), num_warps=4,
        )  # fmt: skip
    return out


def attend_past(
    q: Tensor, dense_end: Tensor, decay: Tensor | None, past: PackedPast, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the packed tokens alone, for any number of queries.

    Args:
        q, dense_end, decay, past, scale: as in `packed_attention`; decay has the sums at the queries' own slots.

    Returns:
        Output `[B, Hq, T, Dv]` float32, and lse `[B, Hq, T]` float32, -inf where a row has no packed token.
    """
    nothing = q.new_empty(*past.values.low.shape[:2], 1, past.values.head_dim)
    partial, lse, _ = _launch(q, nothing, nothing, dense_end, None, decay, past, scale, False)
    lse *= LN_2
    total = lse.logsumexp(0)
    if len(lse) == 1:
        out = partial[0]
    else:
        reference = total.masked_fill(total == -torch.inf, 0.0)
        out = ((lse - reference).exp()[..., None] * partial).sum(0)
    return (out if past.value_rotation is None else out @ past.value_rotation.mT), total


def _launch(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
    with_dense: bool,
) -> tuple[Tensor, Tensor, int]:
    """Return the splits' outputs `[splits, B, Hq, T, Dv]` and lse (base 2), and how many are of packed tokens."""
    batch, num_heads, queries, key_dim = q.shape
    keys, values = past.keys, past.values
    value_dim = values.head_dim
    per_key, per_value = num_heads // keys.low.shape[1], num_heads // values.low.shape[1]
    heads = math.gcd(per_key, per_value)
    padded_heads = next_power_of_2(heads)
    rows = min(max(8, next_power_of_2(queries) * padded_heads), max(64, padded_heads))
    row_tiles = -(-queries // (rows // padded_heads))
    past_splits, dense_splits = _splits(
        batch * (num_heads // heads) * row_tiles, keys.blocks, dense_keys.shape[2] if with_dense else 0, q.device
    )
    splits = past_splits + dense_splits
    partial = q.new_empty(splits, batch, num_heads, queries, value_dim, dtype=torch.float32)
    lse = q.new_empty(splits, batch, num_heads, queries, dtype=torch.float32)
    q = q.contiguous()
    past_q = _rotated(q, past.key_rotation)
    dense_keys, dense_values = (x if x.stride(-1) == 1 else x.contiguous() for x in (dense_keys, dense_values))
    decay, past_decay = (None if x is None else x.contiguous() for x in (decay, past.decay))
    with torch.cuda.device_of(q):
        _attend_split[(splits, num_heads // heads * row_tiles, batch)](
            q, past_q, keys.low, keys.high, keys.metadata, values.low, values.high, values.metadata, past.blocks,
            past_decay, dense_keys, dense_values, dense_end, dense_start, decay, partial, lse,
            *dense_keys.stride()[:3], *dense_values.stride()[:3],
            queries, 0 if decay is None else decay.shape[2], keys.blocks, past_splits, scale * LOG2_E.value,
            NUM_HEADS=num_heads,
            HEADS_PER_KEY_HEAD=per_key,
            HEADS_PER_VALUE_HEAD=per_value,
            HEADS=heads,
            PADDED_HEADS=padded_heads,
            ROWS=rows,
            TILE=DENSE_TILE,
            BLOCK=keys.block,
            TOKENS=min(keys.block, _tokens_per_step(past.keys, rows)),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_GROUPS=_groups(past.keys),
            VALUE_GROUPS=_groups(past.values),
            HIGH_KEYS=keys.format.high_of(key_dim),
            FOUR_BIT_VALUES=values.format.bits == 4,
            DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=max(1, rows // 16),
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return partial, lse, past_splits


def _tokens_per_step(keys: Packed, rows: int) -> int:
    """Return the tokens of one step: as many as registers hold beside the rows, or the scales of channels."""
    scales_of_channels = keys.format.groups_along == "tokens" and keys.high is None
    return MAX_TOKENS // 2 if rows > 8 or scales_of_channels else MAX_TOKENS


def _groups(side: Packed) -> int:
    """Return the groups of a token's channels, 0 for groups along tokens."""
    return 0 if side.format.groups_along == "tokens" else side.head_dim // side.format.group


def _splits(programs: int, blocks: int, slots: int, device: torch.device) -> tuple[int, int]:
    """Return the splits of the packed blocks and of the dense slots.

    Args:
        programs: programs of one split.
        blocks: blocks that the past has room for.
        slots: slots that the dense tokens have room for; 0: they are not attended to.
    """
    dense = -(-slots // SLOTS_PER_SPLIT)
    if device.type != "cuda":
        return min(3, blocks), dense
    at_once = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    return _past_splits(programs, blocks, dense, at_once), dense


@functools.lru_cache(maxsize=1024)
def _past_splits(programs: int, blocks: int, dense: int, at_once: int) -> int:
    """Return the splits of `blocks` blocks that take the least time, beside `dense` splits of dense slots."""

    def cost(splits: int) -> float:
        """Estimate the time in steps of one block; a program's start and end take about another."""
        share = -(-blocks // splits) + 1
        if programs * (splits + dense) <= at_once:
            return share
        # Programs that do not fit wait for others: the last ones end half a program late on average.
        return programs * (splits * share + dense * BLOCKS_PER_DENSE_SPLIT) / at_once + share / 2

    return min(range(1, min(blocks, max(1, 4 * at_once // programs)) + 1), key=lambda splits: (cost(splits), splits))


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


def _rotated(q: Tensor, rotation: Tensor | None) -> Tensor:
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
