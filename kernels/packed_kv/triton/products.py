"""Products of queries and weights with packed codes, which are never dequantized.

Eight 2-bit codes lie in each 16-bit word, for eight tiles of D / 8 channels. Two words fill a 32-bit register, and at
most two instructions make two operands of tile i from it:

    (register >> 6 (i / 3)) & mask_i  =  4^e_i code 2^-24        with e_i = i mod 3

as the bits of two float16 numbers below the normal range, which tensor cores multiply exactly: no number is converted.
What is left is linear algebra on the small side of each product:

    keys, groups along channels:  q . k_j   = sum_g scale_jg (q_g . code_j + offset_jg sum(q_g))
    keys, groups along tokens:    q . k_j   = (q * scale) . (code_j + offset)
    values, along channels:       sum p v   = sum_j (p_j scale_j) code_j + sum_j (p_j scale_j) offset_j
    values, along tokens:         sum p v   = scale * (sum_j p_j code_j + offset sum_j p_j)

with 4^-e_i in the query or in the result, both exact.
"""
# ruff: noqa: RUF005  # Triton has no starred expressions

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _tile(words, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of tile TILE of int16 words, times `unit_of`, in DTYPE."""
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
def unit_of(tile, dtype):
    """Return what `_tile` makes of the code 1."""
    return 4.0 ** (tile % 3) * (1.0 if dtype == tl.float32 else 2.0**-24)


@triton.constexpr_function
def padded(size, least):
    """Return the power of 2 that holds `size` channels or words."""
    return max(least, triton.next_power_of_2(size))


@triton.jit
def query_tiles(q, row_offset, row_used, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the rows' queries as eight tiles [PADDED, rows] of WORDS channels each, 0 beyond."""
    word = tl.arange(0, PADDED)[:, None]
    mask = row_used & (word < WORDS)
    tiles = ()
    for tile in tl.static_range(8):
        tiles = tiles + (tl.load(q + row_offset + tile * WORDS + word, mask=mask, other=0.0),)
    return tiles


@triton.jit
def power_above(tiles):
    """Return the power of 2 that the absolute values of each row of the tiles do not exceed, [rows] float32."""
    largest = tl.full((tiles[0].shape[1],), 2.0**-60, tl.float32)
    for tile in tl.static_range(8):
        largest = tl.maximum(largest, tl.max(tl.abs(tiles[tile].to(tl.float32)), 0))
    return tl.exp2(tl.ceil(tl.log2(largest)))


@triton.jit
def divided(tiles, divisor, DTYPE: tl.constexpr):
    """Return the tiles divided by `divisor` [rows], in DTYPE."""
    new = ()
    for tile in tl.static_range(8):
        new = new + ((tiles[tile].to(tl.float32) / divisor).to(DTYPE),)
    return new


@triton.jit
def scaled(queries, WEIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the tiles of the queries, divided by the powers of 4 in the codes' units, times WEIGHT."""
    tiles = ()
    for tile in tl.static_range(8):
        scaled = queries[tile].to(tl.float32) * (WEIGHT / unit_of(tile % 3, tl.float32))
        tiles = tiles + (scaled.to(DTYPE),)
    return tiles


@triton.jit
def scaled_by_channel(
    queries, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr, WEIGHT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return `scaled` with a block's scales in it."""
    word = tl.arange(0, PADDED)[:, None]
    tiles = ()
    for tile in tl.static_range(8):
        scale = tl.load(metadata + tile * WORDS + word, mask=word < WORDS, other=0.0).to(tl.float32)
        scaled = queries[tile].to(tl.float32) * (scale * (WEIGHT / unit_of(tile % 3, tl.float32)))
        tiles = tiles + (scaled.to(DTYPE),)
    return tiles


@triton.jit
def offset_scores(queries, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr):
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
def group_sum(tiles, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sum over the channels of a group of the tiles, [rows] float32."""
    total = tl.zeros((tiles[0].shape[1],), tl.float32)
    for tile in tl.static_range(8):
        if tile * GROUPS // 8 == GROUP:
            total += tl.sum(tiles[tile].to(tl.float32), 0)
    return total


@triton.jit
def add_products(scores, queries, words, GROUP: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
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
def add_values_along_tokens(
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
        new = new + (accs[tile] * shrink + (codes * (1 / unit_of(tile, DTYPE)) + total * offset) * scale,)
    return new


@triton.jit
def add_values_along_channels(
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
