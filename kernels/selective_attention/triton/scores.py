"""The first launch: scores of all keys as integers, and the largest of each chunk.

    s_j = scale q . k_j + c - c_j            order(s_j), an int32 that is as large as s_j among the scores
    m_n = max of order(s_j) over the CHUNK keys of chunk n

One program has the query heads of one key head (up to ROWS of them) and one split of a row's keys: every tile of K is
loaded once. Scores are rows of a matrix product [heads, keys], padded to what tensor cores take. A row's keys are
divided among its splits on the device, from kv_start and kv_end. Chunks begin at multiples of CHUNK in the storage;
slots of a chunk that are not in use have the number NONE, below all scores.
"""

import triton
import triton.language as tl

NONE: tl.constexpr = tl.constexpr(-(2**31))
"""The number of a slot that is not in use."""
MOST: tl.constexpr = tl.constexpr(2**31 - 1)
"""The number of a NaN, above all scores: it is chosen, and shows in the output."""


@triton.jit
def order_of(scores):
    """Return int32 in the order of float32 scores; the two zeros are one number."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    # The bits of negative numbers grow as the numbers fall.
    order = tl.where(bits < 0, bits ^ MOST, bits)
    return tl.where(scores != scores, MOST, order)


@triton.jit
def score_of(order):
    """Return the float32 scores of `order_of`."""
    return tl.where(order < 0, order ^ MOST, order).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        *("q_stride_b", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h", "decay_stride_b", "decay_stride"),
        *("num_keys", "num_chunks"),
    ]
)
def score_split(
    q, k, decay, kv_start, kv_end, order, maxima,
    q_stride_b, q_stride_h, k_stride_b, k_stride_s, k_stride_h, decay_stride_b, decay_stride,
    num_keys, num_chunks, scale, softcap,
    Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr, DECAY_ALONG_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS_PER_KEY_HEAD: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_KEY_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Heads of one key head, one split of the keys, one batch row.

    order: int32 [B, NUM_HEADS, num_chunks * CHUNK]. maxima: int32 [B, NUM_HEADS, num_chunks].
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    PARTS: tl.constexpr = (HEADS_PER_KEY_HEAD + ROWS - 1) // ROWS
    key_head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    split, batch = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    row_used = part * ROWS + row < HEADS_PER_KEY_HEAD
    head = key_head * HEADS_PER_KEY_HEAD + part * ROWS + row
    key_dim, tile_key = tl.arange(0, BLOCK_KEY_DIM), tl.arange(0, BLOCK_KEYS)
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + batch)
    if kv_end is not None:
        end = tl.load(kv_end + batch)
    first_tile = start // BLOCK_KEYS
    split_tiles = tl.cdiv(tl.cdiv(end, BLOCK_KEYS) - first_tile, tl.num_programs(1))
    begin = (first_tile + split * split_tiles) * BLOCK_KEYS
    stop = tl.minimum(begin + split_tiles * BLOCK_KEYS, end)

    # A cache may hold more than 2^31 numbers: offsets that grow with batch and time are 64 bits wide.
    batch = batch.to(tl.int64)
    q += batch * q_stride_b * Q_UNIT
    q_mask = row_used[:, None] & (key_dim < KEY_DIM)
    q_tile = tl.load(q + head[:, None] * (q_stride_h * Q_UNIT) + key_dim, mask=q_mask, other=0.0)
    k += batch * k_stride_b * K_UNIT + key_head * (k_stride_h.to(tl.int64) * K_UNIT)
    k_step = k_stride_s.to(tl.int64) * K_UNIT
    k_offset = tile_key[:, None] * (k_stride_s * K_UNIT) + key_dim
    if decay is not None:
        decay += batch * decay_stride_b
        head_step = decay_stride if DECAY_ALONG_KEYS else 1
        key_step = 1 if DECAY_ALONG_KEYS else decay_stride
        decay += head[:, None].to(tl.int64) * head_step
        own_decay = tl.load(decay + (end - 1).to(tl.int64) * key_step, mask=row_used[:, None], other=0.0)
    of_row = batch * NUM_HEADS + head[:, None]
    order += of_row * (num_chunks.to(tl.int64) * CHUNK)
    maxima += of_row * num_chunks.to(tl.int64)

    for tile in tl.range(begin, stop, BLOCK_KEYS):
        key = tile + tile_key
        held = (key >= start) & (key < end)
        k_mask = held[:, None] & (key_dim < KEY_DIM)
        k_tile = tl.load(k + tile * k_step + k_offset, mask=k_mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        if softcap is not None:
            # tanh
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        if decay is not None:
            key_decay = tl.load(decay + key.to(tl.int64) * key_step, mask=row_used[:, None] & held, other=0.0)
            # Large sums cancel here, so subtract them in their own dtype.
            scores += (own_decay - key_decay).to(tl.float32)
        found = tl.where(held, order_of(scores), NONE)
        used = row_used[:, None] & (key < num_chunks * CHUNK)
        tl.store(order + key, found, mask=used)
        chunk = tile // CHUNK + tl.arange(0, BLOCK_KEYS // CHUNK)
        largest = tl.max(tl.reshape(found, (ROWS, BLOCK_KEYS // CHUNK, CHUNK)), 2)
        tl.store(maxima + chunk, largest, mask=row_used[:, None] & (chunk < num_chunks))
