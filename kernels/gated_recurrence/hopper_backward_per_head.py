"""The backward pass with a gate per head on Hopper, in Gluon: everything in one scan.

With x, y, z, w = q, k, v and the output's gradient, D_ij = exp(before_i - before_j) for j <= i, P_ij = scale w_i . z_j
D_ij, S the state at a chunk's start and dS the gradient at its end:

    dx = scale exp(before) (.) (w S^T) + P y            dS_start = exp(total) dS + (scale exp(before) (.) w)^T x
    dy = exp(after) (.) (z dS^T) + P^T x                dz = exp(after) (.) (y dS) + scale ((y x^T) (.) D^T) w

One program carries a whole dS, in the registers of two warpgroups, through one segment of a sequence: the gradients of
the states are never written. Tiles come through the tensor memory accelerator, a chunk ahead. The products of a chunk
that do not depend on each other are in flight together, while P and the scores are decayed.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gated_recurrence.triton_decays import CHUNK
from kernels.gated_recurrence.triton_plan import FIELDS, FIRST, Plan

WIDTH = 128  # of q and k
SWIZZLED_TILE = gl.NVMMASharedLayout(128, 16, 4)
# Triton 3.7 renamed the one, 3.9 the other.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def supports(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> bool:
    """Whether this kernel can: bfloat16 on Hopper, key dimension 128, value dimension 64 or 128, a state each head."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype == torch.bfloat16
        and q.shape == k.shape
        and k.shape[3] == WIDTH
        and v.shape[3] in (64, 128)
        and all(_has_tiles(x) for x in (q, k, v, grad_out))
    )


def _has_tiles(x: Tensor) -> bool:
    """The tensor memory accelerator wants rows and their strides in units of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 and stride > 0 for stride in x.stride()[:3])


def _tiles(x: Tensor) -> TensorDescriptor:
    """Tiles [1, 1, 64, D] of x [B, T, H, D]; what lies outside reads as 0."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, CHUNK, x.shape[3]], SWIZZLED_TILE)


def backward_in_one_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    before: Tensor,
    states: Tensor,
    plan: Plan,
    start: Tensor | None,
    scale: float,
    end: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """dq, dk, dv; what the gates' gradients are made of; with `end` the gradient of the first states.

    q, k: [B, T, H, 128]. v, grad_out: [B, T, H, E]. before: the gates' sums [num_chunks, H, 64] float32. states:
    [num_chunks, H, 128, E]. start: the gradient of the state that each segment ends with, [segments, H, 128, E], or
    [N, H, 128, E] where none is cut, or None for zeros.

    For the gates, float32: of dx [B, T, H, 1], of dy within the chunk, of dy from after it; of the states
    [num_chunks, H, 1].
    """
    batch, length, heads, width_e = v.shape
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    of_tokens = torch.empty(3, batch, length, heads, 1, dtype=torch.float32, device=q.device)
    of_states = torch.empty(before.shape[0], heads, 1, dtype=torch.float32, device=q.device)
    grad_start = None
    if end:
        grad_start = torch.empty(plan.num_sequences, heads, WIDTH, width_e, dtype=torch.float32, device=q.device)
    state_tiles = TensorDescriptor(
        states, list(states.shape), list(states.stride()), [1, 1, WIDTH, width_e], SWIZZLED_TILE
    )
    _backward[(heads, plan.segments.shape[0])](
        _tiles(q),
        _tiles(k),
        _tiles(v),
        _tiles(grad_out),
        state_tiles,
        before,
        dq,
        dk,
        dv,
        *of_tokens,
        of_states,
        grad_start,
        start,
        plan.segments,
        scale,
        length,
        *((0, 0, 0, 0) if start is None else start.stride()),
        WIDTH_E=width_e,
        JOINED=plan.in_segments,
        CHUNK=CHUNK,
        FIELDS=FIELDS,
        FIRST=FIRST,
        num_warps=8,
    )
    return dq, dk, dv, (*of_tokens, of_states), grad_start


@gluon.jit
def _fetch(
    q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, stage, row, head, position
):  # fmt: skip
    """Start to load a chunk's tokens."""
    ready = full.index(stage)
    mbarrier.expect(ready, 2 * q_tiles.block_type.nbytes + 2 * v_tiles.block_type.nbytes)
    load_tile(q_tiles, [row, head, position, 0], ready, q_smem.index(stage))
    load_tile(k_tiles, [row, head, position, 0], ready, k_smem.index(stage))
    load_tile(v_tiles, [row, head, position, 0], ready, v_smem.index(stage))
    load_tile(w_tiles, [row, head, position, 0], ready, w_smem.index(stage))


@gluon.jit
def _clear(smem, held):
    """Rows of tokens that are not of this chunk: whatever lies there, not even NaN may pass."""
    LAYOUT: gl.constexpr = held.type.layout.parent
    tile = smem.load(LAYOUT)
    smem.store(gl.where(held[:, None], tile, gl.zeros_like(tile)))


