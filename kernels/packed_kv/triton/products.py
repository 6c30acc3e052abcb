"""Products of queries and weights with packed codes, which are never dequantized.

Four 2-bit codes lie in each byte, for four tiles of D / 4 channels. A 32-bit register holds four bytes, and at most two
instructions make four int8 operands of tile i from it:

    (register >> 4 (i / 2)) & mask_i  =  4^e_i code        with e_i = i mod 2

The other side is a row of numbers x. As whole numbers of a unit, the row's largest divided by LARGEST, they take two
int8 columns: `x ~ unit (128 left + right)`, off by half a unit, 2^-15 of the largest. Sums of int8 products are exact.
In float32 both sides are as they are. What is left is linear algebra on the small side of each product:

    keys, groups along channels:  q . k_j   = sum_g scale_jg (q_g . code_j + offset_jg sum(q_g))
    keys, groups along tokens:    q . k_j   = (q * scale) . (code_j + offset)
    values, along channels:       sum p v   = sum_j (p_j scale_j) code_j + sum_j (p_j scale_j) offset_j
    values, along tokens:         sum p v   = scale * (sum_j p_j code_j + offset sum_j p_j)

with 4^-e_i in the query or in the result.
"""
# ruff: noqa: RUF005  # Triton has no starred expressions

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LARGEST = tl.constexpr(127 * 128)
ROUNDING = tl.constexpr(1.5 * 2**23)
"""A float32 to which this is added has the nearest whole number in its low bits."""


@triton.jit
def codes_of(words, TILE: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of tile TILE of a plane's bytes, times 4^(TILE % 2), in the HIGH plane 4 times that."""
    RIGHT: tl.constexpr = 4 * (TILE // 2) - 2 * HIGH
    MASK: tl.constexpr = (12 if HIGH else 3) << (2 * (TILE % 2))
    MOVE: tl.constexpr = "shr" if RIGHT > 0 else "shl"
    BY: tl.constexpr = RIGHT if RIGHT > 0 else -RIGHT
    if INTERPRETED or DTYPE == tl.float32:  # noqa: SIM300
        moved = words >> BY if RIGHT > 0 else words << BY
        return (moved & MASK).to(DTYPE)
    elif RIGHT == 0:  # noqa: RET505  # Triton compiles what follows a return, but no other branch
        return tl.inline_asm_elementwise(
            f"and.b32 $0, $1, {MASK * 0x1010101};", "=r,r", [words], dtype=tl.int8, is_pure=True, pack=4
        )
    else:  # four bytes of a register at once
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; {MOVE}.b32 t, $1, {BY}; and.b32 $0, t, {MASK * 0x1010101}; }}",
            "=r,r", [words], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.constexpr_function
def weight_of(tile):
    """Return what undoes the factor of `codes_of`."""
    return 0.25 if tile % 2 else 1.0


@triton.constexpr_function
def padded(size, least):
    """Return the power of 2 that holds `size` channels or bytes."""
    return max(least, triton.next_power_of_2(size))


@triton.constexpr_function
def columns(rows, dtype):
    """Return the columns that `operand` makes of the rows."""
    return rows if dtype == tl.float32 else 2 * rows


@triton.constexpr_function
def sum_type(dtype):
    """Return the type in which products are summed up."""
    return tl.float32 if dtype == tl.float32 else tl.int32


@triton.jit
def unit_of(largest, DTYPE: tl.constexpr):
    """Return the unit of numbers whose absolute values are `largest` at most; 1 for float32."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return largest * 0 + 1
    else:  # noqa: RET505
        return tl.maximum(largest, 2.0**-100) / LARGEST


@triton.jit
def operand(x, steps, DTYPE: tl.constexpr):
    """Return float32 `x` [sum, rows], times `steps` (one by the unit) a whole number, as the side of a product."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return x
    else:  # noqa: RET505
        bits = (x * steps + ROUNDING).to(tl.int32, bitcast=True)
        pair = tl.join((bits >> 7).to(tl.int8), (bits & 127).to(tl.int8))
        return tl.reshape(pair, (x.shape[0], 2 * x.shape[1]))


@triton.jit
def operands(tiles, largest, DTYPE: tl.constexpr):
    """Return the queries' tiles [PADDED, rows] as `operand`s with the weights of the codes in them, and the unit."""
    unit = unit_of(largest, DTYPE)
    steps = 1 / unit
    new = ()
    for tile in tl.static_range(4):
        new = new + (operand(tiles[tile] * weight_of(tile), steps, DTYPE),)
    return new, unit


