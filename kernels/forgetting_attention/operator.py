"""Forgetting attention in Triton, registered as operations for torch.compile and autograd."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forgetting_attention.hopper import backward as hopper_backward
from kernels.forgetting_attention.hopper import forward as hopper_forward
from kernels.forgetting_attention.hopper.tiles import supports
from kernels.forgetting_attention.triton import backward as triton_backward
from kernels.forgetting_attention.triton import forward as triton_forward
from kernels.forgetting_attention.triton.configs import select
from kernels.forgetting_attention.triton.decay import CHUNK, Decay, gradient_of_gates, sum_gates
from kernels.forgetting_attention.triton.ranges import GRAIN, Ranges, find_ranges, largest_norms
from kernels.operation import empty_gradients, register_operation
from kernels.rounding import cdiv

PLAN_DTYPES = (torch.float32, torch.float64, *(torch.int32,) * 4)


def _readable(x: Tensor) -> Tensor:
    """Return x, or a copy that tensor descriptors can read: 16-byte rows, aligned, the last axis contiguous."""
    per_16_bytes = 16 // x.element_size()
    if x.shape[3] % per_16_bytes:
        return F.pad(x, (0, -x.shape[3] % per_16_bytes))
    aligned = x.stride(3) == 1 and not any(stride % per_16_bytes for stride in x.stride()[:3])
    return x if aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    logit_bounds: Tensor | None,
    scale: float,
    window: int | None,
    cumulative: bool,
    prune: float | None,
    logit_bound: float | None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `forgetting_attention`; its logit_bound is either logit_bounds [Hq] or the number logit_bound.

    Returns:
        out [B, T, Hq, Dv] in q's dtype; for the backward pass lse [B, Hq, T rounded up] float32 in base 2, `local` and
        `base` of the decay, and `first`, `seen_until`, `whole_until` and `kept_from` of the ranges; then the lse that
        `forgetting_attention` returns. Unneeded tensors are empty.
    """
    if not q.numel():
        shapes = _empty_results(q, k, v, log_forget, cu_seqlens, kv_start, prune, window, return_lse)
        return tuple(x.zero_() for x in shapes)
    value_dim = v.shape[3]
    q, k, v = _readable(q), _readable(k), _readable(v)
    with torch.cuda.device_of(q):
        decay, first = sum_gates(
            log_forget,
            kv_start,
            kv_end,
            cu_seqlens,
            window,
            cumulative,
            k.shape[0],
            k.shape[1],
            q.device,
            exact=q.dtype == torch.float32,
        )
        ranges = None
        if first is not None:
            unbounded = prune is not None and logit_bounds is None and logit_bound is None
            norms = largest_norms(q, k) if unbounded else None
            bound = logit_bound if logit_bounds is None else logit_bounds
            ranges = find_ranges(first, decay, kv_end, q.shape[1], k.shape[1], prune, bound, norms, scale)
        if supports(q, v, kv_start, kv_end, scale):
            out, lse = hopper_forward.forward(q, k, v, decay, ranges, scale, select("hopper_forward", q, v))
        else:
            config = select("forward", q, v)
            out, lse = triton_forward.forward(q, k, v, decay, ranges, kv_start, kv_end, scale, config)
        if return_lse:
            natural = triton_forward.natural_lse(lse, decay, kv_end, q.shape[1], k.shape[1])
        else:
            natural = lse.new_empty(0)
    plan = (
        *((None, None) if decay is None else (decay.local, decay.base)),
        *((None,) * 4 if ranges is None else (first, ranges.seen_until, ranges.whole_until, ranges.kept_from)),
    )
    plan = (lse.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(plan, PLAN_DTYPES, strict=True))
    return out[..., :value_dim].contiguous(), lse, *plan, natural


def _fake_attention(
    q, k, v, log_forget, cu_seqlens, kv_start, kv_end, logit_bounds, scale, window, cumulative, prune, logit_bound,
    return_lse=False,
):  # fmt: skip
    return _empty_results(q, k, v, log_forget, cu_seqlens, kv_start, prune, window, return_lse)


