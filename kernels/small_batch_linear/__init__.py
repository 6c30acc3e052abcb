"""Linear layer for a few rows, fused with its neighbors in decoding: the norm before, SwiGLU or the residual after."""

import torch
from torch import Tensor

from kernels.small_batch_linear.reference import small_batch_linear_reference
from kernels.small_batch_linear.triton_linear import triton_small_batch_linear
from kernels.small_batch_linear.validation import MAX_ROWS, check_arguments

__all__ = ["MAX_ROWS", "small_batch_linear", "small_batch_linear_reference"]


@torch.no_grad()
def small_batch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute `n(x) W^T + bias + residual`, or `silu(n(x) Wg^T) * (n(x) Wu^T) + residual`; without gradients.

    n(x) is x, or with a norm_weight its RMS norm, `norm_weight * x / sqrt(mean(x^2) + norm_eps)`. Meant for the rows of
    a decoding step, whose time on a GPU is the time to read W.

    On CUDA sums, statistics and later steps are float32 and rounded once, at the end; separate modules would round
    after each step. Normalized activations enter the product as `norm_weight * x`, in x's dtype, and their root mean
    square divides the result, so `norm_weight * x` must not overflow.

    Args:
        x: [rows, K], 1 to MAX_ROWS rows, float16, bfloat16, float32 or float64. All others have its dtype and device.
        weight: [N, K] as in nn.Linear, its rows contiguous; with gated [2 N, K], Wg's rows, then Wu's.
        bias: [N]; with gated [2 N].
        norm_weight: [K].
        norm_eps: added to the mean square.
        residual: [rows, N].
        gated: W holds two matrices, the gate Wg and Wu.

    Returns:
        y [rows, N] in x's dtype.

    Raises:
        ValueError: invalid shapes, dtypes or devices.
    """
    check_arguments(x, weight, bias, norm_weight, residual, gated)
    in_triton = x.is_cuda and x.dtype != torch.float64
    implementation = triton_small_batch_linear if in_triton else small_batch_linear_reference
    return implementation(x, weight, bias, norm_weight, float(norm_eps), residual, gated)
