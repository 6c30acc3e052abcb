"""Attention of one token to a cache that reads the values of its highest scores alone."""

from torch import Tensor

from kernels.selective_attention.operator import operation
from kernels.selective_attention.reference import selective_attention_reference
from kernels.selective_attention.validation import check_arguments

__all__ = ["selective_attention", "selective_attention_reference"]


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
) -> Tensor:
    """Compute `sum_j softmax_j(s_j) v_j` over the `top_values` highest scores `s_j = scale q . k_j + c - c_j`.

    Selective V fetching (DiffQKV, arXiv 2501.13629): the scores of all keys are computed exactly, then each query head
    reads the values of its highest scores alone, and the softmax is over those. Of equal scores the earlier key comes
    first, so that exactly `top_values` keys are read. Where a row has no more keys than that, this is
    `forgetting_attention`. For decoding: one query a row, the last of its keys, and no gradient.

    CUDA uses Triton kernels, which wait for no number of the device and can be captured in a CUDA graph. They allocate
    4.25 bytes for each key and query head. Other devices and float64 use PyTorch.

    Args:
        q: [B, 1, Hq, Dk], float16, bfloat16, float32 or float64; k and v have its dtype and device.
        k: [B, S, Hk, Dk]. Head h of q reads head h // (Hq / Hk). Views of larger tensors, also of [B, Hk, S, Dk], are
            read in place if each head's channels are contiguous; so are those of v and of decay.
        v: [B, S, Hv, Dv]. Head h of q reads head h // (Hq / Hv); Hk and Hv divide Hq and may differ.
        top_values: values that a query head reads; the paper has 100.
        decay: [B, S, Hq] float32 or float64, the sum c of the log forget gates up to each key, as a cache keeps it
            (`cumulative=True` of `forgetting_attention`); finite. None without gates.
        scale: factor on the logits; 1 / sqrt(Dk) when None.
        softcap: logits become `softcap * tanh(logit / softcap)` before decay; None leaves them.
        kv_start: [B] int32, the first key of each row (left padding). A row without a key gives 0.
        kv_end: [B] int32, 1 to S: row b holds kv_end[b] keys and its query is the last of them. k, v and decay may
            hold anything outside kv_start to kv_end.

    Returns:
        [B, 1, Hq, Dv] in q's dtype.

    Raises:
        ValueError: invalid shapes, dtypes, devices or numbers; on the CPU also bounds out of range, whose check would
            need a synchronization on other devices.
    """
    check_arguments(q, k, v, top_values, decay, softcap, kv_start, kv_end)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return operation(q, k, v, top_values, decay, kv_start, kv_end, scale, softcap)
