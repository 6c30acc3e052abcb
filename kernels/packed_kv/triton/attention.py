"""One split of attention: over packed blocks, or over slots of tokens in 16 bits.

    s_ij = scale q_i . k_j + c_i - c_j - b_ij        o_i = sum_j softmax_j(s_ij) v_j

b_ij is half the variance of `scale q_i . k_j` by the key's rounding, where it is asked for.

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
    columns,
    group_sum,
    largest_of,
    operands,
    padded,
    places,
    query_tiles,
    scale_and_offset,
    scaled_by_channel,
    squares_of,
    sum_type,
    totals_of,
)

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
HALF_VARIANCE: tl.constexpr = tl.constexpr(1 / (24 * math.log2(math.e)))
"""Of an error that is even within a step of 1 at a logit to base e, for logits to base 2."""


@triton.jit
def _softmax_step(scores, row_max, row_sum):
    """Return the weights of scores [tokens, rows] and the largest, the factor on what came before, new maximum and sum.

    All to base 2.
    """
    largest = tl.max(scores, 0)
    new_max = tl.maximum(row_max, largest)
    # -inf - -inf is NaN: a row that has seen nothing yet uses the reference 0.
    reference = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference)
    shrink = tl.exp2(row_max - reference)
    return weights, tl.exp2(largest - reference), shrink, new_max, row_sum * shrink + tl.sum(weights, 0)


@triton.jit
def _store_lse(lse, result_row, row_used, row_max, row_sum):
    """Store the lse of the rows; return the reciprocal of their sums, 1 where nothing was seen."""
    total = tl.where(row_sum == 0, 1.0, row_sum)  # NaN stays
    tl.store(lse + result_row, row_max + tl.log2(total), mask=row_used)
    return 1 / total


@triton.jit
def _attend_blocks(
    q, row_offset, row_used, row_head, own_decay, begin, stop, key_words, key_high, key_metadata, value_words,
    value_high, value_metadata, past_decay, partial, lse, result_row, scale, block_capacity,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, HIGH_KEYS: tl.constexpr, FOUR_BIT_VALUES: tl.constexpr,
    DEBIAS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks from begin to stop; pointers are the head's. *_GROUPS is 0 for groups along tokens."""
    WORDS: tl.constexpr = KEY_DIM // 4
    HIGH_WORDS: tl.constexpr = HIGH_KEYS // 4
    VALUE_WORDS: tl.constexpr = VALUE_DIM // 4
    PADDED: tl.constexpr = padded(WORDS, 32)  # the least sum that a product of int8 takes
    HIGH_PADDED: tl.constexpr = padded(HIGH_WORDS, 32)
    VALUE_PADDED: tl.constexpr = padded(VALUE_WORDS, 16)
    MIXED_KEYS: tl.constexpr = HIGH_KEYS != 0 and HIGH_KEYS != KEY_DIM
    KEY_METADATA: tl.constexpr = KEY_DIM if KEY_GROUPS == 0 else KEY_GROUPS * BLOCK
    VALUE_METADATA: tl.constexpr = VALUE_DIM if VALUE_GROUPS == 0 else VALUE_GROUPS * BLOCK
    COLUMNS: tl.constexpr = columns(ROWS, DTYPE)
    word = tl.arange(0, PADDED)
    high_word, value_word = tl.arange(0, HIGH_PADDED), tl.arange(0, VALUE_PADDED)
    tiles = query_tiles(q, row_offset, row_used, WORDS, PADDED)
    high_tiles = tiles
    if MIXED_KEYS:
        high_tiles = query_tiles(q, row_offset, row_used, HIGH_WORDS, HIGH_PADDED)
    queries, unit = operands(tiles, largest_of(tiles), DTYPE)
    high_queries, high_unit = queries, unit
    totals, excesses = (), ()
    for group in tl.static_range(KEY_GROUPS):
        totals = totals + (group_sum(tiles, group, KEY_GROUPS) * scale,)
        excesses = excesses + (squares_of(tiles, group, KEY_GROUPS) * (scale * scale * HALF_VARIANCE),)
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    accs, sums = (), ()
    for _ in tl.static_range(4):
        accs = accs + (tl.zeros((VALUE_PADDED, ROWS), tl.float32),)
    for _ in tl.static_range(VALUE_GROUPS):
        sums = sums + (tl.zeros((ROWS,), tl.float32),)
    for block in tl.range(begin, stop):
        of_keys = key_metadata + block * KEY_METADATA
        of_values = value_metadata + block * VALUE_METADATA
        if KEY_GROUPS == 0:
            scaled, rest = scaled_by_channel(tiles, of_keys, WORDS, PADDED)
            queries, unit = operands(scaled, largest_of(scaled), DTYPE)
            rest *= scale
            if DEBIAS:
                rest -= squares_of(scaled, 0, 1) * (scale * scale * HALF_VARIANCE)
            if MIXED_KEYS:
                scaled_high, _in_rest = scaled_by_channel(high_tiles, of_keys, HIGH_WORDS, HIGH_PADDED)
                high_queries, high_unit = operands(scaled_high, largest_of(scaled_high), DTYPE)
        for part in tl.static_range(0, BLOCK, TOKENS):
            token = part + places(TOKENS)[:, None]
            token_used = token < BLOCK
            words = tl.load(
                key_words + block * (BLOCK * WORDS) + token * WORDS + word,
                mask=token_used & (word < WORDS), other=0,
            )  # fmt: skip
            value_token = part + tl.arange(0, TOKENS)
            value_offset = block * (BLOCK * VALUE_WORDS) + value_word[:, None] * BLOCK + value_token
            value_mask = (value_word[:, None] < VALUE_WORDS) & (value_token < BLOCK)
            value_tile = tl.load(value_words + value_offset, mask=value_mask, other=0)
            high_tile, high_value_tile = words, value_tile
            if HIGH_KEYS:
                high_tile = tl.load(
                    key_high + block * (BLOCK * HIGH_WORDS) + token * HIGH_WORDS + high_word,
                    mask=token_used & (high_word < HIGH_WORDS), other=0,
                )  # fmt: skip
            if FOUR_BIT_VALUES:
                high_value_tile = tl.load(value_high + value_offset, mask=value_mask, other=0)
            scores = tl.zeros((TOKENS, ROWS), tl.float32)
            for group in tl.static_range(max(1, KEY_GROUPS)):
                products = tl.zeros((TOKENS, COLUMNS), sum_type(DTYPE))
                products = add_products(products, queries, words, group, max(1, KEY_GROUPS), False, DTYPE, PRECISION)
                if HIGH_KEYS == KEY_DIM:
                    products = add_products(
                        products, queries, high_tile, group, max(1, KEY_GROUPS), True, DTYPE, PRECISION
                    )
                product = totals_of(products, DTYPE) * (unit * scale)
                if KEY_GROUPS == 0:
                    scores = product + rest
                else:
                    pair = tl.load(of_keys + group * BLOCK + token, mask=token_used, other=0)
                    group_scale, group_offset = scale_and_offset(pair)
                    scores += (product + totals[group] * group_offset) * group_scale
                    if DEBIAS:
                        scores -= excesses[group] * (group_scale * group_scale)
            if MIXED_KEYS:
                products = tl.zeros((TOKENS, COLUMNS), sum_type(DTYPE))
                products = add_products(products, high_queries, high_tile, 0, 1, True, DTYPE, PRECISION)
                scores += totals_of(products, DTYPE) * (high_unit * scale)
            if past_decay is not None:
                decay_offset = (row_head * block_capacity + block) * BLOCK + token
                key_decay = tl.load(past_decay + decay_offset, mask=row_used & token_used, other=0.0)
                scores += (own_decay - key_decay) * LOG2_E
            if BLOCK % TOKENS:
                scores = tl.where(token_used, scores, -float("inf"))
            weights, largest, shrink, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
            if VALUE_GROUPS == 0:
                accs = add_values_along_tokens(
                    accs, shrink, weights, largest, value_tile, high_value_tile, of_values, VALUE_WORDS, VALUE_PADDED,
                    FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                accs, sums = add_values_along_channels(
                    accs, sums, shrink, weights, largest, value_tile, high_value_tile, of_values, token,
                    token_used, BLOCK, VALUE_GROUPS, FOUR_BIT_VALUES, DTYPE, PRECISION,
                )  # fmt: skip
    share = _store_lse(lse, result_row, row_used, row_max, row_sum)
    for tile in tl.static_range(4):
        out = accs[tile]
        if VALUE_GROUPS:
            out = out + sums[tile * VALUE_GROUPS // 4]
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
        weights, _, shrink, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
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


@triton.jit
def _rows_of(
    row_tile, first_head, num_queries, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return head and query of the rows of a tile, whether they exist, and their places in a batch row's queries."""
    row = tl.arange(0, ROWS)
    row_head = row % PADDED_HEADS
    row_query = row_tile * (TILE_ROWS // PADDED_HEADS) + row // PADDED_HEADS
    row_used = (row_head < HEADS) & (row_query < num_queries)
    return row_head, row_query, row_used, (first_head + row_head) * num_queries + row_query


@triton.jit
def _decay_of_rows(decay, row_head, own_slot, row_used, slot_capacity):
    """Load the sums of log gates at the rows' own slots; 0 without gates."""
    if decay is None:
        return tl.zeros(row_head.shape, tl.float32)
    else:  # noqa: RET505
        return tl.load(decay + row_head * slot_capacity + own_slot, mask=row_used & (own_slot >= 0), other=0.0)


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
    DEBIAS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one group of heads, one tile of rows, one batch row."""
    GROUPS: tl.constexpr = NUM_HEADS // HEADS
    split, batch = tl.program_id(0), tl.program_id(2)
    group, row_tile = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    first_head = group * HEADS
    key_head, value_head = first_head // HEADS_PER_KEY_HEAD, first_head // HEADS_PER_VALUE_HEAD
    # A cache may hold more than 2^31 numbers.
    in_batch = batch.to(tl.int64)
    first_row = batch * NUM_HEADS * num_queries
    first_result = (split.to(tl.int64) * tl.num_programs(2)) * (NUM_HEADS * num_queries) + first_row
    end = tl.load(dense_end + batch)
    if decay is not None:
        decay += (in_batch * NUM_HEADS + first_head) * slot_capacity
    if split < past_splits:
        row_head, row_query, row_used, of_row = _rows_of(
            row_tile, first_head, num_queries, HEADS, PADDED_HEADS, ROWS, ROWS
        )
        own_decay = _decay_of_rows(decay, row_head, end - num_queries + row_query, row_used, slot_capacity)
        used = tl.load(blocks + batch)
        share = tl.cdiv(used, past_splits)
        begin = split * share
        stop = tl.minimum(begin + share, used)
        keys = (in_batch * (NUM_HEADS // HEADS_PER_KEY_HEAD) + key_head) * block_capacity
        values = (in_batch * (NUM_HEADS // HEADS_PER_VALUE_HEAD) + value_head) * block_capacity
        key_words += keys * (BLOCK * KEY_DIM // 4)
        value_words += values * (BLOCK * VALUE_DIM // 4)
        if HIGH_KEYS:
            key_high += keys * (BLOCK * HIGH_KEYS // 4)
        if FOUR_BIT_VALUES:
            value_high += values * (BLOCK * VALUE_DIM // 4)
        key_metadata += keys * (KEY_DIM if KEY_GROUPS == 0 else KEY_GROUPS * BLOCK)
        value_metadata += values * (VALUE_DIM if VALUE_GROUPS == 0 else VALUE_GROUPS * BLOCK)
        if past_decay is not None:
            past_decay += (in_batch * NUM_HEADS + first_head) * block_capacity * BLOCK
        _attend_blocks(
            past_q, (first_row + of_row) * KEY_DIM, row_used, row_head, own_decay, begin, stop, key_words, key_high,
            key_metadata, value_words, value_high, value_metadata, past_decay, partial, lse, first_result + of_row,
            scale, block_capacity,
            ROWS, BLOCK, TOKENS, KEY_DIM, VALUE_DIM, KEY_GROUPS, VALUE_GROUPS, HIGH_KEYS, FOUR_BIT_VALUES, DEBIAS,
            DTYPE, PRECISION,
        )  # fmt: skip
    else:
        # A product in 16 bits has 8 rows at least.
        DENSE_ROWS: tl.constexpr = max(8, ROWS)
        slot_head, slot_query, slot_used, of_slot_row = _rows_of(
            row_tile, first_head, num_queries, HEADS, PADDED_HEADS, ROWS, DENSE_ROWS
        )
        own_slot = end - num_queries + slot_query
        slot_decay = _decay_of_rows(decay, slot_head, own_slot, slot_used, slot_capacity)
        start = 0
        if dense_start is not None:
            start = tl.load(dense_start + batch)
        share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(0) - past_splits), TILE) * TILE
        begin = start + (split - past_splits) * share
        stop = tl.minimum(begin + share, end)
        _attend_slots(
            q, (first_row + of_slot_row) * KEY_DIM, slot_used, slot_head, slot_decay, own_slot, begin, stop,
            dense_keys + in_batch * key_stride_b + key_head * key_stride_h.to(tl.int64),
            dense_values + in_batch * value_stride_b + value_head * value_stride_h.to(tl.int64),
            decay, partial, lse, first_result + of_slot_row, scale, slot_capacity, key_stride_s, value_stride_s,
            DENSE_ROWS, TILE, KEY_DIM, VALUE_DIM, PRECISION,
        )  # fmt: skip
