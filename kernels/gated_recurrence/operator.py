"""The gated recurrence by the Triton kernels, as operations registered with torch.compile and autograd.

A gate per value channel is the same computation with exchanged roles: the state is stored transposed, so that its first
axis decays. With x, y (which decay), z and w as in the kernel files:

    key axis     forward: scores of q, k; out by the scan            backward: dv by the scan; dq, dk by gradients
    value axis   forward: states by the scan; out by gradients       backward: scores of dout, v; dq, dk by the two
                                                                     scans; dv by gradients
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gated_recurrence.hopper.backward_per_head import backward_in_one_scan
from kernels.gated_recurrence.hopper.forward_per_head import forward_in_one_scan
from kernels.gated_recurrence.hopper.per_head import supports
from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.gradients import gradients
from kernels.gated_recurrence.triton.gradients_per_head import gate_gradients, gradients_per_head
from kernels.gated_recurrence.triton.per_head import (
    backward_scan,
    forward_scan,
    joined_states,
    segment_per_head,
    sum_gates,
)
from kernels.gated_recurrence.triton.plan import LEAST_SEGMENT, make_plan
from kernels.gated_recurrence.triton.scan import scan
from kernels.gated_recurrence.triton.scores import Chunks, decay_chunks, padded, stored_dtype
from kernels.launching import compiled_side_by_side
from kernels.operation import empty_gradients, register_operation
from kernels.rounding import cdiv

# Target number of programs of a scan; sequences are cut into segments to reach it.
SCAN_PROGRAMS = 96
# Widest decaying axis: each program's state holds all of it.
MOST_CHANNELS = 256


def _segment(batch: int, length: int, heads: int, width_e: int, packed: bool) -> int:
    """Return the tokens per segment: the whole sequence if the scan has enough programs without cutting."""
    programs = batch * heads * cdiv(width_e, 64)
    whole = cdiv(length, CHUNK) * CHUNK
    if programs >= SCAN_PROGRAMS and not packed:
        return whole
    wanted = cdiv(length * programs, 2 * SCAN_PROGRAMS * CHUNK) * CHUNK
    return min(max(wanted, LEAST_SEGMENT), whole)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _segment_of(k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> int:
    if log_decay.ndim == 3:
        return segment_per_head(k, v)
    batch, length, heads, _ = k.shape
    return _segment(batch, length, heads, min(k.shape[3], v.shape[3]), cu_seqlens is not None)


def _kernels_ready(q: Tensor, k: Tensor, v: Tensor, per_head: bool, *options) -> contextlib.AbstractContextManager:
    """Return a context in which kernels for gates per channel compile in parallel, because some take seconds.

    options: what the kernels depend on besides devices, widths and dtypes.
    """
    if per_head or not q.is_cuda:
        return contextlib.nullcontext()
    return compiled_side_by_side((q.device, q.dtype, k.dtype, q.shape[2:], k.shape[2:], v.shape[2:], *options))


def _state_in(state: Tensor | None, by_value: bool) -> Tensor | None:
    """Rearrange [N, H, Dk, Dv] to [N, H, D as stored, E], with the decaying axis first."""
    if state is None:
        return None
    state = state.mT if by_value else state
    missing = padded(state.shape[2]) - state.shape[2]
    return F.pad(state, (0, 0, 0, missing)) if missing else state


def _state_out(state: Tensor, width: int, by_value: bool) -> Tensor:
    state = state[:, :, :width]
    return (state.mT if by_value else state).contiguous()


def _kept_shapes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, by_value: bool):
    """Return (shape, dtype) of decayed q, k, scores, totals, middles, levels and states, that `_recurrence` saves."""
    batch, length, heads, _ = k.shape
    y, z = (v, k) if by_value else (k, v)
    chunks = batch * cdiv(length, CHUNK) if cu_seqlens is None else _packed_chunks(length, cu_seqlens)
    width, dtype = padded(y.shape[3]), stored_dtype(k.dtype)
    if log_decay.ndim == 3:
        none = (0, 0), dtype
        sums = (chunks, heads, CHUNK), torch.float32 if dtype == torch.bfloat16 else torch.float64
        return none, none, none, sums, none, none, ((chunks, heads, width, z.shape[3]), dtype)
    x = () if by_value else (q.shape[2],)
    return (
        ((chunks, *x, CHUNK, width) if x else (0, 0), dtype),
        ((chunks, heads, CHUNK, width), dtype),
        ((chunks, *x, CHUNK, CHUNK) if x else (0, 0), dtype),
        ((chunks, heads, width), torch.float32),
        ((chunks, heads, width), torch.float32),
        ((chunks, heads), torch.int32),
        ((chunks, heads, width, z.shape[3]), dtype),
    )


def _packed_chunks(length: int, cu_seqlens: Tensor) -> int:
    return cdiv(length, CHUNK) + cu_seqlens.shape[0] - 1


def _keeps(q, k, v, log_decay, cu_seqlens, by_value: bool, memory_budget: int | None) -> bool:
    """Return whether the intermediates for the backward pass fit into the budget.

    Without a budget, only the widths of a chunk decide: kernels must not change with lengths and layouts.
    """
    shapes = _kept_shapes(q, k, v, log_decay, cu_seqlens, by_value)
    kept = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in shapes)
    if memory_budget is None:
        return bool(kept <= 2 * CHUNK * sum(math.prod(x.shape[2:]) * x.element_size() for x in (q, k, v, log_decay)))
    return bool(kept * shapes[-1][0][0] <= memory_budget)


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_axis: str,
    scale: float,
    memory_budget: int | None,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `gated_recurrence`; q may also be float32 with any dtype of k and v. wide: out in float32.

    Returns:
        out, final_state, and the intermediates for the backward pass: decayed q, decayed k, scores, totals, middles,
        levels and states of the chunks; empty where they are recomputed.
    """
    by_value = decay_axis == "value" and log_decay.ndim == 4
    if not k.numel() or not v.numel() or not q.numel():
        results = _empty_results(q, k, v, log_decay, cu_seqlens, by_value, memory_budget, wide)
        results[1].zero_() if initial_state is None else results[1].copy_(initial_state)
        return results
    widest = v.shape[3] if by_value else k.shape[3]
    if widest > MOST_CHANNELS:
        raise ValueError(
            f"{'v' if by_value else 'k'} has {widest} channels that decay; "
            f"the Triton kernels take {MOST_CHANNELS} at most"
        )
    q, k, v, log_decay = (_readable(x) for x in (q, k, v, log_decay.float()))
    keeps = _keeps(q, k, v, log_decay, cu_seqlens, by_value, memory_budget)
    heads = k.shape[2]
    per_head = log_decay.ndim == 3
    if per_head:
        q = q.to(k.dtype)
    segment = _segment_of(k, v, log_decay, cu_seqlens)
    options = "forward", decay_axis, keeps, wide, initial_state is None, segment < k.shape[1]
    with torch.cuda.device_of(q), _kernels_ready(q, k, v, per_head, *options):
        plan = make_plan(*k.shape[:2], cu_seqlens, segment, k.device)
        start = _state_in(initial_state, by_value)
        if per_head:
            before = sum_gates(log_decay, plan, q.dtype)
            if supports(q, k, v):
                start = joined_states(k, v, before, plan, start, 1.0, backward=False)
                out, states, end = forward_in_one_scan(q, k, v, before, plan, start, scale, states=keeps)
            else:
                out, states, end = forward_scan(q, k, v, before, plan, start, scale, states=keeps)
            kept = None, None, None, before, None, None, states
        elif by_value:
            chunks = decay_chunks(None, v, log_decay, plan, scale)
            _, states, end = scan(chunks, k, plan, start, heads=heads, out=False)
            dtype = torch.float32 if wide else v.dtype
            out, _, _ = gradients(chunks, None, v, k, q, log_decay, states, None, plan, scale, dx_dtype=dtype)
        else:
            chunks = decay_chunks(q, k, log_decay, plan, scale)
            out, states, end = scan(chunks, v, plan, start, heads=heads, states=keeps)
    final = _state_out(end, v.shape[3] if by_value else k.shape[3], by_value)
    if not per_head:
        kept = chunks.x, chunks.y, chunks.scores, chunks.total, chunks.middle, chunks.levels, states
    shapes = _kept_shapes(q, k, v, log_decay, cu_seqlens, by_value)
    kept = (
        x if keeps and x is not None else q.new_empty(shape if keeps else 0, dtype=dtype)
        for x, (shape, dtype) in zip(kept, shapes, strict=True)
    )
    return out.float() if wide else out, final, *kept


