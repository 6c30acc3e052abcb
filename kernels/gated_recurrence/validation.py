"""What the gated recurrence refuses, each in one line that says what was given and what is needed."""

from itertools import pairwise

import torch
from torch import Tensor


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    decay_axis: str,
    bonus: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    memory_budget: int | None,
) -> None:
    """Everything about `gated_recurrence` that shapes, dtypes and devices tell. Raises ValueError."""
    _check_inputs(q, k, (("v", v),))
    _check_log_decay(log_decay, k, v, decay_axis)
    _check_bonus(bonus, q)
    _check_cu_seqlens(cu_seqlens, q)
    if initial_state is not None:
        _check_state(initial_state, "initial_state", _num_states(q, cu_seqlens), k, v)
    _check_memory_budget(memory_budget)


def check_step_arguments(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, decay_axis: str, bonus: Tensor | None
) -> None:
    """Everything about `gated_recurrence_step` that shapes, dtypes and devices tell. Raises ValueError."""
    _check_inputs(q, k, (("v", v),))
    _check_log_decay(log_decay, k, v, decay_axis)
    _check_bonus(bonus, q)
    _check_state(state, "state", q.shape[0], k, v)
    if not state.is_contiguous():
        raise ValueError(f"state has strides {list(state.stride())}; it is written in place and must be contiguous")


def check_slot_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    memory_budget: int | None,
) -> None:
    """Everything about `gated_slot_attention` that shapes, dtypes and devices tell. Raises ValueError."""
    _check_inputs(q, k, (("v", v), ("slots", slots)))
    if slots.shape[2] != k.shape[2]:
        raise ValueError(f"slots has {slots.shape[2]} heads but k has {k.shape[2]}; they must agree")
    _check_log_decay(log_decay, slots, slots, "slots")
    _check_cu_seqlens(cu_seqlens, q)
    if initial_state is not None:
        if isinstance(initial_state, Tensor) or len(initial_state) != 2:
            raise ValueError("initial_state must be two tensors: the states of keys and of values")
        rows = _num_states(q, cu_seqlens)
        _check_state(initial_state[0], "initial_state[0]", rows, k, slots)
        _check_state(initial_state[1], "initial_state[1]", rows, slots, v)
    _check_memory_budget(memory_budget)


def _check_inputs(q: Tensor, k: Tensor, others: tuple[tuple[str, Tensor], ...]) -> None:
    """others: v and slots, by name, which have k's batch, time and heads."""
    for name, x in (("q", q), ("k", k), *others):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, time, heads, head_dim]")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"{name} has shape {list(x.shape)}; it needs at least one head and one channel")
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            raise ValueError(f"{name} is {x.dtype}; it must be float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; they must agree")
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(f"q has shape {list(q.shape)}, {name} {list(x.shape)}; batch and time must agree")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}; they must agree")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which do not divide the {q.shape[2]} heads of q")
    if others[0][1].shape[2] != k.shape[2]:
        raise ValueError(
            f"v has {others[0][1].shape[2]} heads but k has {k.shape[2]}; they share states and must agree"
        )


def _check_log_decay(log_decay: Tensor, k: Tensor, v: Tensor, decay_axis: str) -> None:
    """decay_axis: "key", "value", or "slots", which both k and v stand for then."""
    if decay_axis not in ("key", "value", "slots"):
        raise ValueError(f'decay_axis={decay_axis!r}: the axis of the state that decays is "key" or "value"')
    per_head = tuple(k.shape[:3])
    channels = (v if decay_axis == "value" else k).shape[3]
    if tuple(log_decay.shape) not in (per_head, (*per_head, channels)):
        raise ValueError(
            f"log_decay has shape {list(log_decay.shape)}; it must be [batch, time, heads of k] {list(per_head)}, or "
            f"{[*per_head, channels]} for each {'slot' if decay_axis == 'slots' else f'{decay_axis} channel'}"
        )
    if log_decay.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_decay is {log_decay.dtype}; sums over time need float32 or float64: compute gates from float32 logits"
        )
    if log_decay.device != k.device:
        raise ValueError(f"log_decay is on {log_decay.device} but q is on {k.device}; they must agree")


def _check_bonus(bonus: Tensor | None, q: Tensor) -> None:
    if bonus is None:
        return
    if bonus.shape != q.shape[2:] or not bonus.dtype.is_floating_point:
        raise ValueError(
            f"bonus is {bonus.dtype} of shape {list(bonus.shape)}; it must be a floating-point tensor "
            f"[heads of q, head_dim], {list(q.shape[2:])}"
        )
    if bonus.device != q.device:
        raise ValueError(f"bonus is on {bonus.device} but q is on {q.device}; they must agree")


def _check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor) -> None:
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}; it must be int32 with one axis"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} but q is on {q.device}; they must agree")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens was given with batch {q.shape[0]}; packed documents need batch 1")
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has {cu_seqlens.shape[0]} entries; N documents need N + 1, at least 2")


def _num_states(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _check_state(state: Tensor, name: str, rows: int, k: Tensor, v: Tensor) -> None:
    shape, dtype = (rows, k.shape[2], k.shape[3], v.shape[3]), torch.promote_types(k.dtype, torch.float32)
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} has shape {list(state.shape)}; a state for each row or document is {list(shape)}")
    if state.dtype != dtype or state.device != k.device:
        raise ValueError(
            f"{name} is {state.dtype} on {state.device}; with {k.dtype} inputs on {k.device} it must be {dtype} there"
        )


def _check_memory_budget(memory_budget: int | None) -> None:
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget={memory_budget}: bytes for the backward pass must be 0 or more, or None")


def check_values(log_decay: Tensor, cu_seqlens: Tensor | None) -> None:
    """What only the numbers tell. On the CPU alone: elsewhere, reading them waits for the device. Raises ValueError."""
    if log_decay.device.type != "cpu":
        return
    if log_decay.numel() and not log_decay.max() <= 0:
        raise ValueError(f"log_decay holds {log_decay.max():.4g}; the log of a gate in [0, 1] is 0 or less")
    if cu_seqlens is not None:
        bounds, length = cu_seqlens.tolist(), log_decay.shape[1]
        if bounds[0] != 0 or bounds[-1] != length:
            raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to {length}")
        decreases = [entry for entry, (begin, end) in enumerate(pairwise(bounds), 1) if end < begin]
        if decreases:
            raise ValueError(f"cu_seqlens decreases at entry {decreases[0]}; it must never decrease")
