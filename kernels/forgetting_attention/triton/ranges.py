"""Ranges that each block of queries and of keys must read, computed in Triton.

Except for causality, every rule that hides keys from a query hides a prefix (window, document, left padding, closed
gate, pruning): `first[i]` is the first key that the query at position i may see. It never decreases along a row. Hence
a block of queries reads one range of keys, and one range of queries reads a block of keys: `Ranges` holds the ends.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention.triton.decay import CHUNK, LOG2_E, Decay, halve
from kernels.rounding import cdiv, next_power_of_2

# Ranges are stored per grain of this many queries or keys; a smaller block of the attention kernels uses its grain's.
GRAIN = 64


@dataclass(frozen=True)
class Ranges:
    """Visible ranges of each head, [B, H or 1, ...] int32; every value is a position among the keys.

    Attributes:
        first: [..., chunks * CHUNK], the first key that the query at each position sees.
        seen_until: [..., S / GRAIN rounded up], the last query that sees any key of each block.
        whole_until: like seen_until, the last query from which only causality hides keys of the block.
        kept_from: [..., T / GRAIN rounded up], with pruning: the first key that can matter to each block of queries.
    """

    first: Tensor
    seen_until: Tensor
    whole_until: Tensor
    kept_from: Tensor | None


def largest_norms(q: Tensor, k: Tensor) -> Tensor:
    """Return the largest squared norm of each head of q and k over all rows and times, [Hq + Hk] float32.

    Rows of q and k must be multiples of 16 bytes, and their last axis contiguous.
    """
    unit = 16 // q.element_size()
    norms = torch.zeros(q.shape[2] + k.shape[2], dtype=torch.float32, device=q.device)
    rows = 128
    blocks = cdiv(k.shape[1], rows)
    _largest_norms[(blocks, norms.shape[0], q.shape[0])](
        q,
        k,
        norms,
        *q.shape[1:],
        k.shape[1],
        *(stride // unit for x in (q, k) for stride in x.stride()[:3]),
        ROWS=rows,
        WIDTH=next_power_of_2(q.shape[3]),
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
    # Unused key slots may hold anything, even NaN; non-finite values in used slots give NaN in the output anyway.
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
    """Compute the ranges from `first`; `prune` also drops keys that cannot matter (see `forgetting_attention`).

    The bound on the logits is logit_bound, a number or [Hq], or else follows from `largest_norms` and the scale.
    """
    batch, heads = first.shape[:2]
    key_blocks, query_blocks = cdiv(num_keys, GRAIN), cdiv(num_queries, GRAIN)
    seen_until, whole_until = (first.new_empty(batch, heads, key_blocks) for _ in range(2))
    kept_from = None if prune is None else first.new_empty(batch, heads, query_blocks)
    lanes = 128
    _find_ranges[(cdiv(max(key_blocks, query_blocks), lanes), heads, batch)](
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
        # The norms are rounded: add a small margin.
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
        # A NaN or infinite bound prunes nothing.
        threshold = tl.where(bound < 1e30, (prune - 2 * bound) * LOG2_E, float("-inf"))

    exists = block * GRAIN < tl.minimum(num_keys, end)
    first_key = block * GRAIN
    last_key = tl.minimum(first_key + GRAIN, end) - 1
    if kept_from is not None:
        at_key = _sum_at(local, base, plane, num_chunks, last_key, exists, CHUNK)
    # Invariant of both searches: the condition holds at `low` (or low is before the first key) and fails at `high`.
    # The last query is tried first: if it sees all, as without pruning and documents, the search ends there.
    low, high = first_key - 1, tl.where(exists, end, first_key)
    whole_low, whole_high = low, high
    middle = tl.where(exists, end - 1, 0)
    whole_middle = middle
    for _ in range(num_steps):
        sees = tl.load(firsts + middle, mask=high - low > 1, other=0) <= last_key
        if kept_from is not None:
            at_query = _sum_at(local, base, plane, num_chunks, middle, high - low > 1, CHUNK)
            sees = sees & (at_query - at_key >= threshold)
        low, high = halve(low, high, middle, sees)
        middle = (low + high) // 2
        sees_all = tl.load(firsts + whole_middle, mask=whole_high - whole_low > 1, other=0) <= first_key
        whole_low, whole_high = halve(whole_low, whole_high, whole_middle, sees_all)
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
            high, low = halve(high, low, middle, at_query - at_key >= threshold)
        tl.store(kept_from + plane * query_blocks + block, high, mask=exists)
