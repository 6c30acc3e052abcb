"""Forward pass with a gate per head on Hopper, in Gluon: triton/per_head.py has the mathematics.

One program carries a whole state, in the registers of two warpgroups, through one segment of a sequence. The tensor
memory accelerator loads tiles ahead and stores the results; the state is stored from the tile used in the product.
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
    store_tile,
    thread_barrier,
    tiles,
)
from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.plan import FIELDS, LAST, Plan
from kernels.gated_recurrence.triton.scan import strides_of_state


def forward_in_one_scan(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, plan: Plan, start: Tensor | None, scale: float, *, states: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run `forward_scan` of triton/per_head.py for `supports` inputs; start: per segment if sequences are cut."""
    batch, length, heads, width_e = v.shape
    width = k.shape[3]
    warps = width // 16
    out = q.new_empty(batch, length, heads, width_e)
    kept = q.new_empty(before.shape[0], heads, width, width_e) if states else None
    end = torch.empty(plan.num_sequences, heads, width, width_e, dtype=torch.float32, device=q.device)
    _forward[(heads, plan.segments.shape[0])](
        *(tiles(aligned(x)) for x in (q, k, v)), tiles(out), None if kept is None else state_tiles(kept), before, out,
        end, start, plan.segments, scale, length, *strides_of_state(start),
        D=width, E=width_e, WARPS=warps, JOINED=plan.in_segments, CHUNK=CHUNK, FIELDS=FIELDS, LAST=LAST,
        num_warps=warps,
    )  # fmt: skip
    return out, kept, end


@gluon.jit
def _fetch(q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, full, stage, row, head, first):
    """Start to load a chunk's tokens."""
    ready = full.index(stage)
    mbarrier.expect(ready, 2 * q_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
    load_tile(q_tiles, [row, head, first, 0], ready, q_smem.index(stage))
    load_tile(k_tiles, [row, head, first, 0], ready, k_smem.index(stage))
    load_tile(v_tiles, [row, head, first, 0], ready, v_smem.index(stage))


@gluon.jit(do_not_specialize=["length", "start_n", "start_h", "start_d", "start_e"])
def _forward(
    q_tiles, k_tiles, v_tiles, out_tiles, s_tiles, before_in, out, end, start, segment_table, scale, length,
    start_n, start_h, start_d, start_e,
    D: gl.constexpr, E: gl.constexpr, WARPS: gl.constexpr, JOINED: gl.constexpr, CHUNK: gl.constexpr,
    FIELDS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    head, segment = gl.program_id(0), gl.program_id(1)
    heads = gl.num_programs(0)
    line = segment_table + segment * FIELDS
    sequence, row, begin = gl.load(line), gl.load(line + 1), gl.load(line + 2)
    count, first_chunk, flags = gl.load(line + 3), gl.load(line + 4), gl.load(line + 5)
    GROUPS: gl.constexpr = WARPS // 4
    STAGES: gl.constexpr = 3
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, CHUNK // GROUPS, 16])
    BY_E: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, E // GROUPS, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, E, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, E], SHARED)
    state_smem = gl.allocate_shared_memory(dtype, [D, E], SHARED)
    scores_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED)
    scaled_smem = gl.allocate_shared_memory(dtype, [CHUNK, E], SHARED)  # scaled v, then the output
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    thread_barrier()

    num_chunks = gl.cdiv(gl.maximum(count, 0), CHUNK)
    exists = num_chunks > 0
    for ahead in gl.static_range(STAGES):
        if ahead < num_chunks:
            _fetch(
                q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, full, ahead, row, head, begin + ahead * CHUNK
            )  # fmt: skip
    channel = gl.arange(0, D, gl.SliceLayout(1, STATE))
    e = gl.arange(0, E, gl.SliceLayout(0, STATE))
    state = gl.zeros([D, E], gl.float32, STATE)
    if start is not None:  # noqa: SIM102  (a constant, and a number of the device)
        if count >= 0:
            plane = (segment if JOINED else sequence).to(gl.int64) * start_n + head * start_h
            state = gl.load(start + plane + channel[:, None] * start_d + e[None, :] * start_e)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, SCORES))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, SCORES)
    nothing_e = gl.zeros([CHUNK, E], gl.float32, BY_E)
    # Loaded a chunk ahead, like the tiles.
    address = before_in + (first_chunk.to(gl.int64) * heads + head) * CHUNK
    next_i = gl.load(address + i, mask=exists & (i >= 0), other=0.0)
    next_j = gl.load(address + j, mask=exists & (j >= 0), other=0.0)
    next_total = gl.load(address + CHUNK - 1, mask=exists, other=0.0)
    for number in range(num_chunks):
        buffer = number % STAGES
        first = begin + number * CHUNK
        held = gl.minimum(count - number * CHUNK, CHUNK)
        before_i, before_j, total = next_i, next_j, next_total
        if number < num_chunks - 1:
            address = before_in + ((first_chunk + number + 1).to(gl.int64) * heads + head) * CHUNK
            next_i, next_j, next_total = gl.load(address + i), gl.load(address + j), gl.load(address + CHUNK - 1)
        q, k, v = q_smem.index(buffer), k_smem.index(buffer), v_smem.index(buffer)
        tma.store_wait(0)
        thread_barrier()
        state_smem.store(state.to(dtype))
        mbarrier.wait(full.index(buffer), number // STAGES & 1)
        if held < CHUNK:
            clear_rows(q, held, CHUNK, D, WARPS)
            clear_rows(k, held, CHUNK, D, WARPS)
            clear_rows(v, held, CHUNK, E, WARPS)
        fence_async_shared()
        thread_barrier()
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        result = warpgroup_mma(q, state_smem, nothing_e, use_acc=False, is_async=True)
        if s_tiles is not None:
            store_tile(s_tiles, [first_chunk + number, head, 0, 0], state_smem)
        after = gl.convert_layout(gl.exp2(total - before_i), gl.SliceLayout(1, BY_E))
        scaled_smem.store((v.load(BY_E).to(gl.float32) * after[:, None]).to(dtype))
        decay = gl.exp2(gl.minimum(before_i[:, None] - before_j[None, :], 0.0)) * scale
        scores = warpgroup_mma_wait(1, deps=(scores,))
        scores_smem.store(gl.where(i[:, None] >= j[None, :], scores * decay, 0.0).to(dtype))
        fence_async_shared()
        thread_barrier()
        state = state * gl.exp2(total)
        state = warpgroup_mma(k.permute((1, 0)), scaled_smem, state, is_async=True)
        result = warpgroup_mma_wait(1, deps=(result,))
        weight = gl.convert_layout(gl.exp2(before_i) * scale, gl.SliceLayout(1, BY_E))
        result = warpgroup_mma(scores_smem, v, result * weight[:, None], is_async=True)
        state, result = warpgroup_mma_wait(0, deps=(state, result))
        thread_barrier()
        # All warps have read this chunk's tiles.
        if number < num_chunks - STAGES:
            _fetch(
                q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, full, buffer, row, head, first + STAGES * CHUNK
            )  # fmt: skip
        scaled_smem.store(result.to(dtype))
        fence_async_shared()
        thread_barrier()
        store_rows(scaled_smem, out_tiles, out, row, head, heads, length, first, held, CHUNK, E, WARPS)
    tma.store_wait(0)
    if (flags & LAST > 0) & (count >= 0):
        address = end + (sequence.to(gl.int64) * heads + head) * (D * E)
        gl.store(address + channel[:, None] * E + e[None, :], state)
