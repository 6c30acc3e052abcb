"""Backward pass with a gate per head on Hopper, in Gluon, in a single scan.

With x, y, z, w = q, k, v and the output's gradient, D_ij = exp(before_i - before_j) for j <= i, P_ij = scale w_i . z_j
D_ij, w~ = scale exp(before) (.) w, S the state at a chunk's start and dS the gradient at its end:

    dx = w~ S^T + P y                             dS_start = exp(total) dS + x^T w~
    dy = exp(after) (.) (z dS^T) + P^T x          dz = exp(after) (.) (y dS) + scale ((y x^T) (.) D^T) w

One program carries a whole dS, in the registers of two warpgroups, through one segment of a sequence: the gradients of
the states are never written to memory. The tensor memory accelerator loads tiles a chunk ahead and stores the results.
Independent products of a chunk run concurrently, while P and the scores are multiplied by their decays.
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

from kernels.gated_recurrence.hopper.per_head import (
    aligned,
    clear_rows,
    load_tile,
    state_tiles,
    store_rows,
    thread_barrier,
    tiles,
)
from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.plan import FIELDS, FIRST, Plan
from kernels.gated_recurrence.triton.scan import strides_of_state

HALVES = 2  # partial sums for the gates: adding them here would synchronize all warps


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
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, None, Tensor, Tensor], Tensor | None]:
    """Return dq, dk, dv, the partial sums for `gate_gradients`, and with `end` the gradient of the first states.

    q, k: [B, T, H, D]. v, grad_out: [B, T, H, E]. before: sums of log gates [num_chunks, H, 64] float32. states:
    [num_chunks, H, D, E]. start: gradient of the state at each segment's end, [segments, H, D, E], or [N, H, D, E] if
    no sequence is cut, or None for zeros.

    Partial sums, float32: x . dx minus y . dy within the chunk, and y . dy from after the chunk, [B, T, H, 2]; products
    of the states with their gradients [num_chunks, H, D / 16].
    """
    batch, length, heads, width_e = v.shape
    width = k.shape[3]
    warps = width // 16
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    of_tokens = torch.empty(2, batch, length, heads, HALVES, dtype=torch.float32, device=q.device)
    of_states = torch.empty(before.shape[0], heads, warps, dtype=torch.float32, device=q.device)
    grad_start = None
    if end:
        grad_start = torch.empty(plan.num_sequences, heads, width, width_e, dtype=torch.float32, device=q.device)
    _backward[(heads, plan.segments.shape[0])](
        *(tiles(aligned(x)) for x in (q, k, v, grad_out)), state_tiles(states), *(tiles(x) for x in (dq, dk, dv)),
        before, dq, dk, dv, *of_tokens, of_states, grad_start, start, plan.segments, scale, length,
        *strides_of_state(start),
        D=width, E=width_e, WARPS=warps, JOINED=plan.in_segments, CHUNK=CHUNK, FIELDS=FIELDS, FIRST=FIRST,
        num_warps=warps,
    )  # fmt: skip
    return dq, dk, dv, (of_tokens[0], None, of_tokens[1], of_states), grad_start


@gluon.jit
def _fetch(
    q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, stage, row, head, first
):  # fmt: skip
    """Start to load a chunk's tokens."""
    ready = full.index(stage)
    mbarrier.expect(ready, 2 * q_tiles.block_type.nbytes + 2 * v_tiles.block_type.nbytes)
    load_tile(q_tiles, [row, head, first, 0], ready, q_smem.index(stage))
    load_tile(k_tiles, [row, head, first, 0], ready, k_smem.index(stage))
    load_tile(v_tiles, [row, head, first, 0], ready, v_smem.index(stage))
    load_tile(w_tiles, [row, head, first, 0], ready, w_smem.index(stage))


