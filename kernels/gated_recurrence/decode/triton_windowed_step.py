"""One token of a recurrence with a sliding window beside it, in Triton: all that a layer does between its projections.

    S_t = G_t (.) S_{t-1} + k_t^T v_t        out_t = a q_t S_t + b softmax(scale q'_t K'^T) V

`launch` takes q, k, G, q' and k' as they are, or makes them of what a Liger layer projects.

Time is the reading and writing of the states and the reading of the ring, once each. A program owns some value columns
of one key head in one row of the batch: that tile [Dk, columns] of the state, which it updates and reads with all query
heads of the group in one product; and the same columns of the ring's values. The scores are the same for all columns:
each program takes them anew, from keys that the first of them has brought into the cache.

The new token's key and value come from the arguments, never from the ring, and the softmax starts with them. So of the
slot that is written no program uses what it has read, and the order of the programs does not matter: the program of the
first columns writes the key, each its own columns of the value. A sink is written while its token is in the window,
where it is seen as such.

With late keys the state takes in the token that the window loses. Its value is still in the slot that the new one is
written to, where each program reads its own columns before it writes them. Its key all programs read: it is in a ring
of one slot more than the window is long, so that the slot that the first of them writes is one that no other reads.
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
RING_BYTES = 16 * 1024  # of a tile of keys
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
    """The arguments and the result of `kernels.gated_recurrence.windowed_step`."""
    return launch(
        q,
        k,
        v,
        state,
        ring_keys,
        ring_values,
        tokens,
        kv_start,
        state_weight,
        window_weight,
        sinks,
        window_scale,
        log_decay=log_decay,
        q_window=q_window,
        k_window=k_window,
        state_scale=state_scale,
        per_head=log_decay.ndim == 3,
    )


def _fake(
    q,
    k,
    v,
    log_decay,
    state,
    q_window,
    k_window,
    ring_keys,
    ring_values,
    tokens,
    kv_start,
    state_weight,
    window_weight,
    sinks,
    state_scale,
    window_scale,
):
    return empty_out(q, v)


triton_windowed_step = register_operation(
    "triton_windowed_step", _windowed_step, _fake, mutates=("state", "ring_keys", "ring_values")
)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """What a step returns, not yet written."""
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
    """One step, with the arguments of `windowed_step`, or with a gate those of `liger_step`.

    per_head: whether a head has one gate, not each of its channels one.
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
            # Three products in tf32 for one in float32: tf32 alone has 10 bits.
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            PER_HEAD=per_head,
            GATE=gate,
            MAP=feature_map,
            num_warps=NUM_WARPS,
        )
    for x in (state, ring_keys, ring_values, late_keys):
        if x is not None and not x.is_inference():
            # Torch cannot see that the kernel writes, and a graph that has saved x must refuse to use it.
            torch.autograd.graph.increment_version(x)
    return out


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Of rows and of heads."""
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
    """Some value columns of one key head in one row of the batch; kv_start may be None.

    With a GATE q and k are what a layer projects, and log_decay, q_window and k_window None; without it late_keys is.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = row.to(tl.int64)
    group, key, dim = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    value = block * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    group_used, key_used, dim_used, value_used = group < GROUPS, key < KEY_DIM, dim < VALUE_DIM, value < VALUE_DIM

    # All programs run at once, and together they read, calculate and write. So what is large is loaded first, the ring
    # too, of which what is not visible is left out afterwards; and the state is written before the ring is attended to.
    # Small vectors change their layout as they come, for which a program waits.
    if late_keys is not None:
        token, start = _place_in_row(tokens, kv_start, row)  # which say where the late token is
    state += (batch * HEADS + head) * (KEY_DIM * VALUE_DIM)
    tile_offset, tile_used = key[:, None] * VALUE_DIM + value, key_used[:, None] & value_used
    tile = tl.load(state + tile_offset, mask=tile_used, other=0.0)
    ring_keys += batch * ((SINKS + WINDOW) * HEADS * VALUE_DIM) + head * VALUE_DIM
    ring_values += batch * ((SINKS + WINDOW) * HEADS * VALUE_DIM) + head * VALUE_DIM
    slot = tl.arange(0, BLOCK_RING)
    place, held = slot * (HEADS * VALUE_DIM), slot < SINKS + WINDOW
    values = tl.load(ring_values + place[:, None] + value, mask=held[:, None] & value_used, other=0.0)
    tl.debug_barrier()  # over which the assembler moves no load to where its result is wanted
    keys = tl.load(ring_keys + place[None, :] + dim[:, None], mask=held[None, :] & dim_used[:, None], other=0.0)
    if late_keys is None:
        token, start = _place_in_row(tokens, kv_start, row)
    k += batch * k_stride_b + head * k_stride_h
    if late_keys is None:
        k_t = tl.load(k + key, mask=key_used, other=0.0)
    else:
        # Padding, and sinks, which are never lost, do not enter the state; nor does what a ring holds before any token.
        enters = token - WINDOW >= start + SINKS
        late_keys += batch * ((WINDOW + 1) * HEADS * KEY_DIM) + head * KEY_DIM
        oldest = (token + 1) % (WINDOW + 1) * (HEADS * KEY_DIM)
        k_t = tl.load(late_keys + oldest + key, mask=key_used & enters, other=0.0)
        lost = (SINKS + token % WINDOW) * (HEADS * VALUE_DIM)  # where the new token will be
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

    # Padding adds no value, and sees none.
    v_real = tl.where(token >= start, v_t.to(tl.float32), 0.0)
    if late_keys is None:
        late_v = v_real
    tile = decay * tile + k_t.to(tl.float32)[:, None] * late_v.to(tl.float32)
    tl.store(state + tile_offset, tile, mask=tile_used)
    read = tl.zeros((BLOCK_QUERIES, BLOCK_VALUES), tl.float32)
    for query in tl.static_range(GROUPS):
        # Sums of float32: as a product, the state's digits would have to be split, and more registers be held.
        of_query = tl.sum(queries[query].to(tl.float32)[:, None] * tile, 0)
        read += tl.where((group == query)[:, None], of_query, 0.0)

    # Softmax over the ring, in powers of 2, which begins with the token itself.
    scale = window_scale * LOG2_E
    row_max = tl.sum(q_here.to(tl.float32) * k_here.to(tl.float32), 1) * scale
    row_sum = tl.full((BLOCK_QUERIES,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_VALUES), tl.float32) + v_real
    for _ in tl.range(0, SINKS + WINDOW, BLOCK_RING):
        # The newest token before this one in each slot: 1 to WINDOW before it, the last of which is not seen any more.
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
        tl.debug_barrier()  # all threads have read the value that is written over
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
    """How many tokens came before this one, and the first of them in this row that is not padding."""
    token, start = tl.load(tokens), 0
    if kv_start is not None:
        start = tl.load(kv_start + row)
    return token, start
