"""Decoding step of a recurrence with a sliding window, in Triton: everything between a layer's projections.

    S_t = G_t (.) S_{t-1} + k_t^T v_t        out_t = a q_t S_t + b softmax(scale q'_t K'^T) V

`launch` takes q, k, G, q' and k' as arguments, or computes them from a Liger layer's projections.

Time goes into reading and writing the states and reading the ring, once each. A program owns some value columns of one
key head in one row of the batch: that tile [Dk, columns] of the state, which it updates and reads with all query heads
of the group, and the same columns of the ring's values. The scores are the same for all columns: each program
recomputes them, from keys that the first program has brought into the cache.

The new token's key and value come from the arguments, never from the ring, and the softmax starts with them. Hence no
program uses the old content of the written slot, and programs may run in any order: the program of the first columns
writes the key, and each program its own columns of the value. A sink's slot is written while its token is in the
window, and read only after the token has left it.

With late keys the state receives the token that leaves the window. Its value is still in the slot of the new token:
each program reads its own columns there before it writes them. Its key is read by all programs, from a ring with one
slot more than the window, so that the slot that the first program writes is never read by another.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_recurrence.decode.triton_liger_inputs import load_pairs, once, rotated, state_inputs
from kernels.operation import register_operation
from kernels.rounding import cdiv, next_power_of_2

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))

# The smallest matrix product that tensor cores take.
SMALLEST_PRODUCT = 16
VALUE_COLUMNS = 32
RING_BYTES = 16 * 1024  # of one tile of keys
NUM_WARPS = 4


def _windowed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    q_window: Tensor,
    k_window: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    tokens: Tensor,
    kv_start: Tensor | None,
    state_weight: Tensor,
    window_weight: Tensor,
    sinks: int,
    state_scale: float,
    window_scale: float,
) -> Tensor:
    """Run `kernels.gated_recurrence.windowed_step`; same arguments and result."""
    return launch(
        q, k, v, state, ring_keys, ring_values, tokens, kv_start, state_weight, window_weight, sinks, window_scale,
        log_decay=log_decay, q_window=q_window, k_window=k_window, state_scale=state_scale,
        per_head=log_decay.ndim == 3,
    )  # fmt: skip


def _fake(q, k, v, *_):
    return empty_out(q, v)


triton_windowed_step = register_operation(
    "triton_windowed_step", _windowed_step, _fake, mutates=("state", "ring_keys", "ring_values")
)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Allocate the output of a step."""
    return q.new_empty(*q.shape[:3], v.shape[3])


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    tokens: Tensor,
    kv_start: Tensor | None,
    state_weight: Tensor,
    window_weight: Tensor,
    sinks: int,
    window_scale: float,
    *,
    log_decay: Tensor | None = None,
    q_window: Tensor | None = None,
    k_window: Tensor | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    gate_shift: Tensor | None = None,
    late_keys: Tensor | None = None,
    state_scale: float = 1.0,
    per_head: bool,
    gate: str | None = None,
    temperature: float = 1.0,
    feature_map: str = "none",
) -> Tensor:
    """Launch one step, with the arguments of `windowed_step`, or with a gate those of `liger_step`.

    per_head: whether there is one gate per head instead of one per channel.
    """
    out = empty_out(q, v)
    batch, heads, key_dim, value_dim = state.shape
    if out.numel() == 0:
        return out
    q, k, v, q_window, k_window = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, q_window, k_window)
    )
    if log_decay is not None and log_decay.ndim == 4 and log_decay.stride(-1) != 1:
        log_decay = log_decay.contiguous()
    slots, groups = ring_keys.shape[1], q.shape[2] // heads
    block_values = min(VALUE_COLUMNS, _block(value_dim))
    ring_tile = max(SMALLEST_PRODUCT, RING_BYTES // (_block(value_dim) * k.element_size()))
    strides = [_strides(x) for x in (q, k, v, log_decay, q_window, k_window)]
    with torch.cuda.device_of(q):
        _take_step[(cdiv(value_dim, block_values), heads, batch)](
            q,
            k,
            v,
            log_decay,
            state,
            q_window,
            k_window,
            ring_keys,
            ring_values,
            late_keys,
            tokens,
            kv_start,
            state_weight.contiguous(),
            window_weight.contiguous(),
            None if cosine is None else cosine.contiguous(),
            None if sine is None else sine.contiguous(),
            None if gate_shift is None else gate_shift.contiguous(),
            out,
            *(stride for pair in strides for stride in pair),
            0 if cosine is None or len(cosine) == 1 else cosine.shape[2],
            state_scale,
            window_scale,
            temperature,
            HEADS=heads,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            ROTATED=0 if cosine is None else cosine.shape[2],
            WINDOW=slots - sinks,
            SINKS=sinks,
            BLOCK_QUERIES=_block(groups),
            BLOCK_KEYS=_block(key_dim),
            BLOCK_DIM=_block(value_dim),
            BLOCK_VALUES=block_values,
            BLOCK_RING=min(ring_tile, _block(slots)),
            # Three tf32 products per float32 product: tf32 alone has a mantissa of 10 bits.
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            PER_HEAD=per_head,
            GATE=gate,
            MAP=feature_map,
            num_warps=NUM_WARPS,
        )
    for x in (state, ring_keys, ring_values, late_keys):
        if x is not None and not x.is_inference():
            # Torch cannot see the kernel's write; a graph that saved x must refuse to use it.
            torch.autograd.graph.increment_version(x)
    return out


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of rows and of heads."""
    return (0, 0) if x is None else (x.stride(0), x.stride(2))


def _block(size: int) -> int:
    return max(SMALLEST_PRODUCT, next_power_of_2(size))


_STRIDES = [f"{x}_stride_{axis}" for x in ("q", "k", "v", "decay", "q_window", "k_window") for axis in "bh"]
_STRIDES.append("table_stride")


@triton.jit(do_not_specialize=_STRIDES)
def _take_step(
    q, k, v, log_decay, state, q_window, k_window, ring_keys, ring_values, late_keys, tokens, kv_start,
    state_weight, window_weight, cosine, sine, gate_shift, out,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, decay_stride_b, decay_stride_h,
    q_window_stride_b, q_window_stride_h, k_window_stride_b, k_window_stride_h, table_stride,
    state_scale, window_scale, temperature,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROTATED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUES: tl.constexpr, BLOCK_RING: tl.constexpr, PRECISION: tl.constexpr,
    PER_HEAD: tl.constexpr, GATE: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Compute some value columns of one key head in one row of the batch; kv_start may be None.

    With a GATE, q and k are projections, and log_decay, q_window and k_window are None; without it, late_keys is None.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = row.to(tl.int64)
    group, key, dim = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    value = block * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    group_used, key_used, dim_used, value_used = group < GROUPS, key < KEY_DIM, dim < VALUE_DIM, value < VALUE_DIM

    # All programs run at once, in the same phase: read, compute, write. Hence large tiles are loaded first, also the
    # ring, whose invisible slots are masked later; and the state is written before attention over the ring.
    # Small vectors change their layout after the load, and the program waits for that.
    if late_keys is not None:
        token, start = _place_in_row(tokens, kv_start, row)  # which locate the late token
    state += (batch * HEADS + head) * (KEY_DIM * VALUE_DIM)
    tile_offset, tile_used = key[:, None] * VALUE_DIM + value, key_used[:, None] & value_used
    tile = tl.load(state + tile_offset, mask=tile_used, other=0.0)
    ring_keys += batch * ((SINKS + WINDOW) * HEADS * VALUE_DIM) + head * VALUE_DIM
    ring_values += batch * ((SINKS + WINDOW) * HEADS * VALUE_DIM) + head * VALUE_DIM
    slot = tl.arange(0, BLOCK_RING)
    place, held = slot * (HEADS * VALUE_DIM), slot < SINKS + WINDOW
    values = tl.load(ring_values + place[:, None] + value, mask=held[:, None] & value_used, other=0.0)
    tl.debug_barrier()  # keeps the assembler from moving loads down to their first use
    keys = tl.load(ring_keys + place[None, :] + dim[:, None], mask=held[None, :] & dim_used[:, None], other=0.0)
    if late_keys is None:
        token, start = _place_in_row(tokens, kv_start, row)
    k += batch * k_stride_b + head * k_stride_h
    if late_keys is None:
        k_t = tl.load(k + key, mask=key_used, other=0.0)
    else:
        # Padding, sinks (which are never lost) and unwritten slots of the ring do not enter the state.
        enters = token - WINDOW >= start + SINKS
        late_keys += batch * ((WINDOW + 1) * HEADS * KEY_DIM) + head * KEY_DIM
        oldest = (token + 1) % (WINDOW + 1) * (HEADS * KEY_DIM)
        k_t = tl.load(late_keys + oldest + key, mask=key_used & enters, other=0.0)
        lost = (SINKS + token % WINDOW) * (HEADS * VALUE_DIM)  # the new token's slot
        late_v = tl.load(ring_values + lost + value, mask=value_used & enters, other=0.0)
    v_t = tl.load(v + batch * v_stride_b + head * v_stride_h + value, mask=value_used, other=0.0)
    first = head * GROUPS
    q += batch * q_stride_b + first * q_stride_h
    if GATE is None:
        queries = ()
        for query in tl.static_range(GROUPS):
            queries += (tl.load(q + query * q_stride_h + key, mask=key_used, other=0.0),)
        log_decay += batch * decay_stride_b + head * decay_stride_h
        if PER_HEAD:
            log_decay = tl.load(log_decay).to(tl.float32)
        else:
            log_decay = tl.load(log_decay + key, mask=key_used, other=0.0).to(tl.float32)
        q_window += batch * q_window_stride_b + (first + group[:, None]) * q_window_stride_h + dim
        q_here = tl.load(q_window, mask=group_used[:, None] & dim_used, other=0.0)
        k_window += batch * k_window_stride_b + head * k_window_stride_h
        k_here = tl.load(k_window + dim, mask=dim_used, other=0.0)
    else:
        VECTORS: tl.constexpr = triton.next_power_of_2(GROUPS)
        vector = tl.arange(0, VECTORS)[None, :]
        queries = tl.load(q + vector * q_stride_h + key[:, None], mask=key_used[:, None] & (vector < GROUPS), other=0.0)
        cosine += batch * table_stride
        sine += batch * table_stride
        q_used = group_used[:, None] & dim_used
        q_pairs = load_pairs(q + group[:, None] * q_stride_h, cosine, sine, dim[None, :], q_used, ROTATED)
        k_pairs = load_pairs(k, cosine, sine, dim, dim_used, ROTATED)
        shift = 0.0
        if gate_shift is not None:
            shift = tl.load(gate_shift + head).to(tl.float32)
    of_state = tl.load(state_weight + first + group, mask=group_used, other=0.0).to(tl.float32)
    of_window = tl.load(window_weight + first + group, mask=group_used, other=0.0).to(tl.float32)

    if GATE is not None:
        queries, k_t, log_decay = state_inputs(
            queries, k_t, key_used, shift, head, temperature, HEADS, KEY_DIM, BLOCK_KEYS, VECTORS, PER_HEAD, GATE, MAP
        )
        q_here, k_here = rotated(q_pairs), rotated(k_pairs)
    decay = tl.exp(log_decay)
    if not PER_HEAD:
        decay = once(decay)[:, None]

    # Padding adds no value and sees none.
    v_real = tl.where(token >= start, v_t.to(tl.float32), 0.0)
    if late_keys is None:
        late_v = v_real
    tile = decay * tile + k_t.to(tl.float32)[:, None] * late_v.to(tl.float32)
    tl.store(state + tile_offset, tile, mask=tile_used)
    read = tl.zeros((BLOCK_QUERIES, BLOCK_VALUES), tl.float32)
    for query in tl.static_range(GROUPS):
        # float32 sums: a tensor-core product would have to split the state's mantissa and need more registers.
        of_query = tl.sum(queries[query].to(tl.float32)[:, None] * tile, 0)
        read += tl.where((group == query)[:, None], of_query, 0.0)

    # Online softmax over the ring, in powers of 2, starting with the token itself.
    scale = window_scale * LOG2_E
    row_max = tl.sum(q_here.to(tl.float32) * k_here.to(tl.float32), 1) * scale
    row_sum = tl.full((BLOCK_QUERIES,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_VALUES), tl.float32) + v_real
    for _ in tl.range(0, SINKS + WINDOW, BLOCK_RING):
        # Age of the newest earlier token in each slot: 1 to WINDOW; age WINDOW is outside the window.
        since = (token - 1 - (slot - SINKS) % WINDOW + WINDOW) % WINDOW + 1
        visible = (slot < SINKS + WINDOW) & (since < WINDOW) & (token - since >= start)
        if SINKS > 0:
            visible = tl.where(slot < SINKS, start + slot <= token - WINDOW, visible)
        scores = tl.dot(q_here, keys, input_precision=PRECISION) * scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        seen = tl.where(visible[:, None], values, 0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), seen, input_precision=PRECISION)
        row_max = new_max
        slot += BLOCK_RING
        place, held = slot * (HEADS * VALUE_DIM), slot < SINKS + WINDOW
        keys = tl.load(ring_keys + place[None, :] + dim[:, None], mask=held[None, :] & dim_used[:, None], other=0.0)
        values = tl.load(ring_values + place[:, None] + value, mask=held[:, None] & value_used, other=0.0)

    result = (of_window / row_sum)[:, None] * acc + (of_state * state_scale)[:, None] * read
    out += (batch * (HEADS * GROUPS) + first + group[:, None]) * VALUE_DIM + value
    tl.store(out, result.to(out.dtype.element_ty), mask=group_used[:, None] & value_used)

    if late_keys is not None:
        tl.debug_barrier()  # all threads have read the value that is overwritten
        now = token % (WINDOW + 1) * (HEADS * KEY_DIM)
        tl.store(late_keys + now + dim, k_pairs[0], mask=dim_used & (block == 0))
    newest = (SINKS + token % WINDOW) * (HEADS * VALUE_DIM)
    tl.store(ring_values + newest + value, v_t, mask=value_used)
    tl.store(ring_keys + newest + dim, k_here, mask=dim_used & (block == 0))
    if SINKS > 0:
        own = token - start
        is_sink = (own >= 0) & (own < SINKS)
        tl.store(ring_values + own * (HEADS * VALUE_DIM) + value, v_t, mask=value_used & is_sink)
        tl.store(ring_keys + own * (HEADS * VALUE_DIM) + dim, k_here, mask=dim_used & is_sink & (block == 0))


@triton.jit
def _place_in_row(tokens, kv_start, row):
    """Return the token's position and the position of this row's first token that is not padding."""
    token, start = tl.load(tokens), 0
    if kv_start is not None:
        start = tl.load(kv_start + row)
    return token, start
