"""The backward pass in Triton.

With t_ij and lse_i of the forward pass. Tiles are transposed (rows are keys j, columns are queries i), so that no
matrix product has to be transposed before it enters the next one:

    P^T = 2^(K Q^T scale log2(e) + (r - c_j) - lse_i)        dV_j = sum_i P_ij dO_i
    dS^T = P^T * (V dO^T - delta_i)                          dK_j = scale sum_i dS_ij Q_i
    delta_i = dO_i . O_i - dlse_i                            dQ_i = scale sum_j dS_ij K_j
    dc_i = sum_j dS_ij - sum_k dS_ki

One kernel computes dV, dK and dc_j, one program per block of keys; another computes dQ and the row sums of dS, one
program per block of queries. All sums have a fixed order. Heads that share a key or value head write separate dK and
dV, which are then summed. hopper/backward.py does all in one kernel on Hopper.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention.triton.configs import Config
from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, Decay, exact_at
from kernels.forgetting_attention.triton.forward import LN_2, descriptor, tile_width
from kernels.forgetting_attention.triton.ranges import GRAIN, Ranges
from kernels.rounding import cdiv


@triton.jit
def _key_tile(
    grad_k, grad_v, grad_keys, k, v, key, key_bias, m, q_tiles, grad_out_tiles, lse, delta,
    local, base, first_of, base_at_keys, offset, num_queries, scale, row, head,
    BLOCK_M: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one block of queries gives to a block of keys, and takes from it."""
    HAS_GATES: tl.constexpr = base is not None
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    query = m * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = query < num_queries
    q = q_tiles.load([row, head, m * BLOCK_M, 0]).reshape(BLOCK_M, KEY_DIM)
    logits = tl.dot(k, q.T, input_precision=PRECISION)
    # +inf for queries that see no key or are out of range: their weights are 0.
    column = tl.load(lse + query, mask=exists, other=float("inf"))
    if EXACT:
        bias = exact_at(local, base, query + offset, exists, CHUNK)[None, :] - key_bias[:, None]
        weights = tl.exp2(logits * scale + bias.to(tl.float32) - column[None, :])
    elif HAS_GATES:
        reference = tl.load(base + (m * BLOCK_M // CHUNK * CHUNK + offset) // CHUNK)
        column -= (reference - base_at_keys).to(tl.float32)
        weights = tl.exp2(logits * scale - column[None, :] - key_bias[:, None])
    else:
        weights = tl.exp2(logits * scale - column[None, :])
    if MASKED:
        position = query + offset
        visible = key[:, None] <= position[None, :]
        if first_of is not None:
            visible = visible & (key[:, None] >= tl.load(first_of + position, mask=exists, other=0)[None, :])
        weights = tl.where(visible, weights, 0.0)
    grad_out = grad_out_tiles.load([row, head, m * BLOCK_M, 0]).reshape(BLOCK_M, VALUE_DIM)
    grad_weights = tl.dot(v, grad_out.T, input_precision=PRECISION)
    grad_v = tl.dot(weights.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
    grad_logits = weights * (grad_weights - tl.load(delta + query, mask=exists, other=0.0)[None, :])
    grad_halves = grad_logits.to(q.dtype)
    grad_k = tl.dot(grad_halves, q, grad_k, input_precision=PRECISION)
    if HAS_GATES:
        grad_keys -= tl.sum(grad_logits, 1)
    return grad_k, grad_v, grad_keys


@triton.jit(do_not_specialize=["scale", "num_queries", "num_keys", "first_heads", "key_group", "value_group"])
def _backward_keys(
    q_tiles, k_tiles, v_tiles, grad_out_tiles, grad_k_tiles, grad_v_tiles,
    lse, delta, local, base, grad_keys_out, first_of, seen_until, whole_until, kv_start, kv_end,
    scale, num_queries, num_keys, first_heads, key_group, value_group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, GRAIN: tl.constexpr, LN_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    plane = row.to(tl.int64) * heads + head
    HAS_GATES: tl.constexpr = local is not None
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    chunks = tl.cdiv(num_keys, CHUNK)
    rows = tl.cdiv(num_queries, CHUNK) * CHUNK
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + row)
    if kv_end is not None:
        end = tl.load(kv_end + row)
    offset = end - num_queries
    key = n * BLOCK_N + tl.arange(0, BLOCK_N)

    # Blocks of queries [begin, stop); those before `whole_from` and from `whole_stop` on need a mask.
    begin = tl.maximum(n * BLOCK_N - offset, 0) // BLOCK_M
    whole_from = tl.cdiv(tl.maximum(n * BLOCK_N + BLOCK_N - 1 - offset, 0), BLOCK_M)
    stop = tl.cdiv(num_queries, BLOCK_M)
    whole_stop = stop
    if first_of is not None:
        grains = tl.cdiv(num_keys, GRAIN)
        of_head = row.to(tl.int64) * first_heads + head % first_heads
        first_of += of_head * chunks * CHUNK
        at = of_head * grains + n * BLOCK_N // GRAIN
        last = tl.load(seen_until + at)
        for grain in tl.static_range(1, BLOCK_N // GRAIN):
            last = tl.maximum(
                last, tl.load(seen_until + at + grain, mask=n * BLOCK_N // GRAIN + grain < grains, other=-1)
            )
        last_whole = tl.load(whole_until + at)
        stop = tl.where(last < offset, begin, (last - offset) // BLOCK_M + 1)
        whole_stop = tl.where(last_whole >= end - 1, stop, tl.maximum(last_whole + 1 - offset, 0) // BLOCK_M)
    stop = tl.where(n * BLOCK_N < end, tl.maximum(stop, begin), begin)
    whole_from = tl.minimum(tl.maximum(whole_from, begin), stop)
    whole_stop = tl.minimum(tl.maximum(whole_stop, whole_from), stop)
    num_diagonal = whole_from - begin
    num_masked = num_diagonal + stop - whole_stop

    key_bias, base_at_keys = None, 0.0
    if HAS_GATES:
        local += plane * chunks * CHUNK
        base += plane * chunks
        base_at_keys = tl.load(base + n * BLOCK_N // CHUNK)
        if EXACT:
            key_bias = exact_at(local, base, key, key < num_keys, CHUNK)
        else:
            key_bias = tl.load(local + key, mask=key < num_keys, other=0.0)
    lse += plane * rows
    delta += plane * rows
    k = k_tiles.load([row, head // key_group, n * BLOCK_N, 0]).reshape(BLOCK_N, KEY_DIM)
    v = v_tiles.load([row, head // value_group, n * BLOCK_N, 0]).reshape(BLOCK_N, VALUE_DIM)
    if kv_start is not None or kv_end is not None:
        # Slots outside the row's keys may hold anything, even NaN, and 0 * NaN is NaN.
        held = ((key >= start) & (key < end))[:, None]
        k, v = tl.where(held, k, 0.0), tl.where(held, v, 0.0)
    grad_k = tl.zeros([BLOCK_N, KEY_DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    grad_keys = tl.zeros([BLOCK_N], tl.float32)
    for index in tl.range(0, num_masked):
        m = index + tl.where(index < num_diagonal, begin, whole_stop - num_diagonal)
        grad_k, grad_v, grad_keys = _key_tile(
            grad_k, grad_v, grad_keys, k, v, key, key_bias, m, q_tiles, grad_out_tiles, lse, delta,
            local, base, first_of, base_at_keys, offset, num_queries, scale, row, head,
            BLOCK_M, KEY_DIM, VALUE_DIM, CHUNK, True, PRECISION,
        )  # fmt: skip
    for m in tl.range(whole_from, whole_stop):
        grad_k, grad_v, grad_keys = _key_tile(
            grad_k, grad_v, grad_keys, k, v, key, key_bias, m, q_tiles, grad_out_tiles, lse, delta,
            local, base, first_of, base_at_keys, offset, num_queries, scale, row, head,
            BLOCK_M, KEY_DIM, VALUE_DIM, CHUNK, False, PRECISION,
        )  # fmt: skip
    grad_k = (grad_k * (scale * LN_2)).to(grad_k_tiles.dtype).reshape(1, 1, BLOCK_N, KEY_DIM)
    grad_k_tiles.store([row, head, n * BLOCK_N, 0], grad_k)
    grad_v_tiles.store([row, head, n * BLOCK_N, 0], grad_v.to(grad_v_tiles.dtype).reshape(1, 1, BLOCK_N, VALUE_DIM))
    if HAS_GATES:
        tl.store(grad_keys_out + plane * chunks * CHUNK + key, grad_keys, mask=key < num_keys)


@triton.jit(do_not_specialize=["scale", "num_queries", "num_keys", "first_heads", "key_group", "value_group"])
def _backward_queries(
    q_tiles, k_tiles, v_tiles, grad_out_tiles, grad_q_tiles, lse, delta, local, base, grad_queries, first_of, kept_from,
    kv_start, kv_end, scale, num_queries, num_keys, first_heads, key_group, value_group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, GRAIN: tl.constexpr, LN_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, and the sums of the rows of dS. All blocks of keys are masked."""
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2)
    plane = row.to(tl.int64) * tl.num_programs(1) + head
    HAS_GATES: tl.constexpr = local is not None
    EXACT: tl.constexpr = local is not None and local.dtype.element_ty == tl.float64
    chunks = tl.cdiv(num_keys, CHUNK)
    rows = tl.cdiv(num_queries, CHUNK) * CHUNK
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + row)
    if kv_end is not None:
        end = tl.load(kv_end + row)
    offset = end - num_queries
    query = m * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = query < num_queries
    position = query + offset
    first = tl.zeros([BLOCK_M], tl.int32)
    begin = 0
    if first_of is not None:
        first_of += (row.to(tl.int64) * first_heads + head % first_heads) * chunks * CHUNK
        first = tl.load(first_of + position, mask=exists, other=2147483647)
        begin = tl.load(first_of + m * BLOCK_M + offset)
        if kept_from is not None:
            kept = kept_from + plane * tl.cdiv(num_queries, GRAIN) + m * BLOCK_M // GRAIN
            begin = tl.maximum(begin, tl.load(kept))
    reference = 0.0
    if HAS_GATES:
        local += plane * chunks * CHUNK
        base += plane * chunks
        reference = tl.load(base + (m * BLOCK_M // CHUNK * CHUNK + offset) // CHUNK)
    row_decay = exact_at(local, base, position, exists, CHUNK) if EXACT else None
    column = tl.load(lse + plane * rows + query, mask=exists, other=float("inf"))
    delta_rows = tl.load(delta + plane * rows + query, mask=exists, other=0.0)
    q = q_tiles.load([row, head, m * BLOCK_M, 0]).reshape(BLOCK_M, KEY_DIM)
    grad_out = grad_out_tiles.load([row, head, m * BLOCK_M, 0]).reshape(BLOCK_M, VALUE_DIM)
    grad_q = tl.zeros([BLOCK_M, KEY_DIM], tl.float32)
    row_sums = tl.zeros([BLOCK_M], tl.float32)
    last_position = tl.minimum(m * BLOCK_M + offset + BLOCK_M, end) - 1
    for n in tl.range(begin // BLOCK_N, tl.cdiv(last_position + 1, BLOCK_N)):
        key = n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = k_tiles.load([row, head // key_group, n * BLOCK_N, 0]).reshape(BLOCK_N, KEY_DIM)
        v = v_tiles.load([row, head // value_group, n * BLOCK_N, 0]).reshape(BLOCK_N, VALUE_DIM)
        if kv_start is not None or kv_end is not None:
            held = ((key >= start) & (key < end))[:, None]
            k, v = tl.where(held, k, 0.0), tl.where(held, v, 0.0)
        logits = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if EXACT:
            bias = row_decay[:, None] - exact_at(local, base, key, key < num_keys, CHUNK)[None, :]
            logits += bias.to(tl.float32)
        elif HAS_GATES:
            shift = (reference - tl.load(base + n * BLOCK_N // CHUNK)).to(tl.float32)
            logits += (shift - tl.load(local + key, mask=key < num_keys, other=0.0))[None, :]
        visible = (key[None, :] <= position[:, None]) & (key[None, :] >= first[:, None])
        weights = tl.where(visible, tl.exp2(logits - column[:, None]), 0.0)
        grad_weights = tl.dot(grad_out, v.T, input_precision=PRECISION)
        grad_logits = weights * (grad_weights - delta_rows[:, None])
        row_sums += tl.sum(grad_logits, 1)
        grad_q = tl.dot(grad_logits.to(k.dtype), k, grad_q, input_precision=PRECISION)
    grad_q = (grad_q * (scale * LN_2)).to(grad_q_tiles.dtype).reshape(1, 1, BLOCK_M, KEY_DIM)
    grad_q_tiles.store([row, head, m * BLOCK_M, 0], grad_q)
    if HAS_GATES:
        tl.store(grad_queries + plane * num_queries + query, row_sums, mask=exists)


@triton.jit
def less_grad_lse(delta, grad_lse, lse, query, num_queries, row, head, heads):
    """delta - dlse; dlse [B, T, Hq] counts where lse (base 2, of these queries) says that there is a key to see."""
    address = grad_lse + (row.to(tl.int64) * num_queries + query) * heads + head
    seen = (query < num_queries) & (lse < float("inf"))
    return delta - tl.load(address, mask=seen, other=0.0)


@triton.jit(do_not_specialize=["num_queries"])
def _delta(
    out_tiles, grad_out_tiles, lse, grad_lse, delta_out, num_queries, BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """delta_i = dO_i . O_i - dlse_i, [B, Hq, T rounded up] float32."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    plane = row.to(tl.int64) * tl.num_programs(1) + head
    out = out_tiles.load([row, head, block * BLOCK, 0]).reshape(BLOCK, VALUE_DIM).to(tl.float32)
    grad_out = grad_out_tiles.load([row, head, block * BLOCK, 0]).reshape(BLOCK, VALUE_DIM).to(tl.float32)
    query = block * BLOCK + tl.arange(0, BLOCK)
    at = plane * tl.cdiv(num_queries, BLOCK) * BLOCK + query
    delta = tl.sum(out * grad_out, 1)
    if grad_lse is not None:
        delta = less_grad_lse(delta, grad_lse, tl.load(lse + at), query, num_queries, row, head, tl.num_programs(1))
    tl.store(delta_out + at, delta)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    decay: Decay | None,
    ranges: Ranges | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    config: Config,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v in their dtype, and grad_keys and grad_queries for `gradient_of_gates`.

    Args:
        grad_lse: [B, T, Hq] float32 contiguous, of the natural log; not read where a query sees no key.
    """
    batch, num_queries, heads, _ = q.shape
    num_keys = k.shape[1]
    key_dim, value_dim = tile_width(q), tile_width(v)
    rows = lse.shape[2]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta = torch.empty_like(lse)
    _delta[(rows // CHUNK, heads, batch)](
        descriptor(out, CHUNK), descriptor(grad_out, CHUNK), lse, grad_lse, delta, num_queries,
        BLOCK=CHUNK, VALUE_DIM=value_dim,
    )  # fmt: skip
    grad_keys = grad_queries = None
    if decay is not None:
        grad_keys = torch.empty_like(decay.local, dtype=torch.float32)
        grad_queries = lse.new_empty(batch, heads, num_queries, 1)
    # Heads that share a key head write separate gradients, float32 until they are summed.
    key_group, value_group = heads // k.shape[2], heads // v.shape[2]
    grad_k = for_each_head(k, heads)
    grad_v = for_each_head(v, heads)
    shared = (
        scale * LOG2_E,
        num_queries,
        num_keys,
        1 if ranges is None else ranges.first.shape[1],
        key_group,
        value_group,
    )
    decays = (None, None) if decay is None else (decay.local, decay.base)
    options = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        "GRAIN": GRAIN,
        "LN_2": LN_2,
        "PRECISION": precision,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    tiles = (
        descriptor(q, config.block_m),
        descriptor(k, config.block_n),
        descriptor(v, config.block_n),
        descriptor(grad_out, config.block_m),
    )
    _backward_keys[(cdiv(num_keys, config.block_n), heads, batch)](
        *tiles,
        descriptor(grad_k, config.block_n),
        descriptor(grad_v, config.block_n),
        lse,
        delta,
        *decays,
        grad_keys,
        *((None,) * 3 if ranges is None else (ranges.first, ranges.seen_until, ranges.whole_until)),
        kv_start,
        kv_end,
        *shared,
        **options,
    )
    _backward_queries[(cdiv(num_queries, config.block_m), heads, batch)](
        *tiles,
        descriptor(grad_q, config.block_m),
        lse,
        delta,
        *decays,
        grad_queries,
        *((None, None) if ranges is None else (ranges.first, ranges.kept_from)),
        kv_start,
        kv_end,
        *shared,
        **options,
    )
    return grad_q, sum_over_heads(grad_k, k), sum_over_heads(grad_v, v), grad_keys, grad_queries


def for_each_head(x: Tensor, heads: int, new: Callable[..., Tensor] = torch.empty) -> Tensor:
    """Allocate the gradient of x for each head of q: in x's dtype if no head is shared, else in float32."""
    dtype = x.dtype if x.shape[2] == heads else torch.float32
    return new(*x.shape[:2], heads, x.shape[3], dtype=dtype, device=x.device)


def sum_over_heads(grad: Tensor, x: Tensor) -> Tensor:
    if grad.shape == x.shape:
        return grad
    return grad.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)
