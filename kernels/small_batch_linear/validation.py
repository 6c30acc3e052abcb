"""Argument checks of the linear layer for a few rows. Each error is one line: what was given and what is needed."""

import torch
from torch import Tensor

MAX_ROWS = 64
"""Most rows that one program can hold."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None, gated: bool
) -> None:
    """Check the shapes, dtypes and devices of `small_batch_linear`'s arguments.

    Raises:
        ValueError: an argument does not fit.
    """
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [rows, K], of 1 to {MAX_ROWS} rows")
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; it must be float16, bfloat16, float32 or float64")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or not weight.numel():
        raise ValueError(
            f"weight has shape {list(weight.shape)}; for x of {list(x.shape)} it must be [N, {x.shape[1]}]"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"weight has strides {list(weight.stride())}; each of its rows must be contiguous")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; with gated=True it holds two matrices of equal size")
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    expected = (
        ("weight", weight, tuple(weight.shape)),
        ("bias", bias, (weight.shape[0],)),
        ("norm_weight", norm_weight, (x.shape[1],)),
        ("residual", residual, (x.shape[0], outputs)),
    )
    for name, given, shape in expected:
        if given is None:
            continue
        if tuple(given.shape) != shape:
            raise ValueError(f"{name} has shape {list(given.shape)}; it must be {list(shape)}")
        if given.dtype != x.dtype or given.device != x.device:
            raise ValueError(f"{name} is {given.dtype} on {given.device} but x is {x.dtype} on {x.device}")
