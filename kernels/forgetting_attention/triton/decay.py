"""The decay along each sequence, and the first key that each query sees, computed in Triton.

Sums of log gates grow with the length, but scores need their small differences, so each sum has two parts, both in
base 2 and both without the closed gates:

    c_j = base[j // CHUNK] + local[j]        base float64, local float32 from the start of its chunk of 128 keys

For float32 queries local is float64 too: one gate of -300 in a chunk puts a float32 sum off by 3e-5.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.forgetting_attention.reference import CLOSED_GATE
from kernels.rounding import cdiv

CHUNK = 128
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Decay:
    """`local` [B, Hq, chunks * CHUNK] float32 (float64 for float32 queries) and `base` [B, Hq, chunks] float64."""

    local: Tensor
    base: Tensor


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
    *,
    exact: bool = False,
) -> tuple[Decay | None, Tensor | None]:
    """Return the decay (None without gates), and `first` of `Ranges` (None if only causality hides keys).

    Args:
        exact: keep `local` in float64.
    """
    if log_forget is None and kv_start is None and cu_seqlens is None and window is None:
        return None, None
    heads = 1 if log_forget is None else log_forget.shape[2]
    chunks = cdiv(num_keys, CHUNK)
    first = torch.empty(batch, heads, chunks * CHUNK, dtype=torch.int32, device=device)
    decay = None
    if log_forget is not None:
        base = torch.empty(batch, heads, chunks, dtype=torch.float64, device=device)
        local = torch.float64 if exact else torch.float32
        decay = Decay(torch.empty(batch, heads, chunks * CHUNK, dtype=local, device=device), base)
    gates = first if log_forget is None else log_forget
    _sum_gates[(heads, batch)](
        gates,
        *((first, first) if decay is None else (decay.local, decay.base)),
        first,
        kv_start,
        kv_end,
        cu_seqlens,
        *_documents(cu_seqlens),
        # A larger window hides no more keys, and from 2^31 on it would be 64 bits wide, which recompiles the kernel.
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
    """Return the number of documents, and the number of steps of a binary search among their bounds."""
    bounds = 1 if cu_seqlens is None else cu_seqlens.shape[0]
    return bounds - 1, bounds.bit_length()


@triton.jit
def exact_at(local, base, position, mask, CHUNK: tl.constexpr):
    """c at positions of one head, float64; 0 outside of the mask."""
    whole = tl.load(base + position // CHUNK, mask=mask, other=0.0)
    return whole + tl.load(local + position, mask=mask, other=0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def halve(holds_at, fails_at, middle, holds):
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
        low, high = halve(low, high, middle, tl.load(cu_seqlens + middle) <= position)
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
                # A chunk may start before the row's first key or after its last, where the sum is arbitrary.
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
                # Closed gates of earlier chunks only; `within` covers those of the chunk itself.
                earlier = tl.where(chunk[:, None] > chunk[None, :], before[None, :], closed_at)
                first = tl.maximum(first, tl.maximum(within, tl.max(earlier, 1)[:, None]))
                closed_at = tl.max(before, 0)
            tl.store(base_out + plane * num_chunks + chunk, base, mask=chunk < num_chunks)
            local = local.to(local_out.dtype.element_ty)
            tl.store(local_out + plane * num_chunks * CHUNK + position, local, mask=inside)
        tl.store(first_out + plane * num_chunks * CHUNK + position, first, mask=inside)


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
    """Return the gradient of log_forget [B, S, Hq], in its dtype, from sums of the gradients of the scores.

    Args:
        grad_keys: [B, Hq, S padded] float32, minus the sum over each key's scores.
        grad_queries: [B, Hq, T / queries_together, parts] float32, the sum over the scores of each group of
            queries_together queries, as any number of partial sums.
    """
    batch, num_keys, heads = log_forget.shape
    grad = torch.empty_like(log_forget)
    _gradient_of_gates[(heads, batch)](
        log_forget, grad_keys, grad_queries, grad, kv_start, kv_end, cu_seqlens, *_documents(cu_seqlens), num_queries,
        num_keys, grad_keys.shape[2], grad_queries.shape[2] * grad_queries.shape[3], *log_forget.stride(),
        *grad.stride(),
        CUMULATIVE=cumulative, CLOSED=CLOSED_GATE, TOGETHER=queries_together, PARTS=grad_queries.shape[3], BLOCK=2048,
        num_warps=8,
    )  # fmt: skip
    return grad


def give_rows_their_own(
    grad_keys: Tensor, grad_queries: Tensor, grad_lse: Tensor, lse: Tensor, num_keys: int, together: int
) -> None:
    """Move dlse, the sum of each row of dS, from the groups' sums to each query's own entry, in place.

    A group's sum is divided evenly among its queries, which suits rounding errors but not dlse.
    """
    num_queries, rows = grad_lse.shape[1], lse.shape[2]
    own = torch.where(lse[..., :num_queries] < torch.inf, grad_lse.mT, 0.0)
    grad_keys[..., num_keys - num_queries : num_keys] += own
    of_groups = F.pad(own, (0, rows - num_queries)).unflatten(-1, (-1, together)).sum(-1)
    grad_queries[..., 0] -= of_groups[..., : grad_queries.shape[2]]


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
        # Rows of dS sum to 0 only in exact arithmetic. A group's sum, divided evenly, cancels the columns' errors.
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
