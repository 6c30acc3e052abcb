"""The forward pass in Triton: one program for each block of queries, head and batch row.

c_i is constant along row i and cancels in its softmax, so with a reference r for each block of queries, all in base 2,

    t_ij = scale log2(e) q_i . k_j + (r - base_n) - local_j          (n: the chunk of key j; see triton_decay.py)
    o_i  = sum_j 2^(t_ij - lse_i) v_j          lse_i = log2 sum_j 2^t_ij

The gate costs one addition per score: r - base_n is one number for a whole tile, and is added to the row's maximum
instead. In float32 r is c_i, and each difference is taken in float64. Keys are read in two loops: first, with a mask,
the blocks that hold both visible and hidden keys (at the start of the range, and on the diagonal), so that every row
has a finite maximum; then the rest, without a mask.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.forgetting_attention.triton.configs import Config
from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, Decay, exact_at
from kernels.forgetting_attention.triton.ranges import GRAIN, Ranges
from kernels.rounding import cdiv, next_power_of_2

LN_2 = math.log(2.0)


def tile_width(x: Tensor) -> int:
    """Return the channels of a tile of x [..., D]: a power of two that tensor cores accept."""
    return max(16, next_power_of_2(x.shape[-1]))


def descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """Describe tiles [1, 1, block, head_dim rounded up to 2^n] of x [B, N, H, D]; reads out of bounds give 0."""
    heads_first = x.transpose(1, 2)
    tile = [1, 1, block, tile_width(x)]
    return TensorDescriptor(heads_first, list(heads_first.shape), list(heads_first.stride()), tile)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay | None,
    ranges: Ranges | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T rounded up to CHUNK] float32, +inf without a key."""
    batch, num_queries, heads, _ = q.shape
    num_keys = k.shape[1]
    out = q.new_empty(batch, num_queries, heads, v.shape[3])
    lse = q.new_empty(batch, heads, cdiv(num_queries, CHUNK) * CHUNK, dtype=torch.float32)
    _forward[(cdiv(num_queries, config.block_m), heads, batch)](
        descriptor(q, config.block_m), descriptor(k, config.block_n), descriptor(v, config.block_n),
        descriptor(out, config.block_m), lse, *((None, None) if decay is None else (decay.local, decay.base)),
        *((None, None) if ranges is None else (ranges.first, ranges.kept_from)), kv_start, kv_end, scale * LOG2_E,
        num_queries, num_keys, 1 if ranges is None else ranges.first.shape[1], heads // k.shape[2], heads // v.shape[2],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, KEY_DIM=tile_width(q), VALUE_DIM=tile_width(v), CHUNK=CHUNK,
        GRAIN=GRAIN, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse


@triton.jit
def _tile(
    acc, row_max, row_sum, q, position, first, n, k_tiles, v_tiles, local, base, reference, start, end, scale,
    row_decay, row, key_head, value_head,
    BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    HAS_GATES: tl.constexpr, MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax of a block of queries over one block of keys."""
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    key = n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = k_tiles.load([row, key_head, n * BLOCK_N, 0]).reshape(BLOCK_N, KEY_DIM)
    logits = tl.dot(q, k.T, input_precision=PRECISION)
    shift = 0.0
    if EXACT:
        bias = row_decay[:, None] - exact_at(local, base, key, key >= 0, CHUNK)[None, :]
        logits = logits * scale + bias.to(tl.float32)
    elif HAS_GATES:
        shift = (reference - tl.load(base + n * BLOCK_N // CHUNK)).to(tl.float32)
        logits = logits * scale - tl.load(local + key)[None, :]
    else:
        logits = logits * scale
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if HAS_FIRST:
            visible = visible & (key[None, :] >= first[:, None])
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1) + shift)
    subtracted = new_max - shift
    if MASKED:
        subtracted = tl.where(new_max == float("-inf"), 0.0, subtracted)
    weights = tl.exp2(logits - subtracted[:, None])
    if MASKED:
        shrink = tl.where(new_max == float("-inf"), 1.0, tl.exp2(row_max - new_max))
    else:
        shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    v = v_tiles.load([row, value_head, n * BLOCK_N, 0]).reshape(BLOCK_N, VALUE_DIM)
    if MASKED and PADDED:
        # Slots outside the row's keys may hold anything, even NaN, and 0 * NaN is NaN.
        v = tl.where(((key >= start) & (key < end))[:, None], v, 0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit(
    do_not_specialize=["scale", "num_queries", "num_keys", "first_heads", "key_group", "value_group"],
)
def _forward(
    q_tiles, k_tiles, v_tiles, out_tiles, lse_out, local, base, first_of, kept_from, kv_start, kv_end,
    scale, num_queries, num_keys, first_heads, key_group, value_group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, GRAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Schedule the longest rows first, so that short ones fill the end.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    plane = row.to(tl.int64) * heads + head
    HAS_GATES: tl.constexpr = local is not None
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    HAS_FIRST: tl.constexpr = first_of is not None
    PADDED: tl.constexpr = kv_start is not None or kv_end is not None
    chunks = tl.cdiv(num_keys, CHUNK)
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + row)
    if kv_end is not None:
        end = tl.load(kv_end + row)
    offset = end - num_queries
    query = m * BLOCK_M + tl.arange(0, BLOCK_M)
    position = query + offset
    first_position = m * BLOCK_M + offset
    last_position = tl.minimum(first_position + BLOCK_M, end) - 1

    begin, masked_until = 0, 0
    first = position
    if HAS_FIRST:
        firsts = first_of + (row.to(tl.int64) * first_heads + head % first_heads) * chunks * CHUNK
        first = tl.load(firsts + position, mask=query < num_queries, other=2147483647)
        begin = tl.load(firsts + first_position)
        masked_until = tl.load(firsts + last_position)
        if kept_from is not None:
            grains = tl.cdiv(num_queries, GRAIN)
            begin = tl.maximum(begin, tl.load(kept_from + plane * grains + m * BLOCK_M // GRAIN))
    first_block = begin // BLOCK_N
    diagonal = tl.maximum((first_position + 1) // BLOCK_N, first_block)
    whole_from = tl.minimum(tl.maximum(tl.cdiv(masked_until, BLOCK_N), first_block), diagonal)
    num_hidden = whole_from - first_block
    num_masked = num_hidden + tl.cdiv(last_position + 1, BLOCK_N) - diagonal

    reference = 0.0
    if HAS_GATES:
        local += plane * chunks * CHUNK
        base += plane * chunks
        reference = tl.load(base + (m * BLOCK_M // CHUNK * CHUNK + offset) // CHUNK)
    row_decay = exact_at(local, base, position, query < num_queries, CHUNK) if EXACT else None
    key_head, value_head = head // key_group, head // value_group
    q = q_tiles.load([row, head, m * BLOCK_M, 0]).reshape(BLOCK_M, KEY_DIM)
    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for index in tl.range(0, num_masked):
        n = index + tl.where(index < num_hidden, first_block, diagonal - num_hidden)
        acc, row_max, row_sum = _tile(
            acc, row_max, row_sum, q, position, first, n, k_tiles, v_tiles, local, base, reference, start, end, scale,
            row_decay, row, key_head, value_head,
            BLOCK_N, KEY_DIM, VALUE_DIM, CHUNK, HAS_GATES, True, HAS_FIRST, PADDED, PRECISION,
        )  # fmt: skip
    for n in tl.range(whole_from, diagonal):
        acc, row_max, row_sum = _tile(
            acc, row_max, row_sum, q, position, first, n, k_tiles, v_tiles, local, base, reference, start, end, scale,
            row_decay, row, key_head, value_head,
            BLOCK_N, KEY_DIM, VALUE_DIM, CHUNK, HAS_GATES, False, HAS_FIRST, PADDED, PRECISION,
        )  # fmt: skip
    seen = row_sum > 0
    out = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    lse = tl.where(seen, row_max + tl.log2(row_sum), float("inf"))
    rows = tl.cdiv(num_queries, CHUNK) * CHUNK
    tl.store(lse_out + plane * rows + query, lse, mask=query < rows)
    if m == tl.num_programs(0) - 1:
        for tail in range(m * BLOCK_M + BLOCK_M, rows, BLOCK_M):
            tl.store(
                lse_out + plane * rows + tail + tl.arange(0, BLOCK_M), tl.full([BLOCK_M], float("inf"), tl.float32)
            )
    out = out.to(out_tiles.dtype).reshape(1, 1, BLOCK_M, VALUE_DIM)
    out_tiles.store([row, head, m * BLOCK_M, 0], out)


def natural_lse(lse: Tensor, decay: Decay | None, kv_end: Tensor | None, num_queries: int, num_keys: int) -> Tensor:
    """Return the natural log-sum-exp of the scores, [B, T, Hq] float32, from `forward`'s lse; -inf for +inf.

    `forward`'s lse is relative to the base of a chunk (in float32 to c_i); this adds c_i, which cancels in the softmax.
    """
    batch, heads, rows = lse.shape
    out = lse.new_empty(batch, num_queries, heads)
    _natural_lse[(rows // CHUNK, heads, batch)](
        lse, *((None, None) if decay is None else (decay.local, decay.base)), kv_end, out, num_queries, num_keys,
        CHUNK=CHUNK, LN_2=LN_2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _natural_lse(
    lse, local, base, kv_end, out, num_queries, num_keys, CHUNK: tl.constexpr, LN_2: tl.constexpr
):  # fmt: skip
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    plane = row.to(tl.int64) * heads + head
    query = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = query < num_queries
    values = tl.load(lse + plane * tl.num_programs(0) * CHUNK + query)
    seen = exists & (values < float("inf"))
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    if local is not None and not EXACT:  # for then the sums are relative to c_i itself
        end = num_keys
        if kv_end is not None:
            end = tl.load(kv_end + row)
        offset = end - num_queries
        chunks = tl.cdiv(num_keys, CHUNK)
        base += plane * chunks
        reference = tl.load(base + (chunk * CHUNK + offset) // CHUNK)
        position = query + offset
        values += (tl.load(base + position // CHUNK, mask=seen, other=0.0) - reference).to(tl.float32)
        values += tl.load(local + plane * chunks * CHUNK + position, mask=seen, other=0.0)
    address = out + (row.to(tl.int64) * num_queries + query) * heads + head
    tl.store(address, tl.where(seen, values * LN_2, float("-inf")), mask=exists)