@gluon.jit
def _by_halves(products):
    """Sum [CHUNK, D] over each half of the channels to [CHUNK, 2]: with two warpgroups, each has one half."""
    return gl.sum(products.reshape([products.type.shape[0], 2, products.type.shape[1] // 2]), 2)


@gluon.jit
def _store_halves(out, values, first_token, heads, head, held):
    LAYOUT: gl.constexpr = values.type.layout
    token = gl.arange(0, values.type.shape[0], gl.SliceLayout(1, LAYOUT))
    half = gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))
    address = out + ((first_token + token) * heads + head)[:, None] * 2 + half[None, :]
    gl.store(address, values, mask=(token < held)[:, None] & (half < 2)[None, :])


@gluon.jit(do_not_specialize=["length", "start_n", "start_h", "start_d", "start_e"])
def _backward(
    q_tiles, k_tiles, v_tiles, w_tiles, s_tiles, dx_tiles, dy_tiles, dz_tiles, before_in, dx_out, dy_out, dz_out,
    of_later, of_earlier, of_states, end, start, segment_table, scale, length, start_n, start_h, start_d, start_e,
    D: gl.constexpr, E: gl.constexpr, WARPS: gl.constexpr, JOINED: gl.constexpr, CHUNK: gl.constexpr,
    FIELDS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    head, segment = gl.program_id(0), gl.program_id(1)
    heads = gl.num_programs(0)
    line = segment_table + segment * FIELDS
    sequence, row, begin = gl.load(line), gl.load(line + 1), gl.load(line + 2)
    count, first_chunk, flags = gl.load(line + 3), gl.load(line + 4), gl.load(line + 5)
    GROUPS: gl.constexpr = WARPS // 4
    dtype: gl.constexpr = q_tiles.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, CHUNK // GROUPS, 16])
    BY_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, D // GROUPS, 16])
    BY_E: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, E // GROUPS, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, E, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, E], SHARED)
    w_smem = gl.allocate_shared_memory(dtype, [2, CHUNK, E], SHARED)
    state_smem = gl.allocate_shared_memory(dtype, [D, E], SHARED)
    # Reused for results after their content was read: dS for dz, the scaled w for dy, P and the scores for dx.
    grad_smem = gl.allocate_shared_memory(dtype, [D, E], SHARED)
    scaled_smem = gl.allocate_shared_memory(dtype, [CHUNK, D], SHARED)
    inner_smem = gl.allocate_shared_memory(dtype, [CHUNK, 2 * CHUNK], SHARED)
    pairs_smem = inner_smem.slice(0, CHUNK, dim=1)
    scores_smem = inner_smem.slice(CHUNK, CHUNK, dim=1)
    scaled_w = scaled_smem.slice(0, E, dim=1)
    dz_smem = grad_smem.slice(0, CHUNK)
    dx_smem = inner_smem.slice(0, D, dim=1)
    diagonal_smem = gl.allocate_shared_memory(gl.float32, [2 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    state_full = gl.allocate_shared_memory(gl.int64, [1], BARRIERS)
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    mbarrier.init(state_full, count=1)
    fence_async_shared()
    thread_barrier()

    num_chunks = gl.cdiv(gl.maximum(count, 0), CHUNK)
    exists = num_chunks > 0
    last = num_chunks - 1
    if exists:
        mbarrier.expect(state_full, s_tiles.block_type.nbytes)
        load_tile(s_tiles, [first_chunk + last, head, 0, 0], state_full, state_smem)
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
        if count >= 0:
            plane = (segment if JOINED else sequence).to(gl.int64) * start_n + head * start_h
            state = gl.load(start + plane + channel[:, None] * start_d + e[None, :] * start_e)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, PAIRS))
    no_pairs = gl.zeros([CHUNK, CHUNK], gl.float32, PAIRS)
    nothing_d = gl.zeros([CHUNK, D], gl.float32, BY_D)
    nothing_e = gl.zeros([CHUNK, E], gl.float32, BY_E)
    # Loaded a chunk ahead, like the tiles.
    address = before_in + ((first_chunk + last).to(gl.int64) * heads + head) * CHUNK
    next_i = gl.load(address + i, mask=exists & (i >= 0), other=0.0)
    next_j = gl.load(address + j, mask=exists & (j >= 0), other=0.0)
    next_total = gl.load(address + CHUNK - 1, mask=exists, other=0.0)
    for step in range(num_chunks):
        number = last - step
        stage = step & 1
        first = begin + number * CHUNK
        held = gl.minimum(count - number * CHUNK, CHUNK)
        index = (first_chunk + number).to(gl.int64) * heads + head
        before_i, before_j, total = next_i, next_j, next_total
        if number > 0:
            address = before_in + (index - heads) * CHUNK
            next_i, next_j, next_total = gl.load(address + i), gl.load(address + j), gl.load(address + CHUNK - 1)
        q, k = q_smem.index(stage), k_smem.index(stage)
        v, w = v_smem.index(stage), w_smem.index(stage)
        exp_before = gl.exp2(before_i) * scale
        exp_after = gl.exp2(total - before_i)
        exp_total = gl.exp2(total)
        tma.store_wait(0)
        thread_barrier()
        grad_smem.store(state.to(dtype))
        mbarrier.wait(full.index(stage), step >> 1 & 1)
        if held < CHUNK:
            clear_rows(q, held, CHUNK, D, WARPS)
            clear_rows(k, held, CHUNK, D, WARPS)
            clear_rows(v, held, CHUNK, E, WARPS)
            clear_rows(w, held, CHUNK, E, WARPS)
        fence_async_shared()
        thread_barrier()
        pairs = warpgroup_mma(w, v.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        scores = warpgroup_mma(k, q.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        dz = warpgroup_mma(k, grad_smem, nothing_e, use_acc=False, is_async=True)
        dy = warpgroup_mma(v, grad_smem.permute((1, 0)), nothing_d, use_acc=False, is_async=True)
        weight = gl.convert_layout(exp_before, gl.SliceLayout(1, BY_E))
        scaled_w.store((w.load(BY_E).to(gl.float32) * weight[:, None]).to(dtype))
        decay = gl.exp2(gl.minimum(before_i[:, None] - before_j[None, :], 0.0)) * scale
        pairs = warpgroup_mma_wait(3, deps=(pairs,))
        diagonal = _by_halves(gl.where(i[:, None] == j[None, :], pairs, 0.0))
        diagonal_smem.store(diagonal.permute((1, 0)).reshape([2 * CHUNK]))
        pairs_smem.store(gl.where(i[:, None] > j[None, :], pairs * decay, 0.0).to(dtype))
        decay = gl.exp2(gl.minimum(before_j[None, :] - before_i[:, None], 0.0)) * scale
        scores = warpgroup_mma_wait(2, deps=(scores,))
        scores_smem.store(gl.where(i[:, None] <= j[None, :], scores * decay, 0.0).to(dtype))
        fence_async_shared()
        dz, dy = warpgroup_mma_wait(0, deps=(dz, dy))
        thread_barrier()
        dz = dz * gl.convert_layout(exp_after, gl.SliceLayout(1, BY_E))[:, None]
        dz = warpgroup_mma(scores_smem, w, dz, is_async=True)
        dy = dy * gl.convert_layout(exp_after, gl.SliceLayout(1, BY_D))[:, None]
        after = _by_halves(k.load(BY_D).to(gl.float32) * dy)
        dy = warpgroup_mma(pairs_smem.permute((1, 0)), q, dy, is_async=True)
        mbarrier.wait(state_full, step & 1)
        dx = warpgroup_mma(scaled_w, state_smem.permute((1, 0)), nothing_d, use_acc=False, is_async=True)
        dx = warpgroup_mma(pairs_smem, k, dx, is_async=True)
        state = state * exp_total
        between = gl.sum(state * state_smem.load(STATE).to(gl.float32), 1)
        state = warpgroup_mma(q.permute((1, 0)), scaled_w, state, is_async=True)
        between = gl.sum(between.reshape([WARPS, D // WARPS]), 1)
        dz, dy, dx, state = warpgroup_mma_wait(0, deps=(dz, dy, dx, state))
        dz_smem.store(dz.to(dtype))
        x, y = q.load(BY_D).to(gl.float32), k.load(BY_D).to(gl.float32)
        later = _by_halves(x * dx - y * dy) + after
        rows: gl.constexpr = gl.SliceLayout(1, BY_D)
        diagonal = (diagonal_smem.slice(0, CHUNK).load(rows) + diagonal_smem.slice(CHUNK, CHUNK).load(rows)) * scale
        dx = dx + diagonal[:, None] * y
        dy = dy + diagonal[:, None] * x
        thread_barrier()
        # All warps have read this chunk's tiles.
        if number > 0:
            mbarrier.expect(state_full, s_tiles.block_type.nbytes)
            load_tile(s_tiles, [first_chunk + number - 1, head, 0, 0], state_full, state_smem)
        if number > 1:
            _fetch(
                q_tiles, k_tiles, v_tiles, w_tiles, q_smem, k_smem, v_smem, w_smem, full, stage, row, head,
                begin + (number - 2) * CHUNK,
            )  # fmt: skip
        scaled_smem.store(dy.to(dtype))
        dx_smem.store(dx.to(dtype))
        fence_async_shared()
        thread_barrier()
        store_rows(dz_smem, dz_tiles, dz_out, row, head, heads, length, first, held, CHUNK, E, WARPS)
        store_rows(scaled_smem, dy_tiles, dy_out, row, head, heads, length, first, held, CHUNK, D, WARPS)
        store_rows(dx_smem, dx_tiles, dx_out, row, head, heads, length, first, held, CHUNK, D, WARPS)
        first_token = row.to(gl.int64) * length + first
        _store_halves(of_later, later, first_token, heads, head, held)
        _store_halves(of_earlier, after, first_token, heads, head, held)
        gl.store(of_states + index * WARPS + gl.arange(0, WARPS, between.type.layout), between)
    tma.store_wait(0)
    if end is not None:  # noqa: SIM102
        if (flags & FIRST > 0) & (count >= 0):
            address = end + (sequence.to(gl.int64) * heads + head) * (D * E)
            gl.store(address + channel[:, None] * E + e[None, :], state)
