"""The backward pass for Hopper, in Gluon: the arithmetic of triton/backward.py, scheduled by hand.

A program owns one block of 128 keys and has up to four groups of warps that run concurrently:

    one warp loads tiles of Q and dO through the tensor memory accelerator, ahead of the others;
    two warpgroups compute P, dS, dV and dK, each for 64 of the keys (rows of the transposed tiles);
    a third (head dimensions up to 64) multiplies dS, read from shared memory, by K and adds dQ to a float32 buffer in
    global memory. Without it each of the two computes half the channels of dQ.

While one warpgroup waits for its exponentials, the tensor cores work for the others. All blocks of keys add to the same
dQ with atomics, in no fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.forgetting_attention.hopper.tiles import load_tile, rows_alike, thread_barrier, tiles, width
from kernels.forgetting_attention.triton.backward import for_each_head, less_grad_lse, sum_over_heads
from kernels.forgetting_attention.triton.configs import Config
from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, Decay, give_rows_their_own
from kernels.forgetting_attention.triton.forward import descriptor, tile_width
from kernels.forgetting_attention.triton.ranges import GRAIN, Ranges
from kernels.rounding import cdiv

PARTS = gl.constexpr(16)


@gluon.jit
def _in_tiles(query, channel, KEY_DIM: gl.constexpr):
    """Where dQ is summed: in tiles of 8 x 8, as warps hold them, so that a warp adds to 256 bytes in one piece."""
    return (query // 8 * (KEY_DIM // 8) + channel // 8) * 64 + query % 8 * 8 + channel % 8


@gluon.jit
def _load_tiles(
    q_tiles, k_tiles, v_tiles, grad_out_tiles, q_smem, k_smem, v_smem, grad_out_smem, stats_smem, kv_full, full,
    empty, stats, base, scale, row, head, key_head, value_head, first_key, offset, begin, count,
    BLOCK_M: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_GATES: gl.constexpr,
):  # fmt: skip
    """The loading warp: tiles, and lse and delta of their queries, one after the other."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2 * BLOCK_M // 32], [32], [1], [0])
    mbarrier.expect(kv_full, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
    load_tile(k_tiles, [row, key_head, first_key, 0], kv_full, k_smem)
    load_tile(v_tiles, [row, value_head, first_key, 0], kv_full, v_smem)
    base_at_keys = gl.to_tensor(0.0)
    if HAS_GATES:
        base_at_keys = gl.load(base + first_key // CHUNK)
    lane = gl.arange(0, 2 * BLOCK_M, LAYOUT)
    inverse_scale = -1.0 / scale
    for index in range(count):
        stage = index % STAGES
        m = begin + index
        # lse becomes relative to the chunk of the keys, as the logits are.
        row_stats = gl.load(stats + m * (2 * BLOCK_M) + lane)
        if HAS_GATES:
            reference = gl.load(base + (m * BLOCK_M // CHUNK * CHUNK + offset) // CHUNK)
            shift = (reference - base_at_keys).to(gl.float32)
            row_stats = gl.where(lane < BLOCK_M, row_stats - shift, row_stats)
        row_stats = gl.where(lane < BLOCK_M, row_stats * inverse_scale, -row_stats)
        mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), q_tiles.block_type.nbytes + grad_out_tiles.block_type.nbytes)
        load_tile(q_tiles, [row, head, m * BLOCK_M, 0], full.index(stage), q_smem.index(stage))
        load_tile(grad_out_tiles, [row, head, m * BLOCK_M, 0], full.index(stage), grad_out_smem.index(stage))
        stats_smem.index(stage).store(row_stats)
        thread_barrier()
        mbarrier.arrive(full.index(stage))


@gluon.jit
def _add_grad_q(
    k_smem, grad_smem, kv_full, grad_full, grad_empty, grad_q_sums, begin, count,
    BLOCK_M: gl.constexpr, KEY_DIM: gl.constexpr,
):  # fmt: skip
    """The third warpgroup: dQ = dS K."""
    GRAD_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_DIM, 16])
    nothing = gl.zeros([BLOCK_M, KEY_DIM], gl.float32, GRAD_Q)
    channel = gl.arange(0, KEY_DIM, gl.SliceLayout(0, GRAD_Q))
    offsets = _in_tiles(gl.arange(0, BLOCK_M, gl.SliceLayout(1, GRAD_Q))[:, None], channel[None, :], KEY_DIM)
    mbarrier.wait(kv_full, 0)
    for index in range(count):
        buffer = index % 2
        mbarrier.wait(grad_full.index(buffer), index // 2 & 1)
        grad = grad_smem.index(buffer).permute((1, 0))
        grad_q = warpgroup_mma(grad, k_smem, nothing, use_acc=False, is_async=True)
        grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
        mbarrier.arrive(grad_empty.index(buffer))
        gl.atomic_add(grad_q_sums + (begin + index) * (BLOCK_M * KEY_DIM) + offsets, grad_q, sem="relaxed")


@gluon.jit
def _compute(
    half, q_smem, k_all_smem, k_smem, v_smem, grad_out_smem, grad_smem, stats_smem, kv_full, full, empty,
    grad_full, grad_empty, local, grad_keys_out, grad_queries, first_of, grad_q_sums, grad_k_out,
    grad_v_out, scale, scale_grad, row, head, heads, offset, num_queries, num_keys, first_key, begin, count,
    whole_from, whole_stop,
    BLOCK_M: gl.constexpr, HALF: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    KEY_WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr, STAGES: gl.constexpr,
    HAS_GATES: gl.constexpr, HAS_FIRST: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that compute: the keys [first_key, first_key + HALF)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRAD_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_DIM, 16])
    GRAD_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    dtype: gl.constexpr = q_smem.dtype
    key = first_key + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    key_bias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    if HAS_GATES:
        key_bias = gl.load(local + key, mask=key < num_keys, other=0.0)
    grad_k = gl.zeros([HALF, KEY_DIM], gl.float32, GRAD_K)
    grad_v = gl.zeros([HALF, VALUE_DIM], gl.float32, GRAD_V)
    grad_keys = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([HALF, BLOCK_M], gl.float32, SCORES)
    PIECE: gl.constexpr = KEY_DIM // 2
    GRAD_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    no_grad_q = gl.zeros([BLOCK_M, PIECE], gl.float32, GRAD_Q)
    channel = half * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, GRAD_Q))
    offsets = _in_tiles(gl.arange(0, BLOCK_M, gl.SliceLayout(1, GRAD_Q))[:, None], channel[None, :], KEY_DIM)

    mbarrier.wait(kv_full, 0)
    for index in range(count):
        m = begin + index
        stage = index % STAGES
        buffer = index % 2
        # Start the accumulators at -lse / scale and -delta: this costs no extra instructions and no extra registers.
        mbarrier.wait(full.index(stage), index // STAGES & 1)
        q = q_smem.index(stage)
        grad_out = grad_out_smem.index(stage)
        lse = rows_alike(stats_smem.index(stage).slice(0, BLOCK_M), nothing)
        delta = rows_alike(stats_smem.index(stage).slice(BLOCK_M, BLOCK_M), nothing)
        scores = warpgroup_mma(k_smem, q.permute((1, 0)), lse, is_async=True)
        grad_weights = warpgroup_mma(v_smem, grad_out.permute((1, 0)), delta, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        weights = gl.exp2(scores * scale - key_bias[:, None])
        if (m < whole_from) | (m >= whole_stop):
            query = m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
            position = query + offset
            visible = key[:, None] <= position[None, :]
            if HAS_FIRST:
                first = gl.load(first_of + position, mask=query < num_queries, other=0)
                visible = visible & (key[:, None] >= first[None, :])
            weights = gl.where(visible, weights, 0.0)
        halves = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, GRAD_V, 2))
        grad_v = warpgroup_mma(halves, grad_out, grad_v, is_async=True)
        grad_weights = warpgroup_mma_wait(1, deps=(grad_weights,))
        grad_logits = weights * grad_weights
        if HAS_GATES and THIRD:
            by_key = gl.sum(grad_logits, 1)
        grad_halves = grad_logits.to(dtype)
        halves = gl.convert_layout(grad_halves, gl.DotOperandLayout(0, GRAD_K, 2))
        grad_k = warpgroup_mma(halves, q, grad_k, is_async=True)
        if THIRD:
            mbarrier.wait(grad_empty.index(buffer), (index // 2 & 1) ^ 1)
        grad_smem.index(buffer).slice(half * HALF, HALF).store(grad_halves)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(grad_full.index(buffer))
        if HAS_GATES:
            if not THIRD:
                # Sum the rounded values, after the store: registers are scarce, and holding more here spills others.
                by_key = gl.sum(grad_halves.to(gl.float32), 1)
            grad_keys -= by_key
            # Leave the tile's sum in PARTS partial sums: reducing it here would synchronize all warps.
            gl.atomic_add(grad_queries + m * PARTS + key % PARTS, by_key, sem="relaxed")
        if THIRD:
            grad_v, grad_k = warpgroup_mma_wait(0, deps=(grad_v, grad_k))
            mbarrier.arrive(empty.index(stage))
        else:
            # Each warpgroup waits until both have stored dS, so both have read the previous dS: two buffers suffice.
            mbarrier.wait(grad_full.index(buffer), index // 2 & 1)
            grad = grad_smem.index(buffer).permute((1, 0))
            k = k_all_smem.slice(half * PIECE, PIECE, dim=1)
            grad_q = warpgroup_mma(grad, k, no_grad_q, use_acc=False, is_async=True)
            grad_v, grad_k, grad_q = warpgroup_mma_wait(0, deps=(grad_v, grad_k, grad_q))
            mbarrier.arrive(empty.index(stage))
            gl.atomic_add(grad_q_sums + m * (BLOCK_M * KEY_DIM) + offsets, grad_q, sem="relaxed")

    key = first_key + gl.arange(0, HALF, gl.SliceLayout(1, GRAD_K))
    channel = gl.arange(0, KEY_DIM, gl.SliceLayout(0, GRAD_K))
    address = ((row * num_keys + key[:, None]).to(gl.int64) * heads + head) * KEY_WIDTH + channel[None, :]
    grad_k = (grad_k * scale_grad).to(grad_k_out.dtype.element_ty)
    gl.store(grad_k_out + address, grad_k, mask=(key[:, None] < num_keys) & (channel[None, :] < KEY_WIDTH))
    key = first_key + gl.arange(0, HALF, gl.SliceLayout(1, GRAD_V))
    channel = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, GRAD_V))
    address = ((row * num_keys + key[:, None]).to(gl.int64) * heads + head) * VALUE_WIDTH + channel[None, :]
    grad_v = grad_v.to(grad_v_out.dtype.element_ty)
    gl.store(grad_v_out + address, grad_v, mask=(key[:, None] < num_keys) & (channel[None, :] < VALUE_WIDTH))
    if HAS_GATES:
        key = first_key + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        gl.store(grad_keys_out + key, grad_keys, mask=key < num_keys)


@gluon.jit(
    do_not_specialize=["scale", "scale_grad", "num_queries", "num_keys", "first_heads", "key_group", "value_group"]
)
def _backward(
    q_tiles, k_tiles, v_tiles, grad_out_tiles, stats, local, base, grad_keys_out, grad_queries, first_of, seen_until,
    whole_until, grad_q_sums, grad_k_out, grad_v_out,
    scale, scale_grad, num_queries, num_keys, first_heads, key_group, value_group,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    KEY_WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr, CHUNK: gl.constexpr, GRAIN: gl.constexpr,
    STAGES: gl.constexpr, HAS_GATES: gl.constexpr, HAS_FIRST: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    n, head, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    heads = gl.num_programs(1)
    plane = row.to(gl.int64) * heads + head
    chunks = gl.cdiv(num_keys, CHUNK)
    rows = gl.cdiv(num_queries, CHUNK) * CHUNK
    offset = num_keys - num_queries
    first_key = n * BLOCK_N
    begin = gl.maximum(first_key - offset, 0) // BLOCK_M
    whole_from = gl.cdiv(gl.maximum(first_key + BLOCK_N - 1 - offset, 0), BLOCK_M)
    stop = gl.cdiv(num_queries, BLOCK_M)
    whole_stop = stop
    if HAS_FIRST:
        grains = gl.cdiv(num_keys, GRAIN)
        of_head = row.to(gl.int64) * first_heads + head % first_heads
        first_of += of_head * chunks * CHUNK
        at = of_head * grains + n * BLOCK_N // GRAIN
        last = gl.load(seen_until + at)
        for grain in gl.static_range(1, BLOCK_N // GRAIN):
            exists = n * BLOCK_N // GRAIN + grain < grains
            last = gl.maximum(last, gl.load(seen_until + gl.where(exists, at + grain, at)))
        last_whole = gl.load(whole_until + at)
        stop = gl.where(last < offset, begin, (last - offset) // BLOCK_M + 1)
        whole_stop = gl.where(last_whole >= num_keys - 1, stop, gl.maximum(last_whole + 1 - offset, 0) // BLOCK_M)
    count = gl.maximum(stop - begin, 0)

    if HAS_GATES:
        local += plane * chunks * CHUNK
        base += plane * chunks
        grad_keys_out += plane * chunks * CHUNK
        grad_queries += plane * gl.cdiv(num_queries, BLOCK_M) * PARTS
    stats += plane * 2 * rows
    grad_q_sums += plane * rows * KEY_DIM
    LAYOUT_K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, BLOCK_M, KEY_DIM], LAYOUT_K)
    grad_out_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, BLOCK_M, VALUE_DIM], LAYOUT_K)
    k_smem = gl.allocate_shared_memory(q_tiles.dtype, [BLOCK_N, KEY_DIM], LAYOUT_K)
    v_smem = gl.allocate_shared_memory(q_tiles.dtype, [BLOCK_N, VALUE_DIM], LAYOUT_K)
    grad_smem = gl.allocate_shared_memory(q_tiles.dtype, [2, BLOCK_N, BLOCK_M], LAYOUT_K)
    STATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], STATS)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIERS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    grad_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    # Allocate a barrier only if a group of warps takes it. The compiler reuses the memory of any other for the groups'
    # arguments, and nothing orders the barrier's initialization before those are stored.
    grad_empty = grad_full
    if THIRD:
        grad_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    mbarrier.init(kv_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(grad_full.index(buffer), count=2)
        if THIRD:
            mbarrier.init(grad_empty.index(buffer), count=1)
    if count > 0:
        HALF: gl.constexpr = BLOCK_N // 2
        # Spelled out twice: concatenating the lists drops constexpr-ness.
        if THIRD:
            gl.warp_specialize(
                [
                    (_compute, (
                    0, q_smem, k_smem, k_smem.slice(0, HALF), v_smem.slice(0, HALF), grad_out_smem, grad_smem,
                    stats_smem, kv_full, full, empty, grad_full, grad_empty, local, grad_keys_out,
                    grad_queries, first_of, grad_q_sums, grad_k_out, grad_v_out, scale, scale_grad, row, head, heads,
                    offset, num_queries, num_keys, first_key, begin, count, whole_from, whole_stop,
                    BLOCK_M, HALF, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST, THIRD,
                )),
                    (_compute, (
                    1, q_smem, k_smem, k_smem.slice(HALF, HALF), v_smem.slice(HALF, HALF), grad_out_smem, grad_smem,
                    stats_smem, kv_full, full, empty, grad_full, grad_empty, local, grad_keys_out,
                    grad_queries, first_of, grad_q_sums, grad_k_out, grad_v_out, scale, scale_grad, row, head, heads,
                    offset, num_queries, num_keys, first_key + HALF, begin, count, whole_from, whole_stop,
                    BLOCK_M, HALF, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST, THIRD,
                )),
                    (_add_grad_q, (
                        k_smem, grad_smem, kv_full, grad_full, grad_empty, grad_q_sums, begin, count, BLOCK_M, KEY_DIM,
                    )),
                    (_load_tiles, (
                    q_tiles, k_tiles, v_tiles, grad_out_tiles, q_smem, k_smem, v_smem, grad_out_smem, stats_smem,
                    kv_full, full, empty, stats, base, scale, row, head, head // key_group, head // value_group,
                    first_key, offset, begin, count, BLOCK_M, CHUNK, STAGES, HAS_GATES,
                )),
                ],
                [4, 4, 1],
                [200, 88, 24],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_compute, (
                    0, q_smem, k_smem, k_smem.slice(0, HALF), v_smem.slice(0, HALF), grad_out_smem, grad_smem,
                    stats_smem, kv_full, full, empty, grad_full, grad_empty, local, grad_keys_out,
                    grad_queries, first_of, grad_q_sums, grad_k_out, grad_v_out, scale, scale_grad, row, head, heads,
                    offset, num_queries, num_keys, first_key, begin, count, whole_from, whole_stop,
                    BLOCK_M, HALF, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST, THIRD,
                )),
                    (_compute, (
                    1, q_smem, k_smem, k_smem.slice(HALF, HALF), v_smem.slice(HALF, HALF), grad_out_smem, grad_smem,
                    stats_smem, kv_full, full, empty, grad_full, grad_empty, local, grad_keys_out,
                    grad_queries, first_of, grad_q_sums, grad_k_out, grad_v_out, scale, scale_grad, row, head, heads,
                    offset, num_queries, num_keys, first_key + HALF, begin, count, whole_from, whole_stop,
                    BLOCK_M, HALF, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, STAGES, HAS_GATES, HAS_FIRST, THIRD,
                )),
                    (_load_tiles, (
                    q_tiles, k_tiles, v_tiles, grad_out_tiles, q_smem, k_smem, v_smem, grad_out_smem, stats_smem,
                    kv_full, full, empty, stats, base, scale, row, head, head // key_group, head // value_group,
                    first_key, offset, begin, count, BLOCK_M, CHUNK, STAGES, HAS_GATES,
                )),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries"])
def _row_statistics_of(
    out_tiles, grad_out_tiles, lse, grad_lse, stats, num_queries,
    BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    plane = row.to(tl.int64) * tl.num_programs(1) + head
    out = out_tiles.load([row, head, block * BLOCK, 0]).reshape(BLOCK, VALUE_DIM).to(tl.float32)
    grad_out = grad_out_tiles.load([row, head, block * BLOCK, 0]).reshape(BLOCK, VALUE_DIM).to(tl.float32)
    query = block * BLOCK + tl.arange(0, BLOCK)
    rows = tl.cdiv(num_queries, BLOCK) * BLOCK
    values = tl.load(lse + plane * rows + query, mask=query < num_queries, other=float("inf"))
    address = stats + plane * 2 * rows + query // BLOCK_M * (2 * BLOCK_M) + query % BLOCK_M
    tl.store(address, values)
    delta = tl.sum(out * grad_out, 1)
    if grad_lse is not None:
        delta = less_grad_lse(delta, grad_lse, values, query, num_queries, row, head, tl.num_programs(1))
    tl.store(address + BLOCK_M, delta)


@triton.jit(do_not_specialize=["scale", "num_queries"])
def _finish_grad_q(
    sums, grad_q_tiles, scale, num_queries, BLOCK: tl.constexpr, KEY_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    plane = row.to(tl.int64) * tl.num_programs(1) + head
    rows = tl.cdiv(num_queries, BLOCK) * BLOCK
    query = block * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)[None, :]
    tile = query[:, None] // 8 * (KEY_DIM // 8) + channel // 8
    grad = tl.load(sums + plane * rows * KEY_DIM + tile * 64 + query[:, None] % 8 * 8 + channel % 8) * scale
    grad_q_tiles.store([row, head, block * BLOCK, 0], grad.to(grad_q_tiles.dtype).reshape(1, 1, BLOCK, WIDTH))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    decay: Decay | None,
    ranges: Ranges | None,
    scale: float,
    config: Config,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Compute `triton_backward.backward` for inputs that `hopper_tiles.supports`; grad_queries sums block_m queries."""
    batch, num_queries, heads, _ = q.shape
    num_keys = k.shape[1]
    key_dim, value_dim = width(q), width(v)
    rows = lse.shape[2]
    stats = lse.new_empty(batch, heads, 2 * rows)
    _row_statistics_of[(rows // CHUNK, heads, batch)](
        descriptor(out, CHUNK), descriptor(grad_out, CHUNK), lse, grad_lse, stats, num_queries,
        BLOCK=CHUNK, VALUE_DIM=tile_width(v), BLOCK_M=config.block_m,
    )  # fmt: skip
    # Zero the accumulation buffers, and gradients that may stay unwritten: keys that no query sees.
    groups = cdiv(num_queries, config.block_m)
    sizes = [batch * heads * rows * key_dim, 0 if decay is None else batch * heads * groups * PARTS.value]
    sums, grad_queries = lse.new_zeros(sum(sizes)).split(sizes)
    new = torch.empty if num_queries == num_keys else torch.zeros
    grad_k, grad_v = for_each_head(k, heads, new), for_each_head(v, heads, new)
    grad_keys = None
    if decay is not None:
        grad_keys = new(decay.local.shape, dtype=torch.float32, device=q.device)
        grad_queries = grad_queries.view(batch, heads, groups, PARTS.value)
    _backward[(cdiv(num_keys, config.block_n), heads, batch)](
        tiles(q, config.block_m), tiles(k, config.block_n), tiles(v, config.block_n), tiles(grad_out, config.block_m),
        stats, *((stats,) * 4 if decay is None else (decay.local, decay.base, grad_keys, grad_queries)),
        *((stats,) * 3 if ranges is None else (ranges.first, ranges.seen_until, ranges.whole_until)), sums, grad_k,
        grad_v, scale * LOG2_E, scale, num_queries, num_keys, 1 if ranges is None else ranges.first.shape[1],
        heads // k.shape[2], heads // v.shape[2],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_WIDTH=k.shape[3],
        VALUE_WIDTH=v.shape[3], CHUNK=CHUNK, GRAIN=GRAIN, STAGES=config.num_stages, HAS_GATES=decay is not None,
        HAS_FIRST=ranges is not None, THIRD=max(key_dim, value_dim) <= 64, num_warps=config.num_warps,
    )  # fmt: skip
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    _finish_grad_q[(rows // CHUNK, heads, batch)](
        sums, descriptor(grad_q, CHUNK), scale, num_queries, BLOCK=CHUNK, KEY_DIM=key_dim, WIDTH=tile_width(q)
    )
    if decay is not None and grad_lse is not None:
        give_rows_their_own(grad_keys, grad_queries, grad_lse, lse, num_keys, config.block_m)
    return grad_q, sum_over_heads(grad_k, k), sum_over_heads(grad_v, v), grad_keys, grad_queries
