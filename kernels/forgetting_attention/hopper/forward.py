"""The forward pass for Hopper, in Gluon: the arithmetic of triton/forward.py, scheduled by hand.

A program owns one block of 128 queries. One warp loads tiles of K and V through the tensor memory accelerator, and the
decay of their keys; two warpgroups compute, each for 64 of the queries. Tiles of keys are read from the diagonal
backwards. In each warpgroup the products overlap with the softmax:

    S of a tile and P V of the previous tile are in flight together; while P V runs, P of this tile is computed.

The decay needs no extra registers: it initializes the accumulator of S, relative to the queries' own chunk and in units
of the scale.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.forgetting_attention.hopper.tiles import load_tile, rows_alike, thread_barrier, tiles, width
from kernels.forgetting_attention.triton.configs import Config
from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, Decay
from kernels.forgetting_attention.triton.ranges import GRAIN, Ranges
from kernels.rounding import cdiv


@gluon.jit
def _load_tiles(
    q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, bias_smem, q_full, k_full, v_full, k_empty, v_empty,
    local, base, scale, row, head, key_head, value_head, first_query, offset, last_block, count,
    HALF: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_GATES: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0])
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), q_tiles.block_type.nbytes)
        load_tile(q_tiles, [row, head, first_query + half * HALF, 0], q_full.index(half), q_smem.index(half))
    reference = gl.to_tensor(0.0)
    if HAS_GATES:
        reference = gl.load(base + (first_query // CHUNK * CHUNK + offset) // CHUNK)
    inverse_scale = 1.0 / scale
    lane = gl.arange(0, BLOCK_N, LAYOUT)
    for index in range(count):
        stage = index % STAGES
        phase = (index // STAGES & 1) ^ 1
        first_key = (last_block - index) * BLOCK_N
        if HAS_GATES:
            decay = gl.load(local + first_key + lane)
            shift = (reference - gl.load(base + first_key // CHUNK)).to(gl.float32)
            decay = (shift - decay) * inverse_scale
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_tiles.block_type.nbytes)
        load_tile(k_tiles, [row, key_head, first_key, 0], k_full.index(stage), k_smem.index(stage))
        if HAS_GATES:
            bias_smem.index(stage).store(decay)
            thread_barrier()
            mbarrier.arrive(k_full.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_tiles.block_type.nbytes)
        load_tile(v_tiles, [row, value_head, first_key, 0], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _logits(
    q_smem, k_smem, bias_smem, k_full, nothing, index, STAGES: gl.constexpr, HAS_GATES: gl.constexpr
):  # fmt: skip
    """Start the product of a tile of scores."""
    stage = index % STAGES
    mbarrier.wait(k_full.index(stage), index // STAGES & 1)
    k = k_smem.index(stage).permute((1, 0))
    if HAS_GATES:
        scores = warpgroup_mma(q_smem, k, rows_alike(bias_smem.index(stage), nothing), is_async=True)
    else:
        scores = warpgroup_mma(q_smem, k, nothing, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _hide(
    scores, first_of, first_position, num_queries, query, n, masked, BLOCK_N: gl.constexpr, HAS_FIRST: gl.constexpr
):  # fmt: skip
    """-inf for keys that a query may not see."""
    if masked:
        SCORES: gl.constexpr = scores.type.layout
        ROWS: gl.constexpr = scores.type.shape[0]
        local_query = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        position = first_position + local_query
        key = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        visible = key[None, :] <= position[:, None]
        if HAS_FIRST:
            first = gl.load(first_of + position, mask=query + local_query < num_queries, other=2147483647)
            visible = visible & (key[None, :] >= first[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, row_max, scale):
    """New maxima (in units of the scale), weights, and what the earlier sums shrink by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf, and must not give NaN.
    subtracted = gl.where(new_max == float("-inf"), 0.0, new_max) * scale
    weights = gl.exp2(scores * scale - subtracted[:, None])
    shrink = gl.exp2(row_max * scale - subtracted)
    return new_max, weights, shrink


