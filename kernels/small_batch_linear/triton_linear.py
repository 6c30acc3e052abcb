"""Linear layer for a few rows in Triton, in the time of reading the weights once.

    y = (g x) W^T / sqrt(mean(x^2) + eps)        y = silu(y_g) y_u

A program owns some rows of W, for the gated form the same rows of both matrices, and iterates over K; its tiles are
loaded to shared memory several steps ahead. The rows of x, padded to a size that tensor cores accept, come from the
cache, as every program reads them. Their mean squares are the diagonal of x x^T, a second matrix product: sums of
squares in registers would take longer than reading the weights.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operation import register_operation
from kernels.rounding import cdiv, next_power_of_2

# The smallest matrix product that tensor cores accept.
SMALLEST_PRODUCT = 16
PROCESSORS = 132  # of a Hopper GPU; programs should fill them evenly
SHARED_BYTES = 224 * 1024  # usable shared memory of a processor
MAX_STAGES = 8


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """Compute `kernels.small_batch_linear.small_batch_linear`."""
    out = _empty_out(x, weight, gated)
    rows, outputs = out.shape
    x, bias, norm_weight = (None if t is None else t.contiguous() for t in (x, bias, norm_weight))
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    block_rows = max(SMALLEST_PRODUCT, next_power_of_2(rows))
    block_outputs, block_k, stages, warps = _tiles(block_rows, outputs, x.shape[1], gated, x.element_size())
    with torch.cuda.device_of(x):
        _product[(cdiv(outputs, block_outputs),)](
            x,
            weight,
            bias,
            norm_weight,
            residual,
            out,
            rows,
            weight.stride(0),
            outputs * weight.stride(0),
            0 if residual is None else residual.stride(0),
            norm_eps,
            OUTPUTS=outputs,
            K=x.shape[1],
            BLOCK_ROWS=block_rows,
            BLOCK_OUTPUTS=block_outputs,
            BLOCK_K=block_k,
            GATED=gated,
            EVEN_K=x.shape[1] % block_k == 0,
            EVEN_OUTPUTS=outputs % block_outputs == 0,
            # Three products in tf32 for one in float32: tf32 alone has 10 bits.
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            num_warps=warps,
            num_stages=stages,
        )
    return out


def _fake(x, weight, bias, norm_weight, norm_eps, residual, gated):
    return _empty_out(x, weight, gated)


triton_small_batch_linear = register_operation("triton_small_batch_linear", _linear, _fake)


def _empty_out(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])


def _tiles(block_rows: int, outputs: int, k: int, gated: bool, itemsize: int) -> tuple[int, int, int, int]:
    """Return (outputs, step, stages, warps) of a program, from the sizes alone; tuned for Llama 3 8B.

    More outputs per program read x less often, but there should be more programs than processors, to share the work
    evenly. Stages then fill the shared memory that the concurrent programs leave.
    """
    programs = {n: cdiv(outputs, n) / PROCESSORS for n in (64, 32, 16)}
    block_outputs = 32 if gated else next((n for n in (64, 32) if programs[n] >= 1.4), 16)
    block_k = 512 // itemsize // (block_rows // SMALLEST_PRODUCT)
    block_k = max(SMALLEST_PRODUCT, min(block_k, next_power_of_2(k)))
    if gated or block_outputs != 32:
        block_k = max(SMALLEST_PRODUCT, block_k // 2)
    stage = (block_outputs * (1 + gated) + block_rows) * block_k * itemsize
    together = max(1, min(4 if gated else 2, math.ceil(programs[block_outputs])))
    # One of the stages is in registers.
    stages = max(2, min(MAX_STAGES, SHARED_BYTES // together // stage + 1))
    return block_outputs, block_k, stages, 4 if gated or block_outputs == 64 else 2


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, norm_weight, residual, out,
    rows, weight_stride, up, residual_stride, norm_eps,
    OUTPUTS: tl.constexpr, K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows; bias, norm_weight and residual may be None. up: from a gate's weight to its partner."""
    row, step = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_K)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_used, output_used = row < rows, output < OUTPUTS
    x += row[:, None] * K + step
    weight += output.to(tl.int64)[:, None] * weight_stride + step
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    acc_up = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        x_used, used = row_used[:, None], step[None, :] < BLOCK_K
        if not EVEN_OUTPUTS:
            used = output_used[:, None]
        if not EVEN_K:
            x_used = x_used & (begin + step < K)
            used = used & (begin + step < K)
        tile = tl.load(weight + begin, mask=used, other=0.0, eviction_policy="evict_first")
        activations = tl.load(x + begin, mask=x_used, other=0.0)
        if norm_weight is not None:
            squares = tl.dot(activations, tl.trans(activations), squares, input_precision=PRECISION)
            scale = tl.load(norm_weight + begin + step, mask=begin + step < K, other=0.0)
            activations = activations * scale
        acc = tl.dot(activations, tl.trans(tile), acc, input_precision=PRECISION)
        if GATED:
            tile = tl.load(weight + up + begin, mask=used, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(activations, tl.trans(tile), acc_up, input_precision=PRECISION)

    if norm_weight is not None:
        total = tl.sum(tl.where(row[:, None] == row, squares, 0.0), 1)
        factor = tl.rsqrt(total / K + norm_eps)[:, None]
        acc *= factor
        acc_up *= factor
    if bias is not None:
        acc += tl.load(bias + output, mask=output_used, other=0.0).to(tl.float32)
        if GATED:
            acc_up += tl.load(bias + OUTPUTS + output, mask=output_used, other=0.0).to(tl.float32)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    used = row_used[:, None] & output_used
    if residual is not None:
        acc += tl.load(residual + row[:, None] * residual_stride + output, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * OUTPUTS + output, acc.to(out.dtype.element_ty), mask=used)
