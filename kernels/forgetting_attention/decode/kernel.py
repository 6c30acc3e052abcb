"""Forgetting attention for decoding, in Triton: few queries over many keys, split over the keys.

    s_ij = scale q_i . k_j + c_i - c_j        m_i = max_j s_ij        o_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(...)

Each key needs little arithmetic, so the time is that of reading K, V and c, each of which should be read once even if
heads share it. The query heads are divided into groups that share no key head and no value head with another group; a
program owns one group, all queries, and one split of a row's keys:

    rows of a tile: query x head of the group               S [rows, keys] = Q K^T, one product per key head
    O [rows, Dv] += P V, one product per value head         each row keeps the product of the head that it reads

so the products do KEY_HEADS and VALUE_HEADS times the work that is needed, on tensor cores that would idle, and every
tile of K and V is loaded once. A row's keys are divided evenly among its splits on the device, from kv_start, kv_end
and the window: the host needs no number from the device, and a cache much longer than what it holds leaves no program
without work. Each split gives its own normalized output and the log2 of its sum (-inf where it saw nothing); a second
kernel joins them. Sizes of the batch, the cache and the splits are plain arguments: none of them compiles anew.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention.decode.tiling import NUM_STAGES, NUM_WARPS, Tiling, block_dim, choose_splits
from kernels.forgetting_attention.reference import CLOSED_GATE
from kernels.operation import register_operation
from kernels.rounding import next_power_of_2

MAX_QUERIES = 16
"""Most queries for which `decode` is used."""

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN_2 = math.log(2.0)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    window: int | None,
    cumulative: bool,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `forgetting_attention` for few queries (1 to MAX_QUERIES; more are slow), without a gradient.

    Args:
        q: [B, T, Hq, Dk] float16, bfloat16 or float32; the queries are the last T positions of each row's keys.
        k, v: [B, S, Hk, Dk], [B, S, Hv, Dv] in q's dtype; Hk and Hv divide Hq, Dk and Dv are 256 or less. Views of
            larger tensors are read in place if each head's channels are contiguous.
        log_forget: [B, S, Hq] float32 or float64, or None. Differences of a float64 sum are taken in float64.
        kv_start, kv_end: [B] int32 or None, as in `forgetting_attention`; slots outside may hold anything.
        scale: factor on the logits.
        window: query i sees the keys i - window + 1 to i.
        cumulative: log_forget is already its cumulative sum. If not, it is first summed over all keys, in float64.

    Returns:
        [B, T, Hq, Dv] in q's dtype; 0 for a query that sees no key. lse [B, T, Hq] float32, as `forgetting_attention`
        returns it; empty without return_lse.
    """
    return forgetting_attention_decode(
        q, k, v, log_forget, kv_start, kv_end, scale, window, cumulative, None, return_lse
    )


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    window: int | None,
    cumulative: bool,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Implement `decode`; num_splits of a row's keys is chosen from the sizes and the device when None."""
    out, lse = _empty_results(q, v, return_lse)
    if out.numel() == 0:
        return out, lse
    decay = log_forget if log_forget is None or cumulative else _cumulative(log_forget, kv_start)
    q, k, v, decay = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, decay))
    tiling = Tiling.of(q, k, v, decay)
    # A window beyond the number of keys hides none, and clamped it fits the kernel's 32 bits.
    window = k.shape[1] if window is None else min(window, k.shape[1])
    if num_splits is None:
        keys_read = min(k.shape[1], window + q.shape[1] - 1)
        num_splits = choose_splits(q.shape[0] * tiling.groups, keys_read, q.device)
    asked = lse if return_lse else None
    with torch.cuda.device_of(q):
        if num_splits == 1:
            _launch_splits(tiling, q, k, v, decay, kv_start, kv_end, scale, window, 1, out, asked)
        else:
            partial = q.new_empty(num_splits, *out.shape, dtype=torch.float32)
            lses = q.new_empty(num_splits, *out.shape[:3], dtype=torch.float32)
            _launch_splits(tiling, q, k, v, decay, kv_start, kv_end, scale, window, num_splits, partial, lses)
            _join_splits[(lses[0].numel(),)](
                partial, lses, out, asked, num_splits, v.shape[3], next_power_of_2(v.shape[3]), BLOCK_SPLITS=32
            )
    return out, lse.mul_(LN_2) if return_lse else lse


def _fake_decode(q, k, v, log_forget, kv_start, kv_end, scale, window, cumulative, num_splits=None, return_lse=False):
    return _empty_results(q, v, return_lse)


forgetting_attention_decode = register_operation("forgetting_attention_decode", _decode, _fake_decode)


def _empty_results(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3] if return_lse else 0, dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


