"""A linear layer of a few rows against its definition; the kernel compiled on a GPU, elsewhere interpreted."""

import os

import pytest
import torch
import torch.nn.functional as F

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.small_batch_linear import small_batch_linear, small_batch_linear_reference
from kernels.small_batch_linear.triton_linear import triton_small_batch_linear

pytestmark = pytest.mark.core

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
OPTIONS = {
    "product alone": {},
    "bias": {"bias": True},
    "norm": {"norm": True},
    "residual": {"residual": True},
    "gated": {"gated": True},
    "everything": {"bias": True, "norm": True, "residual": True, "gated": True},
}
SIZES = {  # rows, N, K
    "one row": (1, 32, 64),
    "odd sizes": (5, 37, 83),
    "rows of one product": (16, 64, 512),
    "rows of two products": (17, 16, 300),
    "most rows": (64, 50, 129),
    "one output of one channel": (3, 1, 1),
}


def make_inputs(size, dtype, *, bias=False, norm=False, residual=False, gated=False):
    """Return the arguments of the implementations, in order."""
    rows, outputs, k = size
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    width = outputs * (1 + gated)
    return (
        normal(rows, k) * 3,
        normal(width, k) * k**-0.5,
        normal(width) if bias else None,
        1 + 0.3 * normal(k) if norm else None,
        0.1,
        normal(rows, outputs) if residual else None,
        gated,
    )


def in_float64(arguments):
    return tuple(x.double() if isinstance(x, torch.Tensor) else x for x in arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_kernel_equals_the_definition(size, options, assert_close):
    for dtype in DTYPES:
        arguments = make_inputs(size, dtype, **options)
        right = small_batch_linear_reference(*in_float64(arguments))
        assert_close({"y": triton_small_batch_linear(*arguments)}, {"y": right}, TOLERANCE[dtype])


@pytest.mark.gpu
def test_the_definition_is_norm_then_linear_then_swiglu_then_residual():
    x, weight, bias, norm_weight, eps, residual, _ = make_inputs(
        (5, 6, 7), torch.float64, bias=True, norm=True, residual=True, gated=True
    )
    normalized = F.rms_norm(x, (7,), norm_weight, eps)
    gate, up = F.linear(normalized, weight[:6], bias[:6]), F.linear(normalized, weight[6:], bias[6:])
    out = small_batch_linear(x, weight, bias, norm_weight=norm_weight, norm_eps=eps, residual=residual, gated=True)
    torch.testing.assert_close(out, F.silu(gate) * up + residual)


@pytest.mark.gpu
def test_rows_of_a_wider_matrix_and_strided_residuals_are_taken_as_they_lie(assert_close):
    x, weight, *_ = make_inputs((4, 12, 40), torch.float32)
    residual = torch.randn(12, 4, device=DEVICE).t()
    arguments = (x[:, 3:23], weight[:, 5:25], None, None, 0.0, residual, False)
    right = x[:, 3:23].double() @ weight[:, 5:25].double().t() + residual
    assert_close({"y": triton_small_batch_linear(*arguments)}, {"y": right}, 1e-6)


@pytest.mark.gpu
def test_compiled_code_has_no_graph_break():
    x, weight, *_ = make_inputs((4, 12, 40), torch.float32)
    call = lambda x: small_batch_linear(x, weight, gated=True) + 1  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), call(x))
    torch.library.opcheck(triton_small_batch_linear, make_inputs((4, 12, 40), torch.float32), test_utils="test_schema")
    torch.library.opcheck(
        triton_small_batch_linear, make_inputs((4, 12, 40), torch.float32, gated=True), test_utils="test_faketensor"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(65, 8)}, r"x has shape \[65, 8\]; it must be \[rows, K\], of 1 to 64 rows"),
        ({"x": torch.zeros(2, 3, 8)}, r"x has shape \[2, 3, 8\]"),
        ({"x": torch.zeros(2, 8, dtype=torch.int64)}, "x is torch.int64; it must be float16"),
        ({"weight": torch.zeros(6, 7)}, r"weight has shape \[6, 7\]; for x of \[2, 8\] it must be \[N, 8\]"),
        ({"weight": torch.zeros(8, 6).t()}, r"weight has strides \[1, 6\]; each of its rows must be contiguous"),
        ({"weight": torch.zeros(5, 8), "gated": True}, "weight has 5 rows; with gated=True"),
        ({"weight": torch.zeros(6, 8).half()}, "weight is torch.float16 on cpu but x is torch.float32 on cpu"),
        ({"bias": torch.zeros(3), "gated": True}, r"bias has shape \[3\]; it must be \[6\]"),
        ({"norm_weight": torch.zeros(6)}, r"norm_weight has shape \[6\]; it must be \[8\]"),
        ({"residual": torch.zeros(2, 6), "gated": True}, r"residual has shape \[2, 6\]; it must be \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        small_batch_linear(**{"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8), **change})