@triton.jit
def totals_of(sums, DTYPE: tl.constexpr):
    """Return sums of products with an `operand` as float32 [.., rows], in its unit."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return sums
    else:  # noqa: RET505
        left, right = tl.split(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)))
        return (left * 128 + right).to(tl.float32)


@triton.jit
def places(TOKENS: tl.constexpr):
    """Return the token of each row of the scores.

    A thread has rows 8 apart. Here they are four neighbors, which it stores as one word for the product with values.
    """
    row = tl.arange(0, TOKENS)
    return row // 32 * 32 + row % 8 * 4 + row // 8 % 4


@triton.jit
def in_order(x):
    """Return `x` [tokens, columns], whose tokens are `places`, with its tokens in order."""
    apart = tl.reshape(x, (x.shape[0] // 32, 4, 8, x.shape[1]))
    return tl.reshape(tl.permute(apart, (0, 2, 1, 3)), x.shape)


@triton.jit
def _add_product(sums, codes, other, PRECISION: tl.constexpr):
    return tl.dot(codes, other, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def query_tiles(q, row_offset, row_used, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the rows' queries as four tiles [PADDED, rows] float32 of WORDS channels each, 0 beyond."""
    word = tl.arange(0, PADDED)[:, None]
    mask = row_used & (word < WORDS)
    tiles = ()
    for tile in tl.static_range(4):
        tiles = tiles + (tl.load(q + row_offset + tile * WORDS + word, mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def largest_of(tiles):
    """Return the largest absolute value of each row of the tiles, [rows]."""
    largest = tl.max(tl.abs(tiles[0]), 0)
    for tile in tl.static_range(1, 4):
        largest = tl.maximum(largest, tl.max(tl.abs(tiles[tile]), 0))
    return largest


@triton.jit
def scale_and_offset(pair):
    """Return the two float16 of an int32 as float32."""
    scale = pair.to(tl.int16).to(tl.float16, bitcast=True)
    offset = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def scaled_by_channel(tiles, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Return the queries' tiles times a block's scales, which belong to channels, and their products with offsets."""
    word = tl.arange(0, PADDED)[:, None]
    new, rest = (), tl.zeros((tiles[0].shape[1],), tl.float32)
    for tile in tl.static_range(4):
        pair = tl.load(metadata + tile * WORDS + word, mask=word < WORDS, other=0)
        scale, offset = scale_and_offset(pair)
        new = new + (tiles[tile] * scale,)
        rest += tl.sum(new[tile] * offset, 0)
    return new, rest


@triton.jit
def group_sum(tiles, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sum over the channels of a group of the tiles, [rows] float32."""
    total = tl.zeros((tiles[0].shape[1],), tl.float32)
    for tile in tl.static_range(4):
        if tile * GROUPS // 4 == GROUP:
            total += tl.sum(tiles[tile], 0)
    return total


@triton.jit
def squares_of(tiles, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sum over the channels of a group of the tiles' squares, [rows] float32."""
    total = tl.zeros((tiles[0].shape[1],), tl.float32)
    for tile in tl.static_range(4):
        if tile * GROUPS // 4 == GROUP:
            total += tl.sum(tiles[tile] * tiles[tile], 0)
    return total


@triton.jit
def add_products(
    sums, queries, words, GROUP: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to sums [tokens, columns] the products of a group's tiles with the codes of one plane [tokens, PADDED]."""
    for tile in tl.static_range(4):
        if tile * GROUPS // 4 == GROUP:
            sums = _add_product(sums, codes_of(words, tile, HIGH, DTYPE), queries[tile], PRECISION)
    return sums


@triton.jit
def _weighted_codes(weights, words, high_words, TILE: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """Return the sums of the codes of tile TILE by `weights`, an `operand` over tokens: [PADDED, rows] in its unit."""
    sums = tl.zeros((words.shape[0], weights.shape[1]), sum_type(DTYPE))
    sums = _add_product(sums, codes_of(words, TILE, False, DTYPE), weights, PRECISION)
    if FOUR_BITS:
        sums = _add_product(sums, codes_of(high_words, TILE, True, DTYPE), weights, PRECISION)
    return totals_of(sums, DTYPE) * weight_of(TILE)


@triton.jit
def add_values_along_tokens(
    accs, shrink, weights, largest, words, high_words, metadata, WORDS: tl.constexpr, PADDED: tl.constexpr,
    FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the four tiles of values with a block's added: its scales and offsets belong to channels."""
    word = tl.arange(0, PADDED)[:, None]
    unit = unit_of(largest, DTYPE)
    side = in_order(operand(weights, 1 / unit, DTYPE))
    total = tl.sum(weights, 0)
    new = ()
    for tile in tl.static_range(4):
        codes = _weighted_codes(side, words, high_words, tile, FOUR_BITS, DTYPE, PRECISION)
        scale, offset = scale_and_offset(tl.load(metadata + tile * WORDS + word, mask=word < WORDS, other=0))
        new = new + (accs[tile] * shrink + (codes * unit + total * offset) * scale,)
    return new


@triton.jit
def add_values_along_channels(
    accs, sums, shrink, weights, largest, words, high_words, metadata, token, token_used, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the four tiles of weighted codes with a block's added, and each group's sum of weight * scale * offset."""
    new, new_sums = (), ()
    for group in tl.static_range(GROUPS):
        scale, offset = scale_and_offset(tl.load(metadata + group * BLOCK + token, mask=token_used, other=0))
        scaled = weights * scale
        new_sums = new_sums + (sums[group] * shrink + tl.sum(scaled * offset, 0),)
        unit = unit_of(largest * tl.max(scale), DTYPE)
        side = in_order(operand(scaled, 1 / unit, DTYPE))
        for tile in tl.static_range(4):
            if tile * GROUPS // 4 == group:
                codes = _weighted_codes(side, words, high_words, tile, FOUR_BITS, DTYPE, PRECISION)
                new = new + (accs[tile] * shrink + codes * unit,)
    return new, new_sums