def _cumulative(log_forget: Tensor, kv_start: Tensor | None) -> Tensor:
    """Return the sum of the log gates from kv_start, [B, S, H] float64.

    A closed gate counts as CLOSED_GATE: keys before it get weight exp(-1e3) = 0, and a float64 sum of a hundred
    thousand of them is exact to 2e-6.
    """
    gates = log_forget.double().clamp(min=CLOSED_GATE)
    if kv_start is not None:
        key = torch.arange(gates.shape[1], device=gates.device)
        gates = gates.masked_fill((key < kv_start[:, None])[..., None], 0.0)
    return gates.cumsum(1)


def _launch_splits(
    tiling: Tiling,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    window: int,
    num_splits: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    batch, num_queries, num_heads, key_dim = q.shape
    num_keys, value_dim = v.shape[1], v.shape[3]
    strides, units = [], []
    for x in (q, k, v, decay):
        unit, in_units = (1, (0, 0)) if x is None else strides_in_units(x)
        units.append(unit)
        strides.extend(in_units)
    _attend_split[(tiling.groups, num_splits, batch)](
        q,
        k,
        v,
        decay,
        kv_start,
        kv_end,
        out,
        lse,
        *strides,
        num_queries,
        num_keys,
        window,
        scale,
        *units,
        NUM_HEADS=num_heads,
        HEADS_PER_KEY_HEAD=num_heads // k.shape[2],
        HEADS_PER_VALUE_HEAD=num_heads // v.shape[2],
        HEADS=tiling.heads,
        KEY_HEADS=tiling.key_heads,
        VALUE_HEADS=tiling.value_heads,
        PADDED_HEADS=tiling.padded_heads,
        BLOCK_QUERIES=tiling.queries,
        BLOCK_KEYS=tiling.keys,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY_DIM=block_dim(key_dim),
        BLOCK_VALUE_DIM=block_dim(value_dim),
        # Three products in tf32 for one in float32: tf32 alone has 10 bits.
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def strides_in_units(x: Tensor) -> tuple[int, list[int]]:
    """Return the widest unit of up to 16 bytes that divides all strides but the last, and those strides in units.

    The unit is a constexpr from which the compiler infers load widths, without a recompilation for each stride.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    unit = math.gcd(16 // x.element_size(), *strides)
    return unit, [stride // unit for stride in strides]


@triton.jit(
    do_not_specialize=[
        *("q_stride_b", "q_stride_t", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h"),
        *("v_stride_b", "v_stride_s", "v_stride_h", "decay_stride_b", "decay_stride_s"),
        *("num_queries", "num_keys", "window"),
    ]
)
def _attend_split(
    q, k, v, decay, kv_start, kv_end, out, lse,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h, decay_stride_b, decay_stride_s,
    num_queries, num_keys, window, scale,
    Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, DECAY_UNIT: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS_PER_KEY_HEAD: tl.constexpr, HEADS_PER_VALUE_HEAD: tl.constexpr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One group of heads, one split of the keys, one batch row; lse (base 2) may be None when there is one split."""
    group, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(1)
    row = tl.arange(0, BLOCK_QUERIES * PADDED_HEADS)
    row_head, row_query = row % PADDED_HEADS, row // PADDED_HEADS
    row_used = (row_head < HEADS) & (row_query < num_queries)
    first_head = group * HEADS
    key_dim, value_dim = tl.arange(0, BLOCK_KEY_DIM), tl.arange(0, BLOCK_VALUE_DIM)

    end = num_keys
    if kv_end is not None:
        end = tl.load(kv_end + batch)
    first_key = tl.maximum(end - num_queries - window + 1, 0)
    if kv_start is not None:
        first_key = tl.maximum(first_key, tl.load(kv_start + batch))
    query_position = end - num_queries + row_query
    split_keys = tl.cdiv(tl.cdiv(end - first_key, num_splits), BLOCK_KEYS) * BLOCK_KEYS
    begin = first_key + split * split_keys
    stop = tl.minimum(begin + split_keys, end)

    # A cache may hold more than 2^31 numbers: offsets that grow with batch and time are 64 bits wide.
    batch = batch.to(tl.int64)
    k_step, k_head_step = k_stride_s.to(tl.int64) * K_UNIT, k_stride_h.to(tl.int64) * K_UNIT
    v_step, v_head_step = v_stride_s.to(tl.int64) * V_UNIT, v_stride_h.to(tl.int64) * V_UNIT
    q += batch * q_stride_b * Q_UNIT + first_head * (q_stride_h * Q_UNIT)
    k += batch * k_stride_b * K_UNIT + first_head // HEADS_PER_KEY_HEAD * k_head_step
    v += batch * v_stride_b * V_UNIT + first_head // HEADS_PER_VALUE_HEAD * v_head_step
    q_offset = row_query[:, None] * (q_stride_t * Q_UNIT) + row_head[:, None] * (q_stride_h * Q_UNIT) + key_dim
    q_tile = tl.load(q + q_offset, mask=row_used[:, None] & (key_dim < KEY_DIM), other=0.0)
    tile_key = tl.arange(0, BLOCK_KEYS)
    k_offset = tile_key[:, None] * (k_stride_s * K_UNIT) + key_dim
    v_offset = tile_key[:, None] * (v_stride_s * V_UNIT) + value_dim
    if decay is not None:
        decay_step = decay_stride_s.to(tl.int64) * DECAY_UNIT
        decay += batch * decay_stride_b * DECAY_UNIT + first_head
        decay_head = tl.arange(0, PADDED_HEADS)
        decay_offset = decay_head[:, None] + tile_key * (decay_stride_s * DECAY_UNIT)
        own_offset = query_position * decay_step + row_head
        own_decay = tl.load(decay + own_offset, mask=row_used, other=0.0)

    row_max = tl.full(row.shape, -float("inf"), tl.float32)
    row_sum = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros((BLOCK_QUERIES * PADDED_HEADS, BLOCK_VALUE_DIM), tl.float32)
    for start in tl.range(begin, stop, BLOCK_KEYS):
        key = start + tile_key
        held = key < stop
        k_start = k + start * k_step
        scores = tl.zeros((BLOCK_QUERIES * PADDED_HEADS, BLOCK_KEYS), tl.float32)
        for head in tl.static_range(KEY_HEADS):
            k_mask = held[:, None] & (key_dim < KEY_DIM)
            k_tile = tl.load(k_start + head * k_head_step + k_offset, mask=k_mask, other=0.0)
            product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            reads = row_head // HEADS_PER_KEY_HEAD == head
            scores = tl.where(reads[:, None], product, scores) if KEY_HEADS > 1 else product
        scores *= scale * LOG2_E
        if decay is not None:
            decay_start = decay + start * decay_step
            decay_mask = (decay_head < HEADS)[:, None] & held
            key_decay = tl.load(decay_start + decay_offset, mask=decay_mask, other=0.0)
            key_decay = tl.broadcast_to(key_decay[None], (BLOCK_QUERIES, PADDED_HEADS, BLOCK_KEYS))
            # Large sums cancel here, so subtract them in their own dtype.
            bias = own_decay[:, None] - tl.reshape(key_decay, scores.shape)
            scores += bias.to(tl.float32) * LOG2_E
        visible = (key <= query_position[:, None]) & (key > query_position[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # -inf - -inf is NaN: a row that has seen no key yet uses the reference 0.
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(row_max - reference)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        row_max = new_max
        v_start = v + start * v_step
        for head in tl.static_range(VALUE_HEADS):
            # Slots beyond the keys in use may hold NaN, and 0 * NaN is NaN.
            v_mask = held[:, None] & (value_dim < VALUE_DIM)
            v_tile = tl.load(v_start + head * v_head_step + v_offset, mask=v_mask, other=0.0)
            product = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
            reads = row_head // HEADS_PER_VALUE_HEAD == head
            acc += tl.where(reads[:, None], product, 0.0) if VALUE_HEADS > 1 else product

    out_row = ((split * tl.num_programs(2) + batch) * num_queries + row_query) * NUM_HEADS + first_head + row_head
    # A row that has seen no key keeps acc = 0 and row_max = -inf.
    total = tl.where(row_sum > 0, row_sum, 1.0)
    if lse is not None:
        tl.store(lse + out_row, row_max + tl.log2(total), mask=row_used)
    acc /= total[:, None]
    out_mask = row_used[:, None] & (value_dim < VALUE_DIM)
    tl.store(out + out_row[:, None] * VALUE_DIM + value_dim, acc.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _join_splits(
    partial, lse, out, lse_out, num_splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):  # fmt: skip
    """One row (query and head) of out [rows, DIM] from partial [splits, rows, DIM] and lse [splits, rows], base 2.

    lse_out: [rows], base 2 too, or None.
    """
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    dim = tl.arange(0, BLOCK_DIM)
    total_max = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        offset = split.to(tl.int64) * num_rows + row
        written = split < num_splits
        split_lse = tl.load(lse + offset, mask=written, other=-float("inf"))
        split_out = tl.load(partial + offset[:, None] * DIM + dim, mask=written[:, None] & (dim < DIM), other=0.0)
        new_max = tl.maximum(total_max, tl.max(split_lse, 0))
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(split_lse - reference)
        shrink = tl.exp2(total_max - reference)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * split_out, 0)
        total_max = new_max
    total = tl.where(total > 0, total, 1.0)
    if lse_out is not None:
        # A row that has seen no key keeps total_max = -inf.
        tl.store(lse_out + row, total_max + tl.log2(total))
    acc /= total
    tl.store(out + row * DIM + dim, acc.to(out.dtype.element_ty), mask=dim < DIM)
