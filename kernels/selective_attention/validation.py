"""Argument checks of selective attention. Each error is one line: what was given and what is needed."""

import torch
from torch import Tensor

from kernels.forgetting_attention.validation import check_bounds, check_qkv


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None,
    softcap: float | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
) -> None:
    """Check shapes, dtypes, devices and Python numbers.

    Raises:
        ValueError: an argument does not fit.
    """
    check_qkv(q, k, v)
    if q.shape[1] != 1:
        raise ValueError(f"q has {q.shape[1]} queries a row; selection is for decoding, with one: give q[:, -1:]")
    if isinstance(top_values, bool) or not isinstance(top_values, int) or top_values < 1:
        raise ValueError(f"top_values={top_values}: it counts the values that a head reads, so it must be 1 or more")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: it bounds the logits, so it must be above 0, or None")
    if decay is not None:
        shape = [k.shape[0], k.shape[1], q.shape[2]]
        if list(decay.shape) != shape:
            raise ValueError(f"decay has shape {list(decay.shape)}; [batch, keys, heads of q] is {shape}")
        if decay.dtype not in (torch.float32, torch.float64) or decay.device != q.device:
            raise ValueError(
                f"decay is {decay.dtype} on {decay.device}; sums of log gates must be float32 or float64 on {q.device}"
            )
    check_bounds(q, kv_start, kv_end)