@gluon.jit
def _compute(
    half, q_smem, k_smem, v_smem, bias_smem, q_full, k_full, v_full, k_empty, v_empty, out_out, lse_out, first_of,
    scale, row, head, heads, num_queries, query, first_position, last_block, count, num_diagonal, hidden_from,
    HALF: gl.constexpr, BLOCK_N: gl.constexpr, VALUE_DIM: gl.constexpr, VALUE_WIDTH: gl.constexpr,
    STAGES: gl.constexpr, HAS_GATES: gl.constexpr, HAS_FIRST: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups: the queries [query, query + HALF)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    dtype: gl.constexpr = q_smem.dtype
    nothing = gl.zeros([HALF, BLOCK_N], gl.float32, SCORES)
    out = gl.zeros([HALF, VALUE_DIM], gl.float32, OUT)
    row_max = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    mbarrier.wait(q_full.index(half), 0)
    scores = _logits(q_smem, k_smem, bias_smem, k_full, nothing, 0, STAGES, HAS_GATES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0))
    scores = _hide(scores, first_of, first_position, num_queries, query, last_block, True, BLOCK_N, HAS_FIRST)
    row_max, weights, _ = _softmax(scores, row_max, scale)
    row_sum = gl.sum(weights, 1)
    halves = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
    for index in range(1, count):
        stage = (index - 1) % STAGES
        scores = _logits(q_smem, k_smem, bias_smem, k_full, nothing, index, STAGES, HAS_GATES)
        mbarrier.wait(v_full.index(stage), (index - 1) // STAGES & 1)
        out = warpgroup_mma(halves, v_smem.index(stage), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(index % STAGES))
        masked = (index < num_diagonal) | (index >= hidden_from)
        n = last_block - index
        scores = _hide(scores, first_of, first_position, num_queries, query, n, masked, BLOCK_N, HAS_FIRST)
        row_max, weights, shrink = _softmax(scores, row_max, scale)
        row_sum = row_sum * shrink + gl.sum(weights, 1)
        out = warpgroup_mma_wait(0, deps=(out,))
        mbarrier.arrive(v_empty.index(stage))
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        halves = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
    stage = (count - 1) % STAGES
    mbarrier.wait(v_full.index(stage), (count - 1) // STAGES & 1)
    out = warpgroup_mma(halves, v_smem.index(stage), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=(out,))

    seen = row_sum > 0
    lse = gl.where(seen, row_max * scale + gl.log2(row_sum), float("inf"))
    local_query = gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    gl.store(lse_out + query + local_query, lse)
    inverse = gl.where(seen, 1.0 / row_sum, 0.0)
    out = out * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
    rows = query + gl.arange(0, HALF, gl.SliceLayout(1, OUT))[:, None]
    channel = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, OUT))[None, :]
    address = ((row * num_queries + rows).to(gl.int64) * heads + head) * VALUE_WIDTH + channel
    gl.store(out_out + address, out.to(dtype), mask=(rows < num_queries) & (channel < VALUE_WIDTH))