def _empty_results(
    q, k, v, log_decay, cu_seqlens, by_value: bool, memory_budget: int | None, wide: bool
) -> tuple[Tensor, ...]:
    """Return uninitialized results of `_recurrence`, with their shapes and dtypes."""
    batch, _, heads, key_dim = k.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    keeps = _keeps(q, k, v, log_decay, cu_seqlens, by_value, memory_budget)
    return (
        q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32 if wide else v.dtype),
        q.new_empty(sequences, heads, key_dim, v.shape[3], dtype=torch.float32),
        *(
            q.new_empty(shape if keeps else 0, dtype=dtype)
            for shape, dtype in _kept_shapes(q, k, v, log_decay, cu_seqlens, by_value)
        ),
    )


def _fake_recurrence(q, k, v, log_decay, initial_state, cu_seqlens, decay_axis, scale, memory_budget, wide=False):
    by_value = decay_axis == "value" and log_decay.ndim == 4
    return _empty_results(q, k, v, log_decay, cu_seqlens, by_value, memory_budget, wide)


def _recurrence_backward(
    grad_out: Tensor | None,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decayed_q: Tensor,
    decayed_k: Tensor,
    scores: Tensor,
    total: Tensor,
    middle: Tensor,
    levels: Tensor,
    states: Tensor,
    decay_axis: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v, log_decay and initial_state in their dtypes; the last is empty if it is None."""
    by_value = decay_axis == "value" and log_decay.ndim == 4
    if not k.numel() or not v.numel() or not q.numel():
        grads = tuple(x.zero_() for x in empty_gradients(q, k, v, log_decay, initial_state))
        if initial_state is not None and grad_final is not None:
            grads[4].copy_(grad_final)
        return grads
    if grad_out is None:
        grad_out = v.new_zeros(*q.shape[:3], v.shape[3])
    per_head = log_decay.ndim == 3
    gate_dtype, q_dtype = log_decay.dtype, q.dtype
    # grad_out and q stay float32 only for kernels that round derived values, not these inputs.
    if not by_value:
        grad_out = grad_out.to(v.dtype)
    if per_head:
        q = q.to(k.dtype)
    q, k, v, log_decay, grad_out = (_readable(x) for x in (q, k, v, log_decay.float(), grad_out))
    heads = k.shape[2]
    wants_start, kept = initial_state is not None, states if states.numel() else None
    segment = _segment_of(k, v, log_decay, cu_seqlens)
    options = "backward", decay_axis, kept is None, wants_start, grad_final is None, segment < k.shape[1]
    with torch.cuda.device_of(q), _kernels_ready(q, k, v, per_head, *options):
        plan = make_plan(*k.shape[:2], cu_seqlens, segment, k.device)
        start, grad_end = _state_in(initial_state, by_value), _state_in(grad_final, by_value)
        if per_head:
            before = total if states.numel() else sum_gates(log_decay, plan, q.dtype)
            if not states.numel():
                _, states, _ = forward_scan(q, k, v, before, plan, start, scale, out=False, end=False)
            if supports(q, k, v):
                grad_end = joined_states(q, grad_out, before, plan, grad_end, scale, backward=True)
                dq, dk, dv, of_gates, grad_start = backward_in_one_scan(
                    q, k, v, grad_out, before, states, plan, grad_end, scale, wants_start
                )
                grad_gates = gate_gradients(*of_gates, log_decay, plan)
            else:
                dv, grad_states, grad_start = backward_scan(
                    q, k, grad_out, before, plan, grad_end, scale, end=wants_start
                )
                dq, dk, grad_gates = gradients_per_head(
                    q, k, v, grad_out, log_decay, before, states, grad_states, plan, scale
                )
        elif by_value:
            chunks = decay_chunks(grad_out, v, log_decay, plan, scale)
            dq, again, _ = scan(chunks, k, plan, start, heads=heads, states=kept is None, end=False)
            states = again if kept is None else kept
            dk, grad_states, grad_start = scan(chunks, q, plan, grad_end, backward=True, heads=heads, end=wants_start)
            _, dv, grad_gates = gradients(chunks, grad_out, v, k, q, log_decay, states, grad_states, plan, scale)
        else:
            if states.numel():
                chunks = Chunks(decayed_q, decayed_k, scores, total, middle, levels)
            else:
                chunks = decay_chunks(q, k, log_decay, plan, scale)
                _, states, _ = scan(chunks, v, plan, start, heads=heads, out=False, end=False)
            dv, grad_states, grad_start = scan(
                chunks, grad_out, plan, grad_end, backward=True, heads=heads, end=wants_start
            )
            dq, dk, grad_gates = gradients(
                chunks, q, k, v, grad_out, log_decay, states, grad_states, plan, scale, dx_dtype=q_dtype
            )
    width = v.shape[3] if by_value else k.shape[3]
    grad_initial = _state_out(grad_start, width, by_value).to(initial_state.dtype) if wants_start else q.new_empty(0)
    return dq.to(q_dtype), dk, dv, grad_gates.to(gate_dtype), grad_initial


def _fake_recurrence_backward(grad_out, grad_final, q, k, v, log_decay, initial_state, *rest):
    return empty_gradients(q, k, v, log_decay, initial_state)


def _save(ctx, inputs, output):
    q, k, v, log_decay, initial_state, cu_seqlens, ctx.decay_axis, ctx.scale, *_ = inputs
    ctx.mark_non_differentiable(*output[2:])
    # Otherwise autograd materializes zero gradients for unused outputs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_decay, initial_state, cu_seqlens, *output[2:])


def _differentiate(ctx, grad_out, grad_final, *_):
    grads = triton_recurrence_backward(grad_out, grad_final, *ctx.saved_tensors, ctx.decay_axis, ctx.scale)
    grad_initial = grads[4] if ctx.needs_input_grad[4] else None
    return *grads[:4], grad_initial, *(None,) * 5


triton_recurrence = register_operation("gated_recurrence_triton", _recurrence, _fake_recurrence)
triton_recurrence_backward = register_operation(
    "gated_recurrence_triton_backward", _recurrence_backward, _fake_recurrence_backward
)
torch.library.register_autograd("palimpsest::gated_recurrence_triton", _differentiate, setup_context=_save)
