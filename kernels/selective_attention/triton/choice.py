"""The second launch: the highest scores of a row, and the softmax over their values alone.

At least `wanted` scores are as large as the wanted-th largest of the chunks' maxima. So a chunk whose maximum is
smaller holds none of the chosen keys, and is not read:

    1. a bound that `wanted` maxima lie above, and few more: bisection over the maxima
    2. the chunks whose maximum lies above it, in order
    3. a bound that exactly `wanted` scores of those chunks lie above, or else the wanted-th score: bisection again
    4. the keys of those scores, with weights exp(s - largest); of the keys with the wanted-th score, the first ones
    5. the values of those keys, weighted

Bisection halves an interval of int32, so it ends after 32 counts at most, and as a rule earlier, in the gap between two
scores. One program has one head of one batch row, in a fixed order: results do not vary. What step 2 finds
for step 3, and step 4 for step 5, passes through memory that no other program touches.
"""

import triton
import triton.language as tl

from kernels.selective_attention.triton.scores import NONE, score_of


@triton.jit
def _read(values, chunks, first, number, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return numbers from the place `first` on, NONE after the last, and where they lie.

    Places are those of `values` or, with `chunks`, of the keys in these chunks, one chunk after the other.
    """
    place = first + tl.arange(0, BLOCK)
    used = place < number
    if chunks is not None:
        place = tl.load(chunks + place // CHUNK, mask=used, other=0) * CHUNK + place % CHUNK
    return tl.load(values + place, mask=used, other=NONE), place


@triton.jit
def _count_above(values, chunks, number, bound, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Count the numbers above a bound; arguments as in `_read`."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, number, BLOCK):
        found, _ = _read(values, chunks, first, number, CHUNK, BLOCK)
        count += (found > bound).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _bisect(
    values, chunks, number, wanted, enough, low, above_low, high, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Raise `low`, which `above_low >= wanted` numbers lie above, until `enough` of them do or fewer.

    high: fewer than `wanted` numbers lie above it. Where ties leave no such bound, it ends as the wanted-th number, and
    low as high - 1.

    Returns:
        low, above_low, high, and how many numbers lie above high.
    """
    above_high = 0
    while (above_low > enough) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, which does not overflow
        above = _count_above(values, chunks, number, middle, CHUNK, BLOCK)
        is_low = above >= wanted
        low, above_low = tl.where(is_low, middle, low), tl.where(is_low, above, above_low)
        high, above_high = tl.where(is_low, high, middle), tl.where(is_low, above_high, above)
    return low, above_low, high, above_high


@triton.jit
def _range(maxima, number, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest and the largest maximum."""
    smallest, largest = tl.full((BLOCK,), 2**31 - 1, tl.int32), tl.full((BLOCK,), NONE, tl.int32)
    for first in range(0, number, BLOCK):
        found, place = _read(maxima, None, first, number, CHUNK, BLOCK)
        smallest = tl.minimum(smallest, tl.where(place < number, found, 2**31 - 1))
        largest = tl.maximum(largest, found)
    return tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _list_chunks(maxima, chunks, first_chunk, number, bound, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the chunks whose maximum lies above the bound, in order; return how many."""
    listed = 0
    for first in range(0, number, BLOCK):
        found, place = _read(maxima, None, first, number, CHUNK, BLOCK)
        is_listed = (found > bound).to(tl.int32)
        tl.store(chunks + listed + tl.cumsum(is_listed, 0) - 1, first_chunk + place, mask=is_listed != 0)
        listed += tl.sum(is_listed, 0)
    return listed


@triton.jit
def _list_keys(
    order, chunks, number, bound, ties_wanted, largest, keys, weights, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the keys whose number lies above the bound, the first `ties_wanted` that equal it, and their weights."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # The largest score is -inf where all are, and -inf - -inf is NaN.
    reference = tl.where(score_of(largest) == -float("inf"), 0.0, score_of(largest))
    listed, ties = 0, 0
    for first in range(0, number, BLOCK):
        found, place = _read(order, chunks, first, number, CHUNK, BLOCK)
        is_tie = (found == bound).to(tl.int32)
        is_chosen = (found > bound) | ((is_tie != 0) & (ties + tl.cumsum(is_tie, 0) <= ties_wanted))
        chosen = is_chosen.to(tl.int32)
        target = listed + tl.cumsum(chosen, 0) - 1
        tl.store(keys + target, place, mask=is_chosen)
        tl.store(weights + target, tl.exp2((score_of(found) - reference) * LOG2_E), mask=is_chosen)
        listed, ties = listed + tl.sum(chosen, 0), ties + tl.sum(is_tie, 0)


@triton.jit(do_not_specialize=["v_stride_b", "v_stride_s", "v_stride_h", "num_keys", "num_chunks", "top", "most_keys"])
def choose_and_attend(
    order, maxima, v, kv_start, kv_end, chunks, keys, weights, out,
    v_stride_b, v_stride_s, v_stride_h, num_keys, num_chunks, top, most_keys,
    V_UNIT: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS_PER_VALUE_HEAD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ITEMS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One head of one batch row; order and maxima are those of `score_split`.

    chunks: int32 [B, NUM_HEADS, num_chunks], keys: int32 and weights: float32 [B, NUM_HEADS, most_keys], for steps.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // NUM_HEADS, row % NUM_HEADS
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + batch)
    if kv_end is not None:
        end = tl.load(kv_end + batch)
    wanted = tl.minimum(top, end - start)
    first_chunk = start // CHUNK
    number = tl.where(wanted > 0, tl.cdiv(end, CHUNK) - first_chunk, 0)
    order += row * (num_chunks.to(tl.int64) * CHUNK)
    maxima += row * num_chunks.to(tl.int64) + first_chunk
    chunks += row * num_chunks.to(tl.int64)
    keys += row * most_keys.to(tl.int64)
    weights += row * most_keys.to(tl.int64)

    smallest, largest = _range(maxima, number, CHUNK, BLOCK)
    enough = wanted + wanted // 4
    # All chunks are read where they are too few to tell: then any key in use may be chosen.
    low = tl.where(number > enough, smallest - 1, NONE)
    low, _, _, _ = _bisect(maxima, None, number, wanted, enough, low, number, largest, CHUNK, BLOCK)
    candidates = _list_chunks(maxima, chunks, first_chunk, number, low, CHUNK, BLOCK) * CHUNK
    tl.debug_barrier()  # a thread reads what others have written

    above_low = _count_above(order, chunks, candidates, low, CHUNK, BLOCK)
    low, above_low, high, above_high = _bisect(
        order, chunks, candidates, wanted, wanted, low, above_low, largest, CHUNK, BLOCK
    )
    is_exact = above_low == wanted
    bound, ties_wanted = tl.where(is_exact, low, high), tl.where(is_exact, 0, wanted - above_high)
    _list_keys(order, chunks, candidates, bound, ties_wanted, largest, keys, weights, CHUNK, BLOCK)
    tl.debug_barrier()

    dim, item = tl.arange(0, BLOCK_VALUE_DIM), tl.arange(0, ITEMS)
    v += batch * v_stride_b * V_UNIT + head // HEADS_PER_VALUE_HEAD * (v_stride_h.to(tl.int64) * V_UNIT)
    v_step = v_stride_s.to(tl.int64) * V_UNIT
    acc, total = tl.zeros((BLOCK_VALUE_DIM,), tl.float32), tl.zeros((ITEMS,), tl.float32)
    for first in range(0, wanted, ITEMS):
        used = first + item < wanted
        key = tl.load(keys + first + item, mask=used, other=0)
        weight = tl.load(weights + first + item, mask=used, other=0.0)
        v_mask = used[:, None] & (dim < VALUE_DIM)
        value = tl.load(v + key[:, None] * v_step + dim, mask=v_mask, other=0.0)
        acc += tl.sum(weight[:, None] * value.to(tl.float32), 0)
        total += weight
    whole = tl.sum(total, 0)
    acc /= tl.where(whole == 0.0, 1.0, whole)  # a row without a key gives 0
    tl.store(out + row * VALUE_DIM + dim, acc.to(out.dtype.element_ty), mask=dim < VALUE_DIM)
