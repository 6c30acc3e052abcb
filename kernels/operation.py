"""How implementations become operations of torch."""

from collections.abc import Callable

import torch
from torch import Tensor


def register_operation(name: str, function: Callable, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """The operation palimpsest::name: what torch.library.custom_op makes, without its checks at every call.

    Those took longer than the pruned kernels. fake: empty results, in shape and dtype those of the function. mutates:
    names of the arguments that it writes to.
    """
    torch.library.define(f"palimpsest::{name}", torch.library.infer_schema(function, mutates_args=mutates))
    torch.library.impl(f"palimpsest::{name}", "default", function)
    torch.library.register_fake(f"palimpsest::{name}", fake)
    return getattr(torch.ops.palimpsest, name).default


def empty_gradients(q: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """What a backward operation returns, in shape and dtype; an empty tensor for what is None."""
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, *others))
