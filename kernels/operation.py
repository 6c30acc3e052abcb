"""Registration of implementations as torch operations."""

from collections.abc import Callable

import torch
from torch import Tensor


def register_operation(name: str, function: Callable, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """Register the operation palimpsest::name like torch.library.custom_op, without its checks at every call.

    Those checks took longer than the pruned kernels.

    Args:
        fake: returns empty tensors with the shapes and dtypes of the function's results.
        mutates: names of the arguments that the function writes to.
    """
    torch.library.define(f"palimpsest::{name}", torch.library.infer_schema(function, mutates_args=mutates))
    torch.library.impl(f"palimpsest::{name}", "default", function)
    torch.library.register_fake(f"palimpsest::{name}", fake)
    return getattr(torch.ops.palimpsest, name).default


def empty_gradients(q: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Return empty gradients with the shapes and dtypes of the arguments; a tensor of size 0 for None."""
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, *others))
