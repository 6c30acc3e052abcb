"""The gated recurrence: linear attention with a decaying state, the shared operation of seven architectures."""

import torch
from torch import Tensor

from kernels.gated_recurrence.cpu.chunked import chunked_recurrence
from kernels.gated_recurrence.decode.liger_step import liger_step
from kernels.gated_recurrence.decode.step import plain_step
from kernels.gated_recurrence.decode.triton_step import MAX_STEPS, short_recurrence, step
from kernels.gated_recurrence.decode.windowed_step import windowed_step
from kernels.gated_recurrence.delayed import add_last, add_own, delay
from kernels.gated_recurrence.operator import triton_recurrence
from kernels.gated_recurrence.reference import gated_recurrence_reference, gated_slot_attention_reference
from kernels.gated_recurrence.validation import check_arguments, check_slot_arguments, check_step_arguments

__all__ = [
    "gated_recurrence",
    "gated_recurrence_reference",
    "gated_recurrence_step",
    "gated_slot_attention",
    "gated_slot_attention_reference",
    "liger_step",
    "windowed_step",
]


def gated_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    decay_axis: str = "key",
    bonus: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `S_t = G_t (.) S_{t-1} + k_t^T v_t`, `o_t = scale q_t S_t`, with `G = exp(log_decay)`.

    Gated linear attention (arXiv 2312.06635, eq. 3) and the architectures in `kernels.gated_recurrence.forms`.
    Computed in chunks; the state is float32 (float64 for float64 inputs). Differentiable once in q, k, v, log_decay,
    bonus and initial_state, from out and final_state. Autocast has no effect: the dtype of q, k and v decides.

    Args:
        q: [B, T, Hq, Dk], float16, bfloat16, float32 or float64; k and v have its dtype and device.
        k: [B, T, Hk, Dk]; Hk divides Hq: head h of q reads the state h // (Hq / Hk).
        v: [B, T, Hk, Dv].
        log_decay: natural log of the gates, 0 or less, float32 or float64. [B, T, Hk, Dk]: one gate per key channel;
            with decay_axis="value" [B, T, Hk, Dv]: one per value channel; [B, T, Hk]: one per head. -inf erases the
            state; its gradient is 0.
        decay_axis: "key" or "value": the axis of the state that a gate per channel decays. Ignored for [B, T, Hk].
        bonus: [Hq, Dk], RWKV6's u: `o_t = scale q_t (S_{t-1} + diag(bonus) k_t^T v_t)`. A token then reads the previous
            state, and itself only through the bonus (arXiv 2404.05892, eq. 19).
        scale: factor of the output.
        initial_state: [B, Hk, Dk, Dv] float32 (float64), zeros when None; [N, Hk, Dk, Dv] with cu_seqlens.
        cu_seqlens: [N + 1] int32, bounds of packed documents, 0 to T (B = 1). Each document has a separate state.
            Empty documents are allowed.
        memory_budget: bytes that may be saved for the backward pass in addition to arguments and results. Intermediates
            that need more are recomputed. None: save them if a chunk of 64 tokens takes at most twice the bytes of its
            q, k, v and log_decay. The CPU form saves no intermediates.

    Returns:
        out [B, T, Hq, Dv] in q's dtype and final_state [B, Hk, Dk, Dv] ([N, ...] with cu_seqlens), float32 (float64).

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit; on the CPU also for values out of range (positive
            log_decay, decreasing cu_seqlens, ...). On other devices the value check would force a synchronization.
    """
    check_arguments(
        q,
        k,
        v,
        log_decay,
        decay_axis=decay_axis,
        bonus=bonus,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        memory_budget=memory_budget,
    )
    if bonus is not None and cu_seqlens is None and _is_short(q, k, v, log_decay, initial_state, bonus):
        return short_recurrence(q, k, v, log_decay, initial_state, decay_axis, float(scale), bonus)
    options = (initial_state, cu_seqlens, decay_axis, float(scale), memory_budget)
    if bonus is None or q.shape[1] == 0:
        return _implementation(q, k, v, log_decay, *options)
    later_k, later_v, later_decay = (delay(x, cu_seqlens) for x in (k, v, log_decay))
    out, before_last = _implementation(q, later_k, later_v, later_decay, *options)
    out = add_own(out, q, k, v, bonus, scale)
    return out, add_last(before_last, k, v, log_decay, decay_axis, cu_seqlens)


def _implementation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_axis: str,
    scale: float,
    memory_budget: int | None,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence without a bonus by the form for the device; the caller has checked the arguments.

    q may be float32 while k and v are half precision. wide: out in the states' dtype, not in v's.
    """
    if cu_seqlens is None and _is_short(q, k, v, log_decay, initial_state):
        return short_recurrence(q, k, v, log_decay, initial_state, decay_axis, scale, wide=wide)
    if q.is_cuda and q.dtype != torch.float64:
        options = (initial_state, cu_seqlens, decay_axis, scale, memory_budget, wide)
        return triton_recurrence(q, k, v, log_decay, *options)[:2]
    return chunked_recurrence(q, k, v, log_decay, initial_state, cu_seqlens, decay_axis, scale, wide)