@gluon.jit
def _store_rows(stage, out, first, count, stride, CHUNK: gl.constexpr, WIDTH: gl.constexpr):
    """A tile in shared memory to the rows of tokens."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [8, 1], [1, 0])
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = (token < count)[:, None] & (channel < WIDTH)[None, :]
    gl.store(out + (first + token)[:, None] * stride + channel[None, :], stage.load(LAYOUT), mask=mask)


@gluon.jit(do_not_specialize=["length", "start_n", "start_h", "start_d", "start_e"])
def _backward(
    q_tiles, k_tiles, v_tiles, w_tiles, state_tiles, before_in, dx_out, dy_out, dz_out, of_dx, of_pairs, of_dy,
    of_states, end, start, segment_table, scale, length, start_n, start_h, start_d, start_e,
    WIDTH_E: gl.constexpr, JOINED: gl.constexpr, CHUNK: gl.constexpr, FIELDS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    head, segment = gl.program_id(0), gl.program_id(1)
    heads = gl.num_programs(0)
    line = segment_table + segment * FIELDS
    sequence, row, begin = gl.load(line), gl.load(line + 1), gl.load(line + 2)
    count, first_chunk, flags = gl.load(line + 3), gl.load(line + 4), gl.load(line + 5)
    D: gl.constexpr = 128
    E: gl.constexpr = WIDTH_E
    dtype: gl.constexpr = q_tiles.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CHUNK // 2, 16])
    BY_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    BY_E: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, E // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, E, 16])
    CLEAR_D: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    CLEAR_E: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, E], SHARED)
    w_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, E], SHARED)
    state_smem = gl.allocate_shared_memory(dtype, [D, E], SHARED)
    grad_smem = gl.allocate_shared_memory(dtype, [D, E], SHARED)
    pairs_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED)
    scores_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED)
    stage_smem = gl.allocate_shared_memory(dtype, [CHUNK, D], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    state_full = gl.allocate_shared_memory(gl.int64, [1], BARRIERS)
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    mbarrier.init(state_full, count=1)
    fence_async_shared()
    thread_barrier()

    num_chunks = gl.cdiv(gl.maximum(count, 0), CHUNK)
    last = num_chunks - 1
    if num_chunks > 0:
        mbarrier.expect(state_full, state_tiles.block_type.nbytes)
        load_tile(state_tiles, [first_chunk + last, head, 0, 0], state_full, state_smem)
        _fetch(
            q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, 0, row, head,
            begin + last * CHUNK,
        )  # fmt: skip
    if num_chunks > 1:
        _fetch(
            q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, 1, row, head,
            begin + (last - 1) * CHUNK,
        )  # fmt: skip

    channel = gl.arange(0, D, gl.SliceLayout(1, STATE))
    e = gl.arange(0, E, gl.SliceLayout(0, STATE))
    state = gl.zeros([D, E], gl.float32, STATE)
    if start is not None:  # noqa: SIM102  (a constant, and a number of the device)
        if num_chunks > 0:
            plane = (segment if JOINED else sequence).to(gl.int64) * start_n + head * start_h
            state = gl.load(start + plane + channel[:, None] * start_d + e[None, :] * start_e)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, PAIRS))
    no_pairs = gl.zeros([CHUNK, CHUNK], gl.float32, PAIRS)
    nothing_d = gl.zeros([CHUNK, D], gl.float32, BY_D)
    nothing_e = gl.zeros([CHUNK, E], gl.float32, BY_E)
    # A chunk ahead, as the tiles are.
    address = before_in + ((first_chunk + last).to(gl.int64) * heads + head) * CHUNK
    exists = num_chunks > 0
    next_i = gl.load(address + i, mask=exists & (i >= 0), other=0.0)
    next_j = gl.load(address + j, mask=exists & (j >= 0), other=0.0)
    next_total = gl.load(address + CHUNK - 1, mask=exists, other=0.0)
    for step in range(num_chunks):
        number = last - step
        stage = step & 1
        held = gl.minimum(count - number * CHUNK, CHUNK)
        index = (first_chunk + number).to(gl.int64) * heads + head
        before_i, before_j, total = next_i, next_j, next_total
        if number > 0:
            address = before_in + (index - heads) * CHUNK
            next_i, next_j, next_total = gl.load(address + i), gl.load(address + j), gl.load(address + CHUNK - 1)
        q, k = q_smem.index(stage), k_smem.index(stage)
        v, w = v_smem.index(stage), w_smem.index(stage)
        grad_smem.store(state.to(dtype))
        mbarrier.wait(full.index(stage), step >> 1 & 1)
        if held < CHUNK:
            of_d = gl.arange(0, CHUNK, gl.SliceLayout(1, CLEAR_D)) < held
            of_e = gl.arange(0, CHUNK, gl.SliceLayout(1, CLEAR_E)) < held
            _clear(q, of_d)
            _clear(k, of_d)
            _clear(v, of_e)
            _clear(w, of_e)
        fence_async_shared()
        thread_barrier()
        pairs = warpgroup_mma(w, v.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        scores = warpgroup_mma(k, q.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        dz = warpgroup_mma(k, grad_smem, nothing_e, use_acc=False, is_async=True)
        dy = warpgroup_mma(v, grad_smem.permute((1, 0)), nothing_d, use_acc=False, is_async=True)
        mbarrier.wait(state_full, step & 1)
        dx = warpgroup_mma(w, state_smem.permute((1, 0)), nothing_d, use_acc=False, is_async=True)

        exp_before = gl.exp2(before_i) * scale
        exp_after = gl.exp2(total - before_i)
        exp_total = gl.exp2(total)
        decay = gl.exp2(gl.minimum(before_i[:, None] - before_j[None, :], 0.0)) * scale
        pairs = warpgroup_mma_wait(4, deps=(pairs,))
        diagonal = gl.sum(gl.where(i[:, None] == j[None, :], pairs, 0.0), 1) * scale
        pairs_smem.store(gl.where(i[:, None] > j[None, :], pairs * decay, 0.0).to(dtype))
        decay = gl.exp2(gl.minimum(before_j[None, :] - before_i[:, None], 0.0)) * scale
        scores = warpgroup_mma_wait(3, deps=(scores,))
        scores_smem.store(gl.where(i[:, None] <= j[None, :], scores * decay, 0.0).to(dtype))
        between = gl.sum(gl.sum(state * state_smem.load(STATE).to(gl.float32), 1), 0) * exp_total
        dz, dy, dx = warpgroup_mma_wait(0, deps=(dz, dy, dx))
        # grad_smem has been read: half of it is free for what the state is to gain.
        weight = gl.convert_layout(exp_before, gl.SliceLayout(1, BY_E))
        grad_smem.slice(0, CHUNK).store((w.load(BY_E).to(gl.float32) * weight[:, None]).to(dtype))
        fence_async_shared()
        thread_barrier()
        if number > 0:
            mbarrier.expect(state_full, state_tiles.block_type.nbytes)
            load_tile(state_tiles, [first_chunk + number - 1, head, 0, 0], state_full, state_smem)
        of_d = gl.convert_layout(exp_after, gl.SliceLayout(1, BY_D))
        dy = dy * of_d[:, None]
        y = k.load(BY_D).to(gl.float32)
        after = gl.sum(y * dy, 1)
        dx = dx * gl.convert_layout(exp_before, gl.SliceLayout(1, BY_D))[:, None]
        dz = dz * gl.convert_layout(exp_after, gl.SliceLayout(1, BY_E))[:, None]
        state = state * exp_total
        dz = warpgroup_mma(scores_smem, w, dz, is_async=True)
        dy = warpgroup_mma(pairs_smem.permute((1, 0)), q, dy, is_async=True)
        dx = warpgroup_mma(pairs_smem, k, dx, is_async=True)
        state = warpgroup_mma(q.permute((1, 0)), grad_smem.slice(0, CHUNK), state, is_async=True)
        dz, dy, dx, state = warpgroup_mma_wait(0, deps=(dz, dy, dx, state))

        first = row.to(gl.int64) * length + begin + number * CHUNK
        x = q.load(BY_D).to(gl.float32)
        by_x = gl.sum(x * dx, 1)
        inside = gl.sum(y * dy, 1) - after
        diagonal = gl.convert_layout(diagonal, gl.SliceLayout(1, BY_D))
        dx = dx + diagonal[:, None] * y
        dy = dy + diagonal[:, None] * x
        grad_smem.slice(CHUNK, CHUNK).store(dz.to(dtype))
        stage_smem.store(dy.to(dtype))
        thread_barrier()
        # All have read this chunk's tiles.
        if number > 1:
            _fetch(
                q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, stage, row, head,
                begin + (number - 2) * CHUNK,
            )  # fmt: skip
        _store_rows(grad_smem.slice(CHUNK, CHUNK), dz_out + head * E, first, held, heads * E, CHUNK, E)
        _store_rows(stage_smem, dy_out + head * D, first, held, heads * D, CHUNK, D)
        thread_barrier()
        stage_smem.store(dx.to(dtype))
        thread_barrier()
        _store_rows(stage_smem, dx_out + head * D, first, held, heads * D, CHUNK, D)
        token = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_D))
        position = (first + token) * heads + head
        gl.store(of_dx + position, by_x, mask=token < held)
        gl.store(of_pairs + position, inside, mask=token < held)
        gl.store(of_dy + position, after, mask=token < held)
        gl.store(of_states + index, between)
    if end is not None:  # noqa: SIM102
        if (flags & FIRST > 0) & (count >= 0):
            address = end + (sequence.to(gl.int64) * heads + head) * (D * E)
            gl.store(address + channel[:, None] * E + e[None, :], state)