def _empty_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    prune: float | None,
    window: int | None,
    return_lse: bool,
) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes and dtypes that `_attention` returns."""
    batch, num_queries, heads, _ = q.shape
    num_keys = k.shape[1]
    gated = log_forget is not None
    ranged = gated or cu_seqlens is not None or kv_start is not None or window is not None
    planes = (batch, heads if gated else 1)
    chunks, key_grains, query_grains = (
        cdiv(num_keys, CHUNK),
        cdiv(num_keys, GRAIN),
        cdiv(num_queries, GRAIN),
    )
    int32 = partial(q.new_empty, dtype=torch.int32)
    local = torch.float64 if gated and q.dtype == torch.float32 else torch.float32
    return (
        q.new_empty(batch, num_queries, heads, v.shape[3]),
        q.new_empty(batch, heads, cdiv(num_queries, CHUNK) * CHUNK, dtype=torch.float32),
        q.new_empty((*planes, chunks * CHUNK) if gated else 0, dtype=local),
        q.new_empty((*planes, chunks) if gated else 0, dtype=torch.float64),
        int32((*planes, chunks * CHUNK) if ranged else 0),
        int32((*planes, key_grains) if ranged else 0),
        int32((*planes, key_grains) if ranged else 0),
        int32((*planes, query_grains) if prune is not None else 0),
        q.new_empty((batch, num_queries, heads) if return_lse else 0, dtype=torch.float32),
    )


def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    out: Tensor,
    lse: Tensor,
    local: Tensor,
    base: Tensor,
    first: Tensor,
    seen_until: Tensor,
    whole_until: Tensor,
    kept_from: Tensor,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    cumulative: bool,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_forget in their dtypes; the last is empty without log_forget."""
    if not q.numel():
        return tuple(x.zero_() for x in empty_gradients(q, k, v, log_forget))
    head_dims = q.shape[3], k.shape[3], v.shape[3]
    q, k, v, out, grad_out = (_readable(x) for x in (q, k, v, out, grad_out))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    decay = Decay(local, base) if local.numel() else None
    ranges = Ranges(first, seen_until, whole_until, kept_from if kept_from.numel() else None) if first.numel() else None
    with torch.cuda.device_of(q):
        if supports(q, v, kv_start, kv_end, scale) and not torch.are_deterministic_algorithms_enabled():
            config = select("hopper_backward", q, v)
            *grads, grad_keys, grad_queries = hopper_backward.backward(
                grad_out, q, k, v, out, lse, decay, ranges, scale, config, grad_lse
            )
            together = config.block_m
        else:
            config, together = select("backward", q, v), 1
            *grads, grad_keys, grad_queries = triton_backward.backward(
                grad_out, q, k, v, out, lse, decay, ranges, kv_start, kv_end, scale, config, grad_lse
            )
        grad_gates = q.new_empty(0)
        if log_forget is not None:
            grad_gates = gradient_of_gates(
                log_forget, grad_keys, grad_queries, together, kv_start, kv_end, cu_seqlens, q.shape[1], cumulative
            )
    return *(grad[..., :dim].contiguous() for grad, dim in zip(grads, head_dims, strict=True)), grad_gates


def _fake_attention_backward(grad_out, q, k, v, log_forget, *rest):
    return empty_gradients(q, k, v, log_forget)


def _save(ctx, inputs, output):
    q, k, v, log_forget, cu_seqlens, kv_start, kv_end, _, ctx.scale, _, ctx.cumulative, _, _, return_lse = inputs
    ctx.mark_non_differentiable(*(output[1:-1] if return_lse else output[1:]))
    # Otherwise autograd materializes zero gradients for unused outputs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_forget, *output[:-1], cu_seqlens, kv_start, kv_end)


def _gradients(ctx, grad_out, *grads_of_others):
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[4]) if grad_out is None else grad_out
    grads = triton_attention_backward(grad_out, *saved, ctx.scale, ctx.cumulative, grads_of_others[-1])
    grad_log_forget = grads[3] if ctx.needs_input_grad[3] else None
    return *grads[:3], grad_log_forget, *(None,) * 10


triton_attention = register_operation("forgetting_attention_triton", _attention, _fake_attention)
triton_attention_backward = register_operation(
    "forgetting_attention_triton_backward", _attention_backward, _fake_attention_backward
)
torch.library.register_autograd("palimpsest::forgetting_attention_triton", _gradients, setup_context=_save)
