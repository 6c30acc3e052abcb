"""Forgetting attention: softmax attention whose scores decay with the forget gates between a query and a key."""

import torch
from torch import Tensor

from kernels.forgetting_attention.cpu.chunked import chunked_forward
from kernels.forgetting_attention.decode.kernel import MAX_QUERIES, decode
from kernels.forgetting_attention.operator import triton_attention
from kernels.forgetting_attention.reference import forgetting_attention_reference
from kernels.forgetting_attention.validation import check_arguments

__all__ = ["forgetting_attention", "forgetting_attention_reference"]


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    cumulative: bool = False,
    prune: float | None = None,
    logit_bound: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute causal `softmax(scale q_i . k_j + c_i - c_j) v_j`, with `c = cumsum(log_forget)` over time.

    The Forgetting Transformer's attention (FoX, arXiv 2503.02130, eq. 2 to 4). `log_forget_j` decays the tokens before
    j, not j itself: on the diagonal the bias is 0. Without gates it is plain causal attention. The output and lse are
    once differentiable in q, k, v and log_forget. Sums are float32 (float64 for float64 inputs).

    CUDA uses Triton kernels (head dimensions up to 256); other devices and float64 use PyTorch. On Hopper the gradient
    of q is summed with atomics in no fixed order, so its last bits differ between runs, unless
    torch.use_deterministic_algorithms selects the slower kernels.

    Args:
        q: [B, T, Hq, Dk], float16, bfloat16, float32 or float64; k and v have its dtype and device.
        k: [B, S, Hk, Dk], S >= T: the queries are the last T positions. Head h of q reads head h // (Hq / Hk).
        v: [B, S, Hv, Dv]. Head h of q reads head h // (Hq / Hv); Hk and Hv divide Hq and may differ.
        log_forget: [B, S, Hq] float32 or float64, natural log of the forget gates, 0 or less. -inf (in effect, anything
            under -1e3) forgets all before it; its gradient is 0, the limit of `f dL/df` as f -> 0.
        scale: factor on the logits; 1 / sqrt(Dk) when None.
        window: query i sees the keys i - window + 1 to i.
        cu_seqlens: [N + 1] int32, boundaries of packed documents, 0 to T (B = 1, S = T). Documents do not see each
            other, and decay restarts in each. Empty documents are allowed.
        kv_start: [B] int32, the first key of each row (left padding). A query before it sees nothing: output and
            gradients are 0.
        kv_end: [B] int32, T <= kv_end <= S: row b holds kv_end[b] keys and its queries are their last T positions.
            k, v and log_forget may hold anything from kv_end on.
        cumulative: log_forget is already c (summed by the caller, as in a decoding cache). It must be finite, and
            float64 if float32 is too coarse for differences of the sum.
        prune: natural log of the attention mass that may be lost, for example -10.0. Keys whose largest possible decay
            bias over a block of queries is under `prune - 2 U - log(number of keys)` are skipped, forward and backward
            (arXiv 2504.06949). The output is off by at most `2 exp(prune) max|v|`, lse by about `exp(prune)`.
        logit_bound: U, a bound on |scale q.k|, a number or [Hq]; computed from the largest norms of q and k when None.
        return_lse: also return lse, which lets a caller merge outputs over disjoint keys into one softmax.

    Returns:
        [B, T, Hq, Dv] in q's dtype. With return_lse also lse [B, T, Hq] float32 (float64 for float64 inputs): the
        natural log of the sum of `exp(scale q_i . k_j + c_i - c_j)` over the keys that a query sees, -inf if none.

    Raises:
        ValueError: invalid shapes, dtypes or devices; on the CPU also values out of range (positive log_forget,
            decreasing cu_seqlens, ...), whose check would need a synchronization on other devices.
    """
    check_arguments(
        q,
        k,
        v,
        log_forget,
        window=window,
        cu_seqlens=cu_seqlens,
        kv_start=kv_start,
        kv_end=kv_end,
        cumulative=cumulative,
        prune=prune,
        logit_bound=logit_bound,
    )
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if q.is_cuda and q.dtype != torch.float64:
        if _decodes(q, k, v, log_forget, cu_seqlens):
            out, lse = decode(q, k, v, log_forget, kv_start, kv_end, scale, window, cumulative, return_lse)
            return (out, lse) if return_lse else out
        bounds = logit_bound if isinstance(logit_bound, Tensor) else None
        bound = None if logit_bound is None or bounds is not None else float(logit_bound)
        out, *_, lse = triton_attention(
            q, k, v, log_forget, cu_seqlens, kv_start, kv_end, bounds, scale, window, cumulative, prune, bound,
            return_lse,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    threshold = None if prune is None else prune - 2 * _largest_logit(q, k, scale, logit_bound)
    out, _, lse = chunked_forward(
        q, k, v, log_forget, cu_seqlens, kv_start, kv_end, threshold, scale, window, cumulative, return_lse
    )
    return (out, lse) if return_lse else out


def _decodes(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Return whether `decode` serves this call: few queries and no gradient. Its one pass is too short to prune."""
    inputs = (q, k, v, log_forget)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return 0 < q.shape[1] <= MAX_QUERIES and cu_seqlens is None and not differentiable


@torch.no_grad()
def _largest_logit(q: Tensor, k: Tensor, scale: float, logit_bound: float | Tensor | None) -> Tensor:
    """Return the bound on the logits, [Hq] float64: logit_bound, or scale times the largest norms of q and k."""
    if isinstance(logit_bound, Tensor):
        return logit_bound.detach().double()
    num_heads = q.shape[2]
    if logit_bound is not None:
        return q.new_full((num_heads,), logit_bound, dtype=torch.float64)
    dtype = torch.promote_types(q.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(x.detach(), dim=-1, dtype=dtype) for x in (q, k)]
    # Unused key slots may hold anything, even NaN; non-finite values in used slots give NaN in the output anyway.
    of_q, of_k = (x.nan_to_num(nan=0.0, posinf=0.0).amax((0, 1)).double() for x in norms)
    return abs(scale) * 1.00001 * of_q * of_k.repeat_interleave(num_heads // k.shape[2])
