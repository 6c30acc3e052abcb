"""Selective attention as one torch operation; chooses the implementation by device. It has no gradient."""

import torch
from torch import Tensor

from kernels.forgetting_attention.validation import check_values
from kernels.operation import register_operation
from kernels.selective_attention import gathered
from kernels.selective_attention.triton import launch


def _selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Implement `selective_attention`."""
    if not q.numel():
        return _fake(q, k, v)
    arguments = q, k, v, top_values, decay, kv_start, kv_end, scale, softcap
    if q.is_cuda and q.dtype != torch.float64:
        return launch.attend(*arguments)
    check_values(q, k, None, None, kv_start, kv_end, cumulative=False)
    return gathered.attend(*arguments)


def _fake(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3])


operation = register_operation("selective_attention", _selective_attention, _fake)
