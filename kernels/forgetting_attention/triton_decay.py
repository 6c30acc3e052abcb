"""The decay along each sequence, and what each block of queries and keys has to read, as Triton kernels.

Sums of log gates grow with the length while their small differences are wanted, so they are kept in two parts, both in
base 2 and both without the closed gates:

    c_j = base[j // CHUNK] + local[j]        base float64, local float32 from the beginning of its chunk of 128 keys

Every rule that hides keys from a query hides a prefix (window, document, left padding, closed gate), and so does
pruning: `first[i]` is the first key that the query at position i may see. It never decreases along a row. Hence a block
of queries reads one range of keys, and a block of keys is read by one range of queries: `Ranges` holds the ends.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention.reference import CLOSED_GATE

CHUNK = 128
# Ranges are kept for blocks of this many queries or keys; the attention kernels' blocks are multiples of it.
GRAIN = 64
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Decay:
    """`local` [B, Hq, chunks * CHUNK] float32 and `base` [B, Hq, chunks] float64."""

    local: Tensor
    base: Tensor


@dataclass(frozen=True)
class Ranges:
    """What is visible, by heads [B, H or 1, ...] int32; every field is a position among the keys.

    `first` [..., chunks * CHUNK]: the first key that the query at each position sees.
    `seen_until` and `whole_until` [..., S / GRAIN rounded up]: the last query that sees anything of each block of keys,
    and the last that no rule but causality hides any of it from.
    `kept_from` [..., T / GRAIN rounded up], with pruning: the first key that can matter to each block of queries.
    """

    first: Tensor
    seen_until: Tensor
    whole_until: Tensor
    kept_from: Tensor | None


def sum_gates(
    log_forget: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    cu_seqlens: Tensor | None,
    window: int | None,
    cumulative: bool,
    batch: int,
    num_keys: int,
    device: torch.device,
) -> tuple[Decay | None, Tensor | None]:
    """The decay (None without gates), and `first` of `Ranges` (None where causality alone hides keys)."""
    if log_forget is None and kv_start is None and cu_seqlens is None and window is None:
        return None, None
    heads = 1 if log_forget is None else log_forget.shape[2]
    chunks = triton.cdiv(num_keys, CHUNK)
    first = torch.empty(batch, heads, chunks * CHUNK, dtype=torch.int32, device=device)
    decay = None
    if log_forget is not None:
        base = torch.empty(batch, heads, chunks, dtype=torch.float64, device=device)
        decay = Decay(torch.empty(batch, heads, chunks * CHUNK, dtype=torch.float32, device=device), base)
    gates = first if log_forget is None else log_forget
    _sum_gates[(heads, batch)](
        gates,
        *((first, first) if decay is None else (decay.local, decay.base)),
        first,
        kv_start,
        kv_end,
        cu_seqlens,
        *_documents(cu_seqlens),
        # Beyond num_keys it says no more, and beyond 2^31 it would be another type, which is compiled anew.
        num_keys if window is None else min(window, num_keys),
        num_keys,
        *(gates.stride() if log_forget is not None else (0, 0, 0)),
        HAS_GATES=log_forget is not None,
        CUMULATIVE=cumulative,
        CLOSED=CLOSED_GATE,
        LOG2_E=LOG2_E,
        CHUNK=CHUNK,
        CHUNKS=16,
        num_warps=8,
    )
    return decay, first


def _documents(cu_seqlens: Tensor | None) -> tuple[int, int]:
    """The number of documents, and of the steps of a binary search among their bounds."""
    bounds = 1 if cu_seqlens is None else cu_seqlens.shape[0]
    return bounds - 1, bounds.bit_length()


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _halve(holds_at, fails_at, middle, holds):
    """One step of a binary search; none where nothing lies between."""
    between = tl.abs(fails_at - holds_at) > 1
    return tl.where(between & holds, middle, holds_at), tl.where(between & (holds == 0), middle, fails_at)


@triton.jit
def _document_start(position, cu_seqlens, num_documents, num_steps):
    """The last entry of cu_seqlens that is not beyond each position."""
    low = tl.zeros_like(position)
    high = low + num_documents
    for _ in range(num_steps):
        middle = (low + high) // 2
        low, high = _halve(low, high, middle, tl.load(cu_seqlens + middle) <= position)
    return tl.load(cu_seqlens + low)


@triton.jit(do_not_specialize=["num_documents", "num_steps", "window", "num_keys", "stride_b", "stride_s", "stride_h"])
def _sum_gates(
    gates, local_out, base_out, first_out, kv_start, kv_end, cu_seqlens,
    num_documents, num_steps, window, num_keys, stride_b, stride_s, stride_h,
    HAS_GATES: tl.constexpr, CUMULATIVE: tl.constexpr, CLOSED: tl.constexpr, LOG2_E: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program a head and row: CHUNKS chunks at a time, carrying the sum and the last closed gate."""
    head, row = tl.program_id(0), tl.program_id(1)
    plane = row.to(tl.int64) * tl.num_programs(0) + head
    num_chunks = tl.cdiv(num_keys, CHUNK)
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + row)
    if kv_end is not None:
        end = tl.load(kv_end + row)
    total = tl.zeros((), tl.float64)
    closed_at = tl.zeros((), tl.int32)
    for begin in range(0, num_chunks, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        position = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = position < num_chunks * CHUNK
        first = tl.maximum(position - window + 1, start)
        if cu_seqlens is not None:
            first = tl.maximum(first, _document_start(position, cu_seqlens, num_documents, num_steps))
        if HAS_GATES:
            held = (position >= start) & (position < end)
            address = gates + row.to(tl.int64) * stride_b + position.to(tl.int64) * stride_s + head * stride_h
            gate = tl.load(address, mask=held, other=0.0).to(tl.float64)
            if CUMULATIVE:
                # A chunk may begin before the row's first key or beyond its last, where the sum holds anything.
                nearest = tl.minimum(tl.maximum(chunk * CHUNK, start), tl.maximum(end - 1, 0)).to(tl.int64)
                address = gates + row.to(tl.int64) * stride_b + nearest * stride_s + head * stride_h
                base = tl.load(address, mask=end > start, other=0.0).to(tl.float64) * LOG2_E
                local = tl.where(held, gate * LOG2_E - base[:, None], 0.0)
            else:
                closed = gate < CLOSED
                local = tl.cumsum(tl.where(closed, 0.0, gate * LOG2_E), 1)
                sums = tl.sum(tl.where(closed, 0.0, gate * LOG2_E), 1)
                base = total + tl.cumsum(sums, 0) - sums
                total += tl.sum(sums, 0)
                last = tl.max(tl.where(closed, position, 0), 1)
                before = tl.maximum(closed_at, tl.associative_scan(last, 0, _larger))
                within = tl.associative_scan(tl.where(closed, position, 0), 1, _larger)
                # Only what was closed in the chunks before: those of the chunk itself come one by one.
                earlier = tl.where(chunk[:, None] > chunk[None, :], before[None, :], closed_at)
                first = tl.maximum(first, tl.maximum(within, tl.max(earlier, 1)[:, None]))
                closed_at = tl.max(before, 0)
            tl.store(base_out + plane * num_chunks + chunk, base, mask=chunk < num_chunks)
            tl.store(local_out + plane * num_chunks * CHUNK + position, local.to(tl.float32), mask=inside)
        tl.store(first_out + plane * num_chunks * CHUNK + position, first, mask=inside)


def largest_norms(q: Tensor, k: Tensor) -> Tensor:
    """[Hq + Hk] float32: the largest squared norm of each head of q and of k, over all rows and times.

    Rows of q and k are whole 16 bytes, and their last axis is contiguous.
    """
    unit = 16 // q.element_size()
    norms = torch.zeros(q.shape[2] + k.shape[2], dtype=torch.float32, device=q.device)
    rows = 128
    blocks = triton.cdiv(k.shape[1], rows)
    _largest_norms[(blocks, norms.shape[0], q.shape[0])](
        q,
        k,
        norms,
        *q.shape[1:],
        k.shape[1],
        *(stride // unit for x in (q, k) for stride in x.stride()[:3]),
        ROWS=rows,
        WIDTH=triton.next_power_of_2(q.shape[3]),
        UNIT=unit,
        num_warps=8,
    )
    return norms


@triton.jit(
    do_not_specialize=["num_queries", "heads", "dim", "num_keys", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h"]
)  # fmt: skip
def _largest_norms(
    q, k, norms, num_queries, heads, dim, num_keys, q_b, q_t, q_h, k_b, k_t, k_h,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_q = head < heads
    length = tl.where(of_q, num_queries, num_keys)
    time = block * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    mask = (time < length)[:, None] & (channel < dim)[None, :]
    if of_q:
        x = q + (row.to(tl.int64) * q_b + time[:, None].to(tl.int64) * q_t + head * q_h) * UNIT + channel[None, :]
    else:
        head_of_k = head - heads
        x = k + (row.to(tl.int64) * k_b + time[:, None].to(tl.int64) * k_t + head_of_k * k_h) * UNIT + channel[None, :]
    values = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(values * values, 1)
    # Outside the keys in use there may be anything, NaN too; in use, what is not finite makes its own NaN.
    squares = tl.where(squares < float("inf"), squares, 0.0)
    if block * ROWS < length:
        tl.atomic_max(norms + head, tl.max(squares, 0), sem="relaxed")


def find_ranges(
    first: Tensor,
    decay: Decay | None,
    kv_end: Tensor | None,
    num_queries: int,
    num_keys: int,
    prune: float | None = None,
    logit_bound: float | Tensor | None = None,
    norms: Tensor | None = None,
    scale: float = 1.0,
) -> Ranges:
    """Ranges from `first`; with `prune`, keys end where they cannot matter (see `forgetting_attention`).

    The bound on the logits is logit_bound, a number or [Hq], or else it is what `largest_norms` and the scale allow.
    """
    batch, heads = first.shape[:2]
    key_blocks, query_blocks = triton.cdiv(num_keys, GRAIN), triton.cdiv(num_queries, GRAIN)
    seen_until, whole_until = (first.new_empty(batch, heads, key_blocks) for _ in range(2))
    kept_from = None if prune is None else first.new_empty(batch, heads, query_blocks)
    lanes = 128
    _find_ranges[(triton.cdiv(max(key_blocks, query_blocks), lanes), heads, batch)](
        first,
        *((None, None) if decay is None else (decay.local, decay.base)),
        kv_end,
        logit_bound if isinstance(logit_bound, Tensor) else None,
        norms,
        seen_until,
        whole_until,
        kept_from,
        0.0 if prune is None else prune - math.log(num_keys),
        0.0 if isinstance(logit_bound, Tensor) or logit_bound is None else float(logit_bound),
        # Norms are rounded: a little more than they say.
        abs(scale) * 1.00001,
        1 if norms is None else heads // (norms.shape[0] - heads),
        num_queries,
        num_keys,
        num_keys.bit_length() + 1,
        LOG2_E=LOG2_E,
        CHUNK=CHUNK,
        GRAIN=GRAIN,
        LANES=lanes,
        num_warps=4,
    )
    return Ranges(first, seen_until, whole_until, kept_from)


@triton.jit
def _sum_at(local, base, plane, num_chunks, position, mask, CHUNK: tl.constexpr):
    """c at each position, float64."""
    whole = tl.load(base + plane * num_chunks + position // CHUNK, mask=mask, other=0.0)
    return whole + tl.load(local + plane * num_chunks * CHUNK + position, mask=mask, other=0.0).to(tl.float64)


@triton.jit(do_not_specialize=["prune", "logit_bound", "scale", "key_group", "num_queries", "num_keys", "num_steps"])
def _find_ranges(
    first, local, base, kv_end, logit_bounds, norms, seen_until, whole_until, kept_from,
    prune, logit_bound, scale, key_group, num_queries, num_keys, num_steps,
    LOG2_E: tl.constexpr, CHUNK: tl.constexpr, GRAIN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Binary searches, one a lane: `first` and c are monotone, so all that sees a key is a run of positions."""
    head, row = tl.program_id(1), tl.program_id(2)
    plane = row.to(tl.int64) * tl.num_programs(1) + head
    num_chunks = tl.cdiv(num_keys, CHUNK)
    block = tl.program_id(0) * LANES + tl.arange(0, LANES)
    end = num_keys
    if kv_end is not None:
        end = tl.load(kv_end + row)
    firsts = first + plane * num_chunks * CHUNK
    if kept_from is not None:
        bound = logit_bound
        if logit_bounds is not None:
            bound = tl.load(logit_bounds + head).to(tl.float32)
        if norms is not None:
            of_key = tl.load(norms + tl.num_programs(1) + head // key_group)
            bound = scale * tl.sqrt(tl.load(norms + head)) * tl.sqrt(of_key)
        # A bound that is NaN, or no bound at all, prunes nothing.
        threshold = tl.where(bound < 1e30, (prune - 2 * bound) * LOG2_E, float("-inf"))

    exists = block * GRAIN < tl.minimum(num_keys, end)
    first_key = block * GRAIN
    last_key = tl.minimum(first_key + GRAIN, end) - 1
    if kept_from is not None:
        at_key = _sum_at(local, base, plane, num_chunks, last_key, exists, CHUNK)
    # Both searches: what is asked for holds at `low` (or low is before the first key), and not at `high`. The last
    # query is tried first: where it sees all, as without pruning and documents, the search is over.
    low, high = first_key - 1, tl.where(exists, end, first_key)
    whole_low, whole_high = low, high
    middle = tl.where(exists, end - 1, 0)
    whole_middle = middle
    for _ in range(num_steps):
        sees = tl.load(firsts + middle, mask=high - low > 1, other=0) <= last_key
        if kept_from is not None:
            at_query = _sum_at(local, base, plane, num_chunks, middle, high - low > 1, CHUNK)
            sees = sees & (at_query - at_key >= threshold)
        low, high = _halve(low, high, middle, sees)
        middle = (low + high) // 2
        sees_all = tl.load(firsts + whole_middle, mask=whole_high - whole_low > 1, other=0) <= first_key
        whole_low, whole_high = _halve(whole_low, whole_high, whole_middle, sees_all)
        whole_middle = (whole_low + whole_high) // 2
    key_blocks = tl.cdiv(num_keys, GRAIN)
    tl.store(seen_until + plane * key_blocks + block, low, mask=block < key_blocks)
    tl.store(whole_until + plane * key_blocks + block, whole_low, mask=block < key_blocks)

    if kept_from is not None:
        query_blocks = tl.cdiv(num_queries, GRAIN)
        exists = block < query_blocks
        position = block * GRAIN + end - num_queries
        at_query = _sum_at(local, base, plane, num_chunks, position, exists, CHUNK)
        high = tl.where(exists, position, 0)
        low = tl.minimum(tl.load(firsts + position, mask=exists, other=0), high) - 1
        for _ in range(num_steps):
            middle = (low + high) // 2
            at_key = _sum_at(local, base, plane, num_chunks, middle, high - low > 1, CHUNK)
            high, low = _halve(high, low, middle, at_query - at_key >= threshold)
        tl.store(kept_from + plane * query_blocks + block, high, mask=exists)


def gradient_of_gates(
    log_forget: Tensor,
    grad_keys: Tensor,
    grad_queries: Tensor,
    queries_together: int,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    cu_seqlens: Tensor | None,
    num_queries: int,
    cumulative: bool,
) -> Tensor:
    """The gradient of log_forget [B, S, Hq], in its dtype, from the gradients of the scores.

    grad_keys: [B, Hq, S padded] float32, minus the sum over each key's scores.
    grad_queries: [B, Hq, T / queries_together, parts] float32, the sum over the scores of that many queries together,
        in any number of parts.
    """
    batch, num_keys, heads = log_forget.shape
    grad = torch.empty_like(log_forget)
    _gradient_of_gates[(heads, batch)](
        log_forget,
        grad_keys,
        grad_queries,
        grad,
        kv_start,
        kv_end,
        cu_seqlens,
        *_documents(cu_seqlens),
        num_queries,
        num_keys,
        grad_keys.shape[2],
        grad_queries.shape[2] * grad_queries.shape[3],
        *log_forget.stride(),
        *grad.stride(),
        CUMULATIVE=cumulative,
        CLOSED=CLOSED_GATE,
        TOGETHER=queries_together,
        PARTS=grad_queries.shape[3],
        BLOCK=2048,
        num_warps=8,
    )
    return grad


@triton.jit
def _add_unless_cut(sum_a, cut_a, sum_b, cut_b):
    return tl.where(cut_b != 0, sum_b, sum_a + sum_b), cut_a | cut_b


@triton.jit(
    do_not_specialize=[
        "num_documents", "num_steps", "num_queries", "num_keys", "keys_stride", "queries_stride",
        "stride_b", "stride_s", "stride_h", "grad_stride_b", "grad_stride_s", "grad_stride_h",
    ]
)  # fmt: skip
def _gradient_of_gates(
    gates, grad_keys, grad_queries, grad_out, kv_start, kv_end, cu_seqlens,
    num_documents, num_steps, num_queries, num_keys, keys_stride, queries_stride,
    stride_b, stride_s, stride_h, grad_stride_b, grad_stride_s, grad_stride_h,
    CUMULATIVE: tl.constexpr, CLOSED: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a head and row: sums from each key to its document's last, carried from the row's end backwards."""
    head, row = tl.program_id(0), tl.program_id(1)
    plane = row.to(tl.int64) * tl.num_programs(0) + head
    start, end = 0, num_keys
    if kv_start is not None:
        start = tl.load(kv_start + row)
    if kv_end is not None:
        end = tl.load(kv_end + row)
    offset = end - num_queries
    later = tl.zeros((), tl.float64)
    num_blocks = tl.cdiv(num_keys, BLOCK)
    for index in range(num_blocks):
        position = (num_blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
        held = (position >= start) & (position < end)
        grad = tl.load(grad_keys + plane * keys_stride + position, mask=held, other=0.0).to(tl.float64)
        query = position - offset
        asks = held & (query >= 0)
        # Rows of dS sum to 0 in exact arithmetic alone. A group's sum, shared evenly, cancels what columns gathered.
        group = query // TOGETHER
        in_group = tl.maximum(tl.minimum(num_queries - group * TOGETHER, TOGETHER), 1)
        sums = grad_queries + plane * queries_stride + group * PARTS
        rows = tl.load(sums, mask=asks, other=0.0)
        for part in tl.static_range(1, PARTS):
            rows += tl.load(sums + part, mask=asks, other=0.0)
        grad += (rows / in_group).to(tl.float64)
        if CUMULATIVE:
            result = grad
        else:
            first = start
            cut = tl.zeros_like(position)
            if cu_seqlens is not None:
                first = _document_start(position, cu_seqlens, num_documents, num_steps)
                following = tl.minimum(position + 1, num_keys)
                cut = (_document_start(following, cu_seqlens, num_documents + 1, num_steps) == following).to(tl.int32)
            result, cuts = tl.associative_scan((grad, cut), 0, _add_unless_cut, reverse=True)
            result = tl.where(cuts != 0, result, result + later)
            later = tl.sum(tl.where(position == tl.min(position, 0), result, 0.0), 0)
            address = gates + row.to(tl.int64) * stride_b + position.to(tl.int64) * stride_s + head * stride_h
            gate = tl.load(address, mask=held, other=0.0)
            result = tl.where(held & (gate >= CLOSED) & (position != first), result, 0.0)
        address = grad_out + row.to(tl.int64) * grad_stride_b + position.to(tl.int64) * grad_stride_s
        tl.store(address + head * grad_stride_h, result.to(grad_out.dtype.element_ty), mask=position < num_keys)
