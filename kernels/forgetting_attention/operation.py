"""How forgetting attention's implementations become operations of torch."""

from collections.abc import Callable

import torch
from torch import Tensor


def register_operation(name: str, function: Callable, fake: Callable) -> Callable:
    """The operation palimpsest::name: what torch.library.custom_op makes, without its checks at every call.

    Those took longer than the pruned kernels. fake: empty results, in shape and dtype those of the function.
    """
    torch.library.define(f"palimpsest::{name}", torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(f"palimpsest::{name}", "default", function)
    torch.library.register_fake(f"palimpsest::{name}", fake)
    return getattr(torch.ops.palimpsest, name).default


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor | None) -> tuple[Tensor, ...]:
    """What a backward operation returns, in shape and dtype; the last is empty without log_forget."""
    grad_log_forget = q.new_empty(0) if log_forget is None else log_forget.new_empty(log_forget.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), grad_log_forget
