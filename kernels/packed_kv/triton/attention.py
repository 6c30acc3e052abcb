"""One split of attention: over packed blocks, or over slots of tokens in 16 bits.

    s_ij = scale q_i . k_j + c_i - c_j        o_i = sum_j softmax_j(s_ij) v_j

A program owns a group of query heads that share a key head and a value head, a tile of rows (query x head), and one
split of the tokens. A row's blocks are divided evenly among the splits on the device: a captured launch stays right as
the cache grows.
"""
# ruff: noqa: RUF005  # Triton has no starred expressions

import math

import triton
import triton.language as tl

from kernels.packed_kv.triton.products import (
    add_products,
    add_values_along_channels,
    add_values_along_tokens,
    divided,
    group_sum,
    offset_scores,
    padded,
    power_above,
    query_tiles,
    scaled,
    scaled_by_channel,
    unit_of,
)

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


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
    PADDED: tl.constexpr = padded(WORDS, 16)  # the least sum that a product on tensor cores takes
    HIGH_PADDED: tl.constexpr = padded(HIGH_WORDS, 16)
    VALUE_PADDED: tl.constexpr = padded(VALUE_WORDS, 16)
    KEY_METADATA: tl.constexpr = 2 * KEY_DIM if KEY_GROUPS == 0 else 2 * KEY_GROUPS * BLOCK
    VALUE_METADATA: tl.constexpr = 2 * VALUE_DIM if VALUE_GROUPS == 0 else 2 * VALUE_GROUPS * BLOCK
    word = tl.arange(0, PADDED)
    high_word, value_word = tl.arange(0, HIGH_PADDED), tl.arange(0, VALUE_PADDED)
    queries = query_tiles(q, row_offset, row_used, WORDS, PADDED)
    high_queries = queries
    if HIGH_KEYS and HIGH_KEYS != KEY_DIM:
        high_queries = query_tiles(q, row_offset, row_used, HIGH_WORDS, HIGH_PADDED)
    # Queries of 1 at most, times scales that fill float16's range, stay in it and above its smallest numbers.
    largest = power_above(queries)
    queries, high_queries = divided(queries, largest, DTYPE), divided(high_queries, largest, DTYPE)
    scale *= largest
    low_scaled, high_scaled = scaled(queries, 1, DTYPE), scaled(high_queries, 4, DTYPE)
    totals = ()
    for group in tl.static_range(KEY_GROUPS):
        totals = totals + (group_sum(queries, group, KEY_GROUPS) * scale,)
    unit = scale * (1 / unit_of(0, DTYPE))
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
            low_scaled = scaled_by_channel(queries, of_keys, WORDS, PADDED, 1, DTYPE)
            if HIGH_KEYS:
                high_scaled = scaled_by_channel(high_queries, of_keys, HIGH_WORDS, HIGH_PADDED, 4, DTYPE)
            rest = offset_scores(queries, of_keys, WORDS, PADDED, KEY_DIM) * scale
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
                scores = add_products(scores, low_scaled, words, 0, 1, DTYPE, PRECISION)
                if HIGH_KEYS:
                    scores = add_products(scores, high_scaled, high_tile, 0, 1, DTYPE, PRECISION)
                scores = scores * unit + rest
            for group in tl.static_range(KEY_GROUPS):
                product = tl.zeros((TOKENS, ROWS), tl.float32)
                product = add_products(product, low_scaled, words, group, KEY_GROUPS, DTYPE, PRECISION)
                if HIGH_KEYS:
                    product = add_products(product, high_scaled, high_tile, group, KEY_GROUPS, DTYPE, PRECISION)
                group_scale = tl.load(of_keys + group * BLOCK + token[:, None]).to(tl.float32)
                group_offset = tl.load(of_keys + (KEY_GROUPS + group) * BLOCK + token[:, None]).to(tl.float32)
                scores += (product * unit + totals[group] * group_offset) * group_scale
            if past_decay is not None:
                decay_offset = (row_head * block_capacity + block) * BLOCK + token[:, None]
                key_decay = tl.load(past_decay + decay_offset, mask=row_used, other=0.0)
                scores += (own_decay - key_decay) * LOG2_E
            weights, shrink, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
            if VALUE_GROUPS == 0:
                accs = add_values_along_tokens(
                    accs, shrink, weights, value_tile, high_value_tile, of_values, VALUE_WORDS, VALUE_PADDED,
                    VALUE_DIM, FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                accs, sums = add_values_along_channels(
                    accs, sums, shrink, weights, value_tile, high_value_tile, of_values + part * TOKENS,
                    TOKENS, BLOCK, VALUE_GROUPS, FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
    share = _store_lse(lse, result_row, row_used, row_max, row_sum)
    for tile in tl.static_range(8):
        out = accs[tile]
        if VALUE_GROUPS:
            out = out * (1 / unit_of(tile, DTYPE)) + tl.sum(sums[tile * VALUE_GROUPS // 8], 0) / 16
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
    KEY_PADDED: tl.constexpr = padded(KEY_DIM, 16)
    VALUE_PADDED: tl.constexpr = padded(VALUE_DIM, 16)
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
def attend_split(
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
