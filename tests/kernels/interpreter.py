"""Triton's interpreter without the work it repeats at every operation: the same checks and bits in half the time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


@contextmanager
def quickened() -> Iterator[None]:
    """Make the interpreter do such work once within the context."""
    with pytest.MonkeyPatch.context() as patch:
        _patch_the_language_once_a_kernel(patch)
        patch.setattr(type(interpreter.interpreter_semantic), "binary_op_sanitize_overflow_impl", _check_overflow)
        patch.setattr(interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype))
        patch.setattr(tl.block_type, "__init__", _make_block_type)
        patch.setattr(tl.tensor, "__init__", _make_tensor)
        yield


def _patch_the_language_once_a_kernel(patch: pytest.MonkeyPatch) -> None:
    """The interpreter puts its own operations into triton.language when a kernel starts, and again at every call of a
    function in the kernel, which changes nothing."""
    patch_language, run_kernel = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[frozenset[str]] = set()

    @functools.cache
    def modules(function: FunctionType) -> frozenset[str]:
        return frozenset(x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)

    def patch_once(function: FunctionType) -> interpreter._LangPatchScope:
        if modules(function) in done:
            return interpreter._LangPatchScope()
        done.add(modules(function))
        return patch_language(function)

    def run_again(executor: interpreter.GridExecutor, *args, **kwargs) -> None:
        done.clear()
        run_kernel(executor, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.GridExecutor, "__call__", run_again)


def _check_overflow(semantic, lhs: tl.tensor, rhs: tl.tensor, binary_op) -> None:
    """Check that integer sums, differences and products fit their type, like Triton, but in numpy at once instead of by
    ten interpreted operations."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
        return
    assert kind == rhs.type.scalar
    assert kind.is_int()
    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[binary_op.__name__]
    wide = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = wide.min() >= kind.get_int_min_value() and wide.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"


def _kept_by_name(numpy_dtype: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """Return the numpy dtype of a type from a cache; Triton builds a table of all types at each call."""
    kept: dict[str, np.dtype] = {}

    def found(kind: tl.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in kept:
            kept[name] = numpy_dtype(kind.scalar)
        return kept[name]

    return found


@functools.cache
def _checked_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    shape = tl.tuple(sizes)
    return shape, validate_block_shape(shape), str(shape)


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
    sizes = tuple(tl.core._unwrap_shape(shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, words = _checked_shape(sizes)
    self.name = f"<{words}, {element_ty}>"


@functools.cache
def _constant_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(int(np.prod(sizes)))


def _make_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constant_shape(tuple(type.shape) if type.is_block() else ())
