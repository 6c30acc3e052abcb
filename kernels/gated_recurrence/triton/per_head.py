"""The recurrence with a gate per head: the scans read q, k and v without decay.

A gate per head scales rows, before or after a product, so no decayed tensor is stored. With before_i the sum of a
chunk's log gates up to token i, after_i the sum after i, S the state at its start, dS the state's gradient at its end,
and dout the output's gradient,

    out_i = scale exp(before_i) q_i S + scale sum_{j <= i} (q_i . k_j) exp(before_i - before_j) v_j
    dv_j = exp(after_j) k_j dS + scale sum_{i >= j} (q_i . k_j) exp(before_i - before_j) dout_i

(triton/scan_per_head.py); the other gradients follow from the states (triton/gradients_per_head.py). If sequences are
cut into segments, `_segment_sums` computes each segment's contribution to the state, and triton/scan.py joins them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.hopper.per_head import supports
from kernels.gated_recurrence.triton.decays import CHUNK, in_log2, sums_until
from kernels.gated_recurrence.triton.gradients_strong import tokens_of
from kernels.gated_recurrence.triton.plan import FIELDS, FIRST, LAST, LEAST_SEGMENT, Plan
from kernels.gated_recurrence.triton.scan import join, strides_of_state
from kernels.gated_recurrence.triton.scan_per_head import scan_backward_per_head, scan_forward_per_head
from kernels.gated_recurrence.triton.scores import padded, precision, shared_memory, stored_dtype, strides_in_units
from kernels.rounding import cdiv, next_power_of_2


def segment_per_head(k: Tensor, v: Tensor) -> int:
    """Return the tokens per segment so that all programs of a scan run at once. k: [B, T, H, Dk]. v: [B, T, H, Dv]."""
    batch, length, heads, width = k.shape
    processors = 132  # of an H200, if there is no GPU to query
    if k.is_cuda:
        processors = torch.cuda.get_device_properties(k.device).multi_processor_count
    slices = 1 if supports(k, k, v) else cdiv(v.shape[3], 64)
    programs = batch * heads * slices
    segments = max(processors * (2 if width <= 64 else 1) // max(programs, 1), 1)
    whole = cdiv(length, CHUNK) * CHUNK
    return min(max(cdiv(length, segments * CHUNK) * CHUNK, LEAST_SEGMENT), whole)


def sum_gates(log_decay: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """Return before_i of every chunk, [num_chunks, heads, 64], in log2; float64 unless bfloat16 hides the rounding.

    log_decay: [B, T, heads] float32. dtype: of q.
    """
    in_bfloat16 = stored_dtype(dtype) == torch.bfloat16
    heads = log_decay.shape[2]
    before = torch.empty(
        plan.chunks.shape[0],
        heads,
        CHUNK,
        dtype=torch.float32 if in_bfloat16 else torch.float64,
        device=log_decay.device,
    )
    block = 8
    _sum_gates[(plan.chunks.shape[0], cdiv(heads, block))](
        log_decay,
        before,
        plan.chunks,
        heads,
        *log_decay.stride(),
        IN_HALVES=in_bfloat16,
        CHUNK=CHUNK,
        FIELDS=FIELDS,
        BLOCK=block,
        num_warps=4,
    )
    return before


def forward_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    plan: Plan,
    start: Tensor | None,
    scale: float,
    *,
    out: bool = True,
    states: bool = True,
    end: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return out [B, T, Hq, Dv], the states at the chunks' starts [num_chunks, Hk, Dk stored, Dv], and the last states.

    q: [B, T, Hq, Dk]. k: [B, T, Hk, Dk]. v: [B, T, Hk, Dv]. before: from `sum_gates`. start: [N, Hk, Dk stored, Dv]
    float32 or None. out, states, end: which results to compute; the others are None.
    """
    _, length, heads, width = k.shape
    width_e = v.shape[3]
    sizes = _sizes(k, v, q.shape[2] // heads, q)
    out = _in_slices((*q.shape[:3], width_e), q, sizes) if out else None
    results = (
        out,
        q.new_empty(before.shape[0], heads, padded(width), width_e, dtype=stored_dtype(q.dtype)) if states else None,
        q.new_empty(plan.num_sequences, heads, padded(width), width_e, dtype=torch.float32) if end else None,
    )
    start = joined_states(k, v, before, plan, start, 1.0, backward=False)
    x_strides, y_strides, z_strides = (strides_in_units(t) for t in (q, k, v))
    scan_forward_per_head[_programs(width_e, sizes), heads, plan.segments.shape[0]](
        q, k, v, before, *results, start, plan.segments, scale, *x_strides[:3], *y_strides[:3], *z_strides[:3],
        *strides_of_state(start), length, 0 if out is None else out.stride(0),
        X_UNIT=x_strides[3], Y_UNIT=y_strides[3], Z_UNIT=z_strides[3], JOINED=plan.in_segments, LAST=LAST, **sizes,
    )  # fmt: skip
    return None if out is None else _whole(out, q.dtype), *results[1:]


def backward_scan(
    q: Tensor,
    k: Tensor,
    grad_out: Tensor,
    before: Tensor,
    plan: Plan,
    start: Tensor | None,
    scale: float,
    *,
    end: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dv [B, T, Hk, Dv], the states' gradients at the chunks' ends, and with `end` the first states', float32.

    grad_out: [B, T, Hq, Dv]. start: the gradient of the last states, or None. Other arguments as in `forward_scan`.
    """
    batch, length, heads, width = k.shape
    width_e = grad_out.shape[3]
    sizes = _sizes(k, grad_out, q.shape[2] // heads, q)
    dv = _in_slices((batch, length, heads, width_e), q, sizes)
    results = (
        dv,
        q.new_empty(before.shape[0], heads, padded(width), width_e, dtype=stored_dtype(q.dtype)),
        q.new_empty(plan.num_sequences, heads, padded(width), width_e, dtype=torch.float32) if end else None,
    )
    start = joined_states(q, grad_out, before, plan, start, scale, backward=True)
    x_strides, y_strides, w_strides = (strides_in_units(t) for t in (q, k, grad_out))
    scan_backward_per_head[_programs(width_e, sizes), heads, plan.segments.shape[0]](
        q, k, grad_out, before, *results, start, plan.segments, scale, *x_strides[:3], *y_strides[:3], *w_strides[:3],
        *strides_of_state(start), length, dv.stride(0),
        X_UNIT=x_strides[3], Y_UNIT=y_strides[3], W_UNIT=w_strides[3], JOINED=plan.in_segments, FIRST=FIRST, **sizes,
    )  # fmt: skip
    return _whole(dv, q.dtype), *results[1:]


def _programs(width_e: int, sizes: dict) -> int:
    return sizes["SLICES"] * cdiv(width_e, sizes["BLOCK_E"])


def _in_slices(shape: tuple[int, ...], q: Tensor, sizes: dict) -> Tensor:
    """Allocate [SLICES, *shape], one part per slice of the key channels; float32 if parts have to be summed."""
    return q.new_empty(sizes["SLICES"], *shape, dtype=q.dtype if sizes["SLICES"] == 1 else torch.float32)


def _whole(slices: Tensor, dtype: torch.dtype) -> Tensor:
    return slices[0] if slices.shape[0] == 1 else slices.sum(0).to(dtype)


def _sizes(k: Tensor, z: Tensor, group: int, *others: Tensor) -> dict:
    """Return the constants of the scans; others: inputs besides k and z. float32 serves tests only."""
    in_bfloat16 = stored_dtype(k.dtype) == torch.bfloat16
    width, width_e = k.shape[3], z.shape[3]
    # Matrix instructions have 64 rows; with fewer, Triton 3.6 generates kernels that read out of bounds.
    block_d = min(max(64, next_power_of_2(width)), 128) if in_bfloat16 else min(max(16, next_power_of_2(width)), 64)
    block_e = min(64 if in_bfloat16 else 32, max(16, next_power_of_2(width_e)))
    # Rows not aligned to 16 bytes cannot be prefetched: all tiles then have fixed addresses. Narrow tiles have too many
    # for the uniform registers, and ptxas computes some from an uninitialized register.
    if in_bfloat16 and any(strides_in_units(x)[3] == 1 for x in (k, z, *others)):
        block_e = 64
    # As many stages, up to 3, as fit into shared memory with the state and the outputs.
    stage = 2 * CHUNK * ((1 + group) * block_d + group * block_e)
    own = 4 * (block_d + CHUNK) * block_e + 2 * CHUNK * CHUNK
    stages = min(max((shared_memory(k.device) - own) // stage, 1), 3)
    return {
        "GROUP": group,
        "WIDTH": width,
        "STORED": padded(width),
        "WIDTH_E": width_e,
        "BLOCK_D": block_d,
        "SLICES": cdiv(width, block_d),
        "BLOCK_E": block_e,
        "PRECISION": precision(k.dtype),
        "CHUNK": CHUNK,
        "FIELDS": FIELDS,
        "NUM_STAGES": stages if in_bfloat16 else 1,
        "num_warps": 4,
    }


def joined_states(
    a: Tensor,
    b: Tensor,
    before: Tensor,
    plan: Plan,
    start: Tensor | None,
    scale: float,
    *,
    backward: bool,
) -> Tensor | None:
    """Return the state at each segment's start [segments, heads, D stored, E]; `start` if no sequence is cut.

    a, b: k and v; backward, q and the output's gradient.
    """
    if not plan.in_segments:
        return start
    segments, heads = plan.segments.shape[0], before.shape[1]
    sizes = _sizes(a, b, a.shape[2] // heads)
    joined = a.new_empty(segments, heads, sizes["STORED"], sizes["WIDTH_E"], dtype=torch.float32)
    totals = torch.empty(segments, heads, 1, dtype=torch.float32, device=a.device)
    a_strides, b_strides = strides_in_units(a), strides_in_units(b)
    _segment_sums[_programs(sizes["WIDTH_E"], sizes), heads, segments](
        a, b, before, joined, totals, plan.segments, scale, *a_strides[:3], *b_strides[:3],
        A_UNIT=a_strides[3], B_UNIT=b_strides[3], BACKWARD=backward, FIRST=FIRST, LAST=LAST, **sizes,
    )  # fmt: skip
    join(joined, totals, start, plan, backward=backward)
    return joined


@triton.jit(do_not_specialize=["heads", "stride_b", "stride_t", "stride_h"])
def _sum_gates(
    gates, before, chunks, heads, stride_b, stride_t, stride_h,
    IN_HALVES: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    line = chunks + chunk * FIELDS
    row, begin, count = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = tl.arange(0, CHUNK)[:, None]
    address = gates + row * stride_b + (begin + token) * stride_t + head * stride_h
    g = in_log2(tl.load(address, mask=(token < count) & (head < heads), other=0.0))
    address = before + (chunk * heads + head) * CHUNK + token
    tl.store(address, sums_until(g, IN_HALVES), mask=head < heads)


@triton.jit(do_not_specialize=["a_b", "a_t", "a_h", "b_b", "b_t", "b_h"])
def _segment_sums(
    a_in, b_in, before_in, joined, totals_out, segment_table, scale, a_b, a_t, a_h, b_b, b_t, b_h,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, BACKWARD: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    NUM_STAGES: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_D: tl.constexpr, SLICES: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute a segment's part of the state: from k and v, decayed by after; backward, q and grad_out, by before."""
    part, head, segment = tl.program_id(0) // SLICES, tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    line = segment_table + segment * FIELDS
    row, begin = tl.load(line + 1).to(tl.int64), tl.load(line + 2).to(tl.int64)
    count, first_chunk, flags = tl.load(line + 3), tl.load(line + 4).to(tl.int64), tl.load(line + 5)
    if (count < 0) | ((flags & (FIRST if BACKWARD else LAST)) > 0):
        return
    dtype = tl.float32 if a_in.dtype.element_ty == tl.float16 else a_in.dtype.element_ty
    token = tl.arange(0, CHUNK)
    channel = tl.program_id(0) % SLICES * BLOCK_D + tl.arange(0, BLOCK_D)
    e = part * BLOCK_E + tl.arange(0, BLOCK_E)
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    sums = tl.zeros((1,), tl.float32)
    num_chunks = tl.cdiv(count, CHUNK)
    for step in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        number = num_chunks - 1 - step if BACKWARD else step
        held = number * CHUNK + token < count
        address = before_in + ((first_chunk + number) * heads + head) * CHUNK
        before = tl.load(address + token)
        total = tl.load(address + CHUNK - 1 + tl.zeros((1,), tl.int32))
        weight = tl.exp2((before if BACKWARD else total - before).to(tl.float32)) * scale
        state = state * tl.exp2(total.to(tl.float32))[:, None]
        sums += total.to(tl.float32)
        first = begin + number * CHUNK
        for member in tl.static_range(GROUP):
            own = head * GROUP + member
            a_base = a_in + (row * a_b + first * a_t + own * a_h) * A_UNIT
            b_base = b_in + (row * b_b + first * b_t + own * b_h) * B_UNIT
            a = tokens_of(a_base, a_t * A_UNIT, token, held, channel, WIDTH).to(dtype)
            b = tokens_of(b_base, b_t * B_UNIT, token, held, e, WIDTH_E)
            b = (b * weight[:, None]).to(dtype)
            state = tl.dot(tl.trans(a), b, state, input_precision=PRECISION)
    address = joined + (segment.to(tl.int64) * heads + head) * (STORED * WIDTH_E)
    address = address + channel[:, None] * WIDTH_E + e[None, :]
    tl.store(address, state, mask=(channel < STORED)[:, None] & (e < WIDTH_E)[None, :])
    if tl.program_id(0) == 0:
        tl.store(totals_out + segment * heads + head + tl.zeros((1,), tl.int32), sums)
