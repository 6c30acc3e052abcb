"""How the Triton kernels become operations of torch."""

from collections.abc import Callable

import torch


def register_operation(name: str, function: Callable, fake: Callable) -> Callable:
    """The operation palimpsest::name: what torch.library.custom_op makes, without its checks at every call.

    Those took longer than the pruned kernels. fake: empty results, in shape and dtype those of the function.
    """
    torch.library.define(f"palimpsest::{name}", torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(f"palimpsest::{name}", "default", function)
    torch.library.register_fake(f"palimpsest::{name}", fake)
    return getattr(torch.ops.palimpsest, name).default
