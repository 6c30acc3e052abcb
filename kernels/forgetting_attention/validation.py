"""Argument checks of forgetting attention. Each error is one line: what was given and what is needed."""

from itertools import pairwise

import torch
from torch import Tensor


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    *,
    window: int | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    cumulative: bool,
    prune: float | None,
    logit_bound: float | Tensor | None,
) -> None:
    """Check shapes, dtypes, devices and Python numbers.

    Raises:
        ValueError: an argument does not fit.
    """
    check_qkv(q, k, v)
    batch, num_queries, num_heads, _ = q.shape
    num_keys = k.shape[1]
    if log_forget is not None:
        _check_log_forget(log_forget, q, (batch, num_keys, num_heads))
    elif cumulative:
        raise ValueError("cumulative=True says what log_forget holds, but log_forget is None; give log_forget")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a query sees at least its own key; window must be 1 or more, or None")
    _check_index(cu_seqlens, "cu_seqlens", q)
    check_bounds(q, kv_start, kv_end)
    if cu_seqlens is not None:
        if kv_start is not None or kv_end is not None:
            raise ValueError("cu_seqlens was given with kv_start or kv_end; packed documents have no padding: give one")
        if batch != 1 or num_queries != num_keys:
            raise ValueError(
                f"cu_seqlens was given with batch {batch}, {num_queries} queries and {num_keys} keys; "
                "packed documents need batch 1 and as many queries as keys"
            )
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens has {cu_seqlens.shape[0]} entries; N documents need N + 1, at least 2")
    _check_prune(prune, logit_bound, log_forget, num_heads, q)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that queries, keys and values fit each other.

    Raises:
        ValueError: they do not.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, time, heads, head_dim]")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"{name} has shape {list(x.shape)}; it needs at least one head and one channel")
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            raise ValueError(f"{name} is {x.dtype}; it must be float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; they must agree")
    if k.shape[0] != q.shape[0] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: batch, and time of k and v, must agree"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}; they must agree")
    for name, x in (("k", k), ("v", v)):
        if q.shape[2] % x.shape[2]:
            raise ValueError(f"{name} has {x.shape[2]} heads, which do not divide the {q.shape[2]} heads of q")
    if k.shape[1] < q.shape[1]:
        raise ValueError(
            f"{q.shape[1]} queries but {k.shape[1]} keys; queries are the last of the keys: give as many keys or more"
        )


def check_bounds(q: Tensor, kv_start: Tensor | None, kv_end: Tensor | None) -> None:
    """Check that the bounds of the keys in use are int32 with one entry for each batch row.

    Raises:
        ValueError: they are not.
    """
    for name, bound in (("kv_start", kv_start), ("kv_end", kv_end)):
        _check_index(bound, name, q)
        if bound is not None and bound.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} has {bound.shape[0]} entries; it needs one for each of the {q.shape[0]} batch rows"
            )


def _check_log_forget(log_forget: Tensor, q: Tensor, shape: tuple[int, int, int]) -> None:
    if tuple(log_forget.shape) != shape:
        raise ValueError(f"log_forget has shape {list(log_forget.shape)}; [batch, keys, heads of q] is {list(shape)}")
    if log_forget.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_forget is {log_forget.dtype}; long sums need float32 or float64: apply logsigmoid to float32 logits"
        )
    if log_forget.device != q.device:
        raise ValueError(f"log_forget is on {log_forget.device} but q is on {q.device}; they must agree")


def _check_index(index: Tensor | None, name: str, q: Tensor) -> None:
    if index is None:
        return
    if index.ndim != 1 or index.dtype != torch.int32:
        raise ValueError(f"{name} is {index.dtype} of shape {list(index.shape)}; it must be int32 with one axis")
    if index.device != q.device:
        raise ValueError(f"{name} is on {index.device} but q is on {q.device}; they must agree")


def _check_prune(
    prune: float | None, logit_bound: float | Tensor | None, log_forget: Tensor | None, num_heads: int, q: Tensor
) -> None:
    if prune is None:
        if logit_bound is not None:
            raise ValueError("logit_bound was given without prune, which alone uses it; give prune, or leave it out")
        return
    if log_forget is None:
        raise ValueError("prune was given without log_forget; only keys that decay can be pruned")
    if not prune <= 0:
        raise ValueError(f"prune={prune}: it is the natural log of the mass that may be lost, so it must be 0 or less")
    if isinstance(logit_bound, Tensor):
        if tuple(logit_bound.shape) != (num_heads,) or logit_bound.device != q.device:
            raise ValueError(
                f"logit_bound has shape {list(logit_bound.shape)} on {logit_bound.device}; it must be a number or "
                f"[{num_heads}] on {q.device}"
            )
    elif logit_bound is not None and not logit_bound >= 0:
        raise ValueError(f"logit_bound={logit_bound}: it bounds |scale q.k| from above, so it must be 0 or more")


def check_values(
    q: Tensor,
    k: Tensor,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    cumulative: bool,
) -> None:
    """Check the values in tensors, on the CPU only: on other devices reading them would synchronize.

    Raises:
        ValueError: a value is out of range.
    """
    if q.device.type != "cpu":
        return
    num_queries, num_keys = q.shape[1], k.shape[1]
    if log_forget is not None and log_forget.numel():
        if not cumulative and log_forget.max() > 0:
            raise ValueError(f"log_forget holds {log_forget.max():.4g}; the log of a gate in [0, 1] is 0 or less")
        if cumulative and log_forget.min() == -torch.inf:
            raise ValueError(
                "log_forget holds -inf with cumulative=True; a sum does not come back from it: keep it finite"
            )
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_keys:
            raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to {num_keys}")
        if any(end < begin for begin, end in pairwise(bounds)):
            raise ValueError(f"cu_seqlens decreases at entry {_first_decrease(bounds)}; it must never decrease")
    starts = kv_start.tolist() if kv_start is not None else [0] * q.shape[0]
    ends = kv_end.tolist() if kv_end is not None else [num_keys] * q.shape[0]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not num_queries <= end <= num_keys:
            raise ValueError(f"kv_end[{row}] is {end}; it must lie between {num_queries} queries and {num_keys} keys")
        if not 0 <= start <= end:
            raise ValueError(f"kv_start[{row}] is {start}; it must lie between 0 and the end of its row's keys, {end}")


def _first_decrease(bounds: list[int]) -> int:
    return next(index for index in range(1, len(bounds)) if bounds[index] < bounds[index - 1])