def _is_short(q: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernel for a few tokens, which has no gradient, supports these inputs."""
    if not q.is_cuda or q.dtype == torch.float64 or q.shape[1] > MAX_STEPS:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, *others)))


@torch.no_grad()
def gated_recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    decay_axis: str = "key",
    bonus: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Run `gated_recurrence` for a few more tokens and update `state` in place. Without gradients.

    Args:
        q, k, v, log_decay, decay_axis, bonus, scale: as in `gated_recurrence`, with T = 1 or a few.
        state: [B, Hk, Dk, Dv] float32 (float64 for float64 inputs), contiguous; holds the final state afterwards.

    Returns:
        out [B, T, Hq, Dv] in q's dtype.

    Raises:
        ValueError: as `gated_recurrence`.
    """
    check_step_arguments(q, k, v, log_decay, state, decay_axis=decay_axis, bonus=bonus)
    if q.is_cuda and q.dtype != torch.float64:
        return step(q, k, v, log_decay, state, decay_axis, float(scale), bonus)
    return plain_step(q, k, v, log_decay, state, decay_axis, float(scale), bonus)


def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Attend to M decaying slots, into which keys and values are written (GSA, arXiv 2409.07146, eq. 8).

    Two passes of `gated_recurrence` with a softmax over the slots between: `K_t = K_{t-1} diag(G_t) + k_t^T slots_t`,
    `V_t = diag(G_t) V_{t-1} + slots_t^T v_t`, `o_t = softmax(scale q_t K_t) V_t`. In the paper slots are 1 - G.

    Args:
        q, k, v: as in `gated_recurrence`.
        slots: [B, T, Hk, M] in q's dtype, the weight with which a token is written into each slot.
        log_decay: [B, T, Hk, M], or [B, T, Hk].
        scale: factor of the scores.
        initial_state: ([B, Hk, Dk, M], [B, Hk, M, Dv]) float32; [N, ...] with cu_seqlens.
        cu_seqlens, memory_budget: as in `gated_recurrence`; the budget applies to each pass.

    Returns:
        out [B, T, Hq, Dv], and the two final states.

    Raises:
        ValueError: as `gated_recurrence`.
    """
    check_slot_arguments(
        q,
        k,
        v,
        slots,
        log_decay,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        memory_budget=memory_budget,
    )
    first, second = (None, None) if initial_state is None else initial_state
    options = (cu_seqlens, "value", float(scale), memory_budget)
    # In half precision, rounding of scores, weights and their gradients would cause most of the error of dq and dk.
    scores, keys = _implementation(q, k, slots, log_decay, first, *options, wide=True)
    out, values = _implementation(
        scores.softmax(-1), slots, v, log_decay, second, cu_seqlens, "key", 1.0, memory_budget
    )
    return out, (keys, values)
