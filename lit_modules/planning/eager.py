"""What PyTorch does as it runs operation by operation, found on tensors without contents."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_modules.planning.work import Pass, Traced, Work, size, workspace

# Some versions of torch take RMS norms in float32 under autocast on a GPU, others in the dtype that comes.
NORMS_IN_FLOAT32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


class AsOnGpu(TorchFunctionMode):
    """Within, tensors of the processor take the ways of tensors on a GPU: our Triton operations, and RMS norms
    that keep their input and a number for each row (fused=False: PyTorch's own steps, for a compiler to fuse)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == Tensor.is_cuda.__get__:
            return True
        if function is F.rms_norm:
            x = args[0].float() if NORMS_IN_FLOAT32 and torch.is_autocast_enabled("cpu") else args[0]
            if self.fused:
                return _RmsNorm.apply(x)
            args = (x, *args[1:])
        return function(*args, **(kwargs or {}))


class _RmsNorm(torch.autograd.Function):
    """The memory of the fused kernel that a GPU has."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def on_gpu(function: Callable[..., Any], *, fused: bool) -> Callable[..., Any]:
    """`function`, within AsOnGpu."""

    def call(*arguments: Any, **named: Any) -> Any:
        with AsOnGpu(fused):
            return function(*arguments, **named)

    return call


class Tracker(TorchDispatchMode):
    """Counts work, and the bytes that are alive of what was made within: now, at most, and of them copies of `weights`
    in another precision."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = {id(x.untyped_storage()) for x in weights}
        self.work = Work()
        self.alive = self.peak = self.casts = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        before = {id(x.untyped_storage()) for x in inputs}
        made = [x.untyped_storage() for x in outputs if id(x.untyped_storage()) not in before]
        cast = function is torch.ops.aten._to_copy.default and bool(before & self.weights)
        for storage in made:
            self._hold(storage, cast)
        if made or function._schema.is_mutable:
            self._count(function, inputs, outputs)
        return out

    def _count(self, function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        room = workspace(function, inputs)
        self.peak = max(self.peak, self.alive + room)
        if self.work.add(function, inputs, outputs) or function._schema.name.startswith("aten::empty"):
            return
        self.work.traffic += sum(map(size, inputs)) + sum(map(size, outputs))
        self.work.kernels += 1

    def _hold(self, storage: torch.UntypedStorage, cast: bool) -> None:
        key, held = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.alive += held
        self.casts += held * cast
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, held, cast)

    def _drop(self, key: int, held: int, cast: bool) -> None:
        self._known.discard(key)
        self.alive -= held
        self.casts -= held * cast

    @contextmanager
    def counting(self) -> Iterator[Pass]:
        """Within, a pass of its own: its work, and how far it rises above what was alive at its beginning."""
        self.work, began, self.peak = Work(), self.alive, self.alive
        found = Pass(self.work, 0)
        with self:
            yield found
        found.transient = self.peak - began


def trace_eager(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Traced:
    """Run `function(*inputs)` forward and backward; fake tensors, within a FakeTensorMode.

    Args:
        inputs: the first is kept for the backward pass, if a gradient is asked of it.
        weights: parameters that `function` reads.
    """
    tracker = Tracker(weights)
    wanted = [x for x in (*inputs, *weights) if x.requires_grad]
    with tracker.counting() as forward:
        out = function(*inputs)
    kept = tracker.alive - size(out) + (size(inputs[0]) if inputs[0].requires_grad else 0)
    casts, gradient = tracker.casts, torch.empty_like(out)
    with tracker.counting() as backward:
        torch.autograd.grad(out, wanted, gradient)
    return Traced(forward, backward, kept, casts)
