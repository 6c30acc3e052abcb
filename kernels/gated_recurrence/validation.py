"""Argument checks of the gated recurrence: each raises ValueError with one line, what was given and what is needed."""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.gated_recurrence.forms import CONSTANT, PER_CHANNEL, PER_HEAD

GATES = (*PER_CHANNEL, *PER_HEAD, *CONSTANT)
FEATURE_MAPS = ("softmax", "none")
"""Gates and feature maps of `liger_step`."""


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
    """Check shapes, dtypes and devices of the arguments of `gated_recurrence`."""
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
    """Check shapes, dtypes and devices of the arguments of `gated_recurrence_step`."""
    _check_inputs(q, k, (("v", v),))
    _check_log_decay(log_decay, k, v, decay_axis)
    _check_bonus(bonus, q)
    _check_state_in_place(state, q, k, v)


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
    """Check shapes, dtypes and devices of the arguments of `gated_slot_attention`."""
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


def check_liger_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cosine: Tensor,
    sine: Tensor,
    state: Tensor,
    gate_shift: Tensor | None,
    *,
    gate: str,
    temperature: float,
    feature_map: str,
) -> None:
    """Check the arguments of `liger_step` except the rings and the vectors."""
    for name, given, known in (("gate", gate, GATES), ("feature_map", feature_map, FEATURE_MAPS)):
        if given not in known:
            raise ValueError(f"{name}={given!r} is not known: give one of {', '.join(known)}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: log gates are divided by it, give a number above 0")
    _check_inputs(q, k, (("v", v),))
    _check_one_token(q)
    if v.shape[3] != q.shape[3]:
        raise ValueError(f"q and k have head_dim {q.shape[3]} but v has {v.shape[3]}; they must agree")
    _check_state_in_place(state, q, k, v)
    _check_tables(q, cosine, sine)
    if gate_shift is None:
        return
    if gate in CONSTANT:
        raise ValueError(f"gate_shift is given, but gate={gate!r} has no logits that it could be added to")
    heads = k.shape[2]
    if tuple(gate_shift.shape) != (heads,) or not gate_shift.dtype.is_floating_point or gate_shift.device != q.device:
        raise ValueError(
            f"gate_shift is {gate_shift.dtype} of shape {list(gate_shift.shape)} on {gate_shift.device}; it must be a "
            f"floating-point tensor [heads of k], [{heads}], on {q.device}"
        )


def check_window(q: Tensor, v: Tensor, q_window: Tensor, k_window: Tensor) -> None:
    """Check the queries and keys of a step's window."""
    _check_one_token(q)
    for name, x, heads in (("q_window", q_window, q.shape[2]), ("k_window", k_window, v.shape[2])):
        if tuple(x.shape) != (q.shape[0], 1, heads, v.shape[3]):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be {[q.shape[0], 1, heads, v.shape[3]]}")
        _check_is_like(name, x, q)


def check_ring(q: Tensor, v: Tensor, ring_keys: Tensor, ring_values: Tensor, sinks: int) -> None:
    """Check the ring of keys and values of a step's window."""
    for name, x in (("ring_keys", ring_keys), ("ring_values", ring_values)):
        slots = x.shape[1] if x.ndim == 4 else 0
        if tuple(x.shape) != (q.shape[0], slots, *v.shape[2:]) or slots <= sinks or slots != ring_keys.shape[1]:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; it must be [batch, sinks + window, heads, head_dim] = "
                f"[{q.shape[0]}, {sinks} + window, {v.shape[2]}, {v.shape[3]}], with a window of 1 or more"
            )
        _check_is_in_place(name, x)
        _check_is_like(name, x, q)


def check_late_keys(late_keys: Tensor | None, k: Tensor, window: int) -> None:
    """Check the ring of keys that enter a late state."""
    if late_keys is None:
        return
    shape = (k.shape[0], window + 1, *k.shape[2:])
    if tuple(late_keys.shape) != shape:
        raise ValueError(
            f"late_keys has shape {list(late_keys.shape)}; it must be [batch, window + 1, heads of k, head_dim], "
            f"{list(shape)}"
        )
    _check_is_in_place("late_keys", late_keys)
    _check_is_like("late_keys", late_keys, k)


def check_step_vectors(
    q: Tensor, tokens: Tensor, kv_start: Tensor | None, state_weight: Tensor, window_weight: Tensor
) -> None:
    """Check the small tensors of a step with a window."""
    wide = torch.promote_types(q.dtype, torch.float32)
    expected = (
        ("tokens", tokens, torch.int32, 1),
        ("kv_start", kv_start, torch.int32, q.shape[0]),
        ("state_weight", state_weight, wide, q.shape[2]),
        ("window_weight", window_weight, wide, q.shape[2]),
    )
    for name, x, dtype, size in expected:
        if x is not None and (tuple(x.shape) != (size,) or x.dtype != dtype or x.device != q.device):
            raise ValueError(
                f"{name} is {x.dtype} of shape {list(x.shape)} on {x.device}; it must be {dtype} [{size}] on {q.device}"
            )


def _check_one_token(q: Tensor) -> None:
    if q.shape[1] != 1:
        raise ValueError(f"q has {q.shape[1]} tokens; a step with a window takes one for each row")


def _check_is_in_place(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {list(x.stride())}; it is written in place and must be contiguous")


def _check_is_like(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; they must agree")


def _check_tables(q: Tensor, cosine: Tensor, sine: Tensor) -> None:
    batch, dim = q.shape[0], q.shape[3]
    for name, x in (("cosine", cosine), ("sine", sine)):
        width = x.shape[2] if x.ndim == 3 else 0
        rows = x.shape[0] if x.ndim else 0
        fits = tuple(x.shape) == (rows, 1, width) and (rows == 1 or rows == batch)
        if not fits or not 0 < width <= dim or width % 2:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; it must be [batch or 1, 1, R], {batch} rows or 1, of an even "
                f"number R of channels, {dim} or fewer"
            )
        if x.shape != cosine.shape or not x.dtype.is_floating_point or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} of shape {list(x.shape)} on {x.device}; cosine and sine must be floating-point "
                f"tensors of one shape on {q.device}"
            )


def _check_inputs(q: Tensor, k: Tensor, others: tuple[tuple[str, Tensor], ...]) -> None:
    """Check q, k and others: v and slots by name, which need k's batch, time and heads."""
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
    """Check log_decay; decay_axis is "key", "value", or "slots", where both k and v are the slots."""
    if decay_axis not in ("key", "value", "slots"):
        raise ValueError(f'decay_axis={decay_axis!r}: the axis of the state that decays is "key" or "value"')
    per_head = tuple(k.shape[:3])
    channels = (v if decay_axis == "value" else k).shape[3]
    # Two comparisons: torch.compile evaluates a single `in` as false for dynamic sizes.
    if tuple(log_decay.shape) != per_head and tuple(log_decay.shape) != (*per_head, channels):
        raise ValueError(
            f"log_decay has shape {list(log_decay.shape)}; it must be [batch, time, heads of k] {list(per_head)}, or "
            f"{[*per_head, channels]} for each {'slot' if decay_axis == 'slots' else f'{decay_axis} channel'}"
        )
    if log_decay.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_decay is {log_decay.dtype}; sums over time need float32 or float64: compute log_decay in float32"
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


def _check_state_in_place(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_state(state, "state", q.shape[0], k, v)
    _check_is_in_place("state", state)


def _check_memory_budget(memory_budget: int | None) -> None:
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget={memory_budget}: bytes for the backward pass must be 0 or more, or None")


def check_values(log_decay: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check values, on the CPU only: on other devices, reading them forces a synchronization."""
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
