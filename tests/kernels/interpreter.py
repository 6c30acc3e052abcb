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
        semantic = type(interpreter.interpreter_semantic)
        patch.setattr(semantic, "binary_op_sanitize_overflow_impl", _check_overflow)
        patch.setattr(semantic, "broadcast_impl_value", _broadcasting(semantic.broadcast_impl_value))
        patch.setattr(semantic, "binary_op_type_checking_impl", _checking(semantic.binary_op_type_checking_impl))
        patch.setattr(interpreter, "_patch_attr", _pass_semantic)
        patch.setattr(interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype))
        patch.setattr(tl.core, "_unwrap_if_constexpr", _unwrapping(tl.core._unwrap_if_constexpr))
        patch.setattr(tl.dtype, "__eq__", _comparing(tl.dtype.__eq__))
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


def _pass_semantic(target, name: str, operation: Callable, builder, scope: interpreter._LangPatchScope) -> None:
    """Replace an operation of the language by one with the interpreter's semantics.

    It neither copies the keywords of each call nor checks that they have semantics.
    """
    function = getattr(operation, "__wrapped__", operation)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(target, name, call)


def _unwrapping(unwrap: Callable) -> Callable:
    def unwrapped(value):
        if isinstance(value, tl.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    return unwrapped


def _comparing(equal: Callable) -> Callable:
    return lambda kind, other: kind is other or equal(kind, other)


def _broadcasting(broadcast: Callable) -> Callable:
    """Answer at once where there is nothing to broadcast, or one number."""

    def splat(semantic, number: tl.tensor, shape: "_Shape") -> tl.tensor:
        kind = tl.block_type(number.dtype, shape)
        return tl.tensor(semantic.builder.create_splat(kind, number.handle), kind)

    def broadcasted(semantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if left and right:
            return (lhs, rhs) if lhs.type.shape is rhs.type.shape else broadcast(semantic, lhs, rhs)
        if left:
            return lhs, splat(semantic, rhs, lhs.type.shape)
        return (splat(semantic, lhs, rhs.type.shape) if right else lhs), rhs

    return broadcasted


def _checking(check: Callable) -> Callable:
    """Convert nothing where two tensors have one type that arithmetic keeps."""
    kept = {"fp32", "fp64", "int1", "int32", "int64"}

    def checked(semantic, lhs, rhs, *options, **more) -> tuple[tl.tensor, tl.tensor]:
        tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
        if tensors and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in kept:
            return semantic.broadcast_impl_value(lhs, rhs)
        return check(semantic, lhs, rhs, *options, **more)

    return checked


class _Shape(tl.tuple):
    """Shape of a block type, with what follows from it; there is one of each shape."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self.sizes, self.size, self.words = sizes, validate_block_shape(self), str(self)


_shape_of = functools.cache(_Shape)


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
    if not isinstance(shape, _Shape):
        sizes = tuple(tl.core._unwrap_shape(shape))
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        shape = _shape_of(sizes)
    self.element_ty, self.shape, self.numel = element_ty, shape, shape.size
    self.name = f"<{shape.words}, {element_ty}>"


@functools.cache
def _constant_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(int(np.prod(sizes)))


def _make_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constant_shape(type.shape.sizes if type.is_block() else ())