@gluon.jit(do_not_specialize=["scale", "num_queries", "num_keys", "first_heads", "key_group", "value_group"])
def _forward(
    q_tiles, k_tiles, v_tiles, out_out, lse_out, local, base, first_of, kept_from,
    scale, num_queries, num_keys, first_heads, key_group, value_group,
    HALF: gl.constexpr, BLOCK_N: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    VALUE_WIDTH: gl.constexpr, CHUNK: gl.constexpr, GRAIN: gl.constexpr, STAGES: gl.constexpr,
    HAS_GATES: gl.constexpr, HAS_FIRST: gl.constexpr, PRUNES: gl.constexpr,
):  # fmt: skip
    # Schedule the longest rows first, so that short ones fill the end.
    m = gl.num_programs(0) - 1 - gl.program_id(0)
    head, row = gl.program_id(1), gl.program_id(2)
    heads = gl.num_programs(1)
    plane = row.to(gl.int64) * heads + head
    chunks = gl.cdiv(num_keys, CHUNK)
    offset = num_keys - num_queries
    query = m * (2 * HALF)
    first_position = query + offset
    last_position = gl.minimum(first_position + 2 * HALF, num_keys) - 1
    begin = 0
    masked_until = 0
    if HAS_FIRST:
        first_of += (row.to(gl.int64) * first_heads + head % first_heads) * chunks * CHUNK
        begin = gl.load(first_of + first_position)
        masked_until = gl.load(first_of + last_position)
        if PRUNES:
            kept = gl.load(kept_from + plane * gl.cdiv(num_queries, GRAIN) + query // GRAIN)
            begin = gl.maximum(begin, kept)
    first_block = begin // BLOCK_N
    last_block = last_position // BLOCK_N
    count = last_block - first_block + 1
    num_diagonal = last_block + 1 - (first_position + 1) // BLOCK_N
    hidden_from = last_block + 1 - gl.cdiv(masked_until, BLOCK_N)
    if HAS_GATES:
        local += plane * chunks * CHUNK
        base += plane * chunks
    lse_out += plane * gl.cdiv(num_queries, CHUNK) * CHUNK

    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [2, HALF, KEY_DIM], SWIZZLED)
    k_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, BLOCK_N, KEY_DIM], SWIZZLED)
    v_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, BLOCK_N, VALUE_DIM], SWIZZLED)
    bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=2 if HAS_GATES else 1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_compute, (
                0, q_smem.index(0), k_smem, v_smem, bias_smem, q_full, k_full, v_full, k_empty, v_empty, out_out,
                lse_out, first_of, scale, row, head, heads, num_queries, query, first_position, last_block, count,
                num_diagonal, hidden_from,
                HALF, BLOCK_N, VALUE_DIM, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST,
            )),
            (_compute, (
                1, q_smem.index(1), k_smem, v_smem, bias_smem, q_full, k_full, v_full, k_empty, v_empty, out_out,
                lse_out, first_of, scale, row, head, heads, num_queries, query + HALF, first_position + HALF,
                last_block, count, num_diagonal, hidden_from,
                HALF, BLOCK_N, VALUE_DIM, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST,
            )),
            (_load_tiles, (
                q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, bias_smem, q_full, k_full, v_full, k_empty, v_empty,
                local, base, scale, row, head, head // key_group, head // value_group, query, offset, last_block,
                count, HALF, BLOCK_N, CHUNK, STAGES, HAS_GATES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay | None,
    ranges: Ranges | None,
    scale: float,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Compute `triton_forward.forward` for inputs that `hopper_tiles.supports`."""
    batch, num_queries, heads, _ = q.shape
    num_keys = k.shape[1]
    out = q.new_empty(batch, num_queries, heads, v.shape[3])
    lse = q.new_empty(batch, heads, cdiv(num_queries, CHUNK) * CHUNK, dtype=torch.float32)
    half = config.block_m // 2
    _forward[(cdiv(num_queries, config.block_m), heads, batch)](
        tiles(q, half), tiles(k, config.block_n), tiles(v, config.block_n), out, lse,
        *((lse, lse) if decay is None else (decay.local, decay.base)), lse if ranges is None else ranges.first,
        lse if ranges is None or ranges.kept_from is None else ranges.kept_from, scale * LOG2_E, num_queries, num_keys,
        1 if ranges is None else ranges.first.shape[1], heads // k.shape[2], heads // v.shape[2],
        HALF=half, BLOCK_N=config.block_n, KEY_DIM=width(q), VALUE_DIM=width(v), VALUE_WIDTH=v.shape[3], CHUNK=CHUNK,
        GRAIN=GRAIN, STAGES=config.num_stages, HAS_GATES=decay is not None, HAS_FIRST=ranges is not None,
        PRUNES=ranges is not None and ranges.kept_from is not None, num_warps=config.num_warps,
    )  # fmt: skip
    return out, lse
