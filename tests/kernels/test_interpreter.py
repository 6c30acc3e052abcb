"""The faster interpreter performs the same checks as Triton's."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")


@pytest.mark.parametrize(
    ("operation", "values", "right"),
    [("add", (2**31 - 2, 1), 2**31 - 1), ("sub", (-(2**31) + 1, 1), -(2**31)), ("mul", (2**30 - 1, 2), 2**31 - 2)],
)
def test_what_overflows_its_type_is_an_error(operation, values, right):
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a, b, out, OPERATION: tl.constexpr):
        at = tl.arange(0, 4)
        x, y = tl.load(a + at), tl.load(b + at)
        if OPERATION == "add":
            result = x + y
        elif OPERATION == "sub":
            result = x - y
        else:
            result = x * y
        tl.store(out + at, result)

    a, b = (torch.tensor([1, 1, 1, value], dtype=torch.int32) for value in values)
    out = torch.empty_like(a)
    kernel[(1,)](a, b, out, operation)
    assert out[3] == right
    a[3] += -1 if operation == "sub" else 1
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"overflow detected for operation {operation}"):
        kernel[(1,)](a, b, out, operation)
