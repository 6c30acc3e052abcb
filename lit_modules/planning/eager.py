"""The cost of PyTorch's eager execution, traced on fake tensors."""

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

# Some versions of torch compute RMS norms in float32 under autocast on a GPU, others in the input's dtype.
NORMS_IN_FLOAT32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


class AsOnGpu(TorchFunctionMode):
    """Within, CPU tensors take the code paths of GPU tensors: our Triton operations and the fused RMS norm.

    Args:
        fused: RMS norms keep their input and one number per row; else PyTorch's steps, for a compiler to fuse.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]  # a descriptor, and a bool to torch's stubs
            return True
        if function is F.rms_norm:
            x = args[0].float() if NORMS_IN_FLOAT32 and torch.is_autocast_enabled("cpu") else args[0]
            if self.fused:
                return _RmsNorm.apply(x)
            args = (x, *args[1:])
        return function(*args, **(kwargs or {}))


class _RmsNorm(torch.autograd.Function):
    """A stand-in with the memory of the GPU's fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def on_gpu(function: Callable[..., Any], *, fused: bool) -> Callable[..., Any]:
    """Return `function` wrapped in AsOnGpu."""

    def call(*arguments: Any, **named: Any) -> Any:
        with AsOnGpu(fused):
            return function(*arguments, **named)

    return call


class Tracker(TorchDispatchMode):
    """Count work, and the bytes alive of tensors made within: now, at the peak, and as casts of `weights`."""

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
        """Count one pass: its work, and its peak above the bytes alive at its start."""
        self.work, began, self.peak = Work(), self.alive, self.alive
        found = Pass(self.work, 0)
        with self:
            yield found
        found.transient = self.peak - began


def trace_eager(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Traced:
    """Run `function(*inputs)` forward and backward with fake tensors, within a FakeTensorMode.

    Args:
        inputs: the first is kept for the backward pass if it requires a gradient.
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
