"""Training projections with LoRA: those of one input in few products, in the model's dtype.

peft computes LoRA in float32, on float32 copies of the input, the output and their gradients. Here the operands have
the model's dtype and products accumulate in float32, as under autocast. The LoRA weights stay float32.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

CHUNK_TOKENS = 1024
"""Tokens per partial product of a LoRA gradient."""


def project(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Apply each of `modules` to `x` `[..., in]`.

    Frozen modules with one plain, trained LoRA are computed together; the others run their own forward.
    """
    dtype = _dtype(x)
    together = [module for module in modules if torch.is_grad_enabled() and _is_plain(module, x.dtype, dtype)]
    if not together:
        return [module(x) for module in modules]
    adapters = [module.active_adapters[0] for module in together]
    products = _Projections.apply(
        x.to(dtype),
        tuple(float(module.scaling[adapter]) for module, adapter in zip(together, adapters, strict=True)),
        *(module.base_layer.weight for module in together),
        *(module.lora_A[adapter].weight for module, adapter in zip(together, adapters, strict=True)),
        *(module.lora_B[adapter].weight for module, adapter in zip(together, adapters, strict=True)),
    )
    biased = (_biased(product, module.base_layer) for product, module in zip(products, together, strict=True))
    return [next(biased) if module in together else module(x) for module in modules]


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the products."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def _is_plain(module: nn.Module, given: torch.dtype, dtype: torch.dtype) -> TypeGuard[Linear]:
    """Return whether a projection is frozen under one LoRA that has only two factors, both trained."""
    if type(module) is not Linear or type(module.base_layer) is not nn.Linear:
        return False
    base, active = module.base_layer, module.active_adapters
    if module.disable_adapters or module.merged or len(active) != 1:
        return False
    (adapter,) = active
    if adapter not in module.lora_A or adapter in module.lora_variant or module.lora_bias[adapter]:
        return False
    dropout, down, up = (part[adapter] for part in (module.lora_dropout, module.lora_A, module.lora_B))
    if not isinstance(dropout, nn.Identity) or any(map(_has_hooks, (module, base, dropout, down, up))):
        return False
    trained = down.weight.requires_grad and up.weight.requires_grad and not base.weight.requires_grad
    return bool(trained) and base.weight.dtype in (given, dtype)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks; the fused computation would not call them."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _biased(product: Tensor, base: nn.Module) -> Tensor:
    return product + base.bias.to(product.dtype) if isinstance(base.bias, Tensor) else product


class _Projections(torch.autograd.Function):
    """`x W_i^T + s_i (x A_i^T) B_i^T` for every i, of x `[..., in]`.

    W has no gradient; the gradients of A and B have their dtype. With A the factors A_i stacked by rows, and B
    block-diagonal with blocks s_i B_i, the LoRA part of all concatenated outputs is `(x A^T) B^T`, and the gradients
    need as few products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: tuple[float, ...], *factors: Tensor) -> tuple[Tensor, ...]:
        weights, down, up = _matrices(factors, scalings, x.dtype)
        low = F.linear(x, down)
        added = F.linear(low, up).split([weight.shape[0] for weight in weights], dim=-1)
        ctx.save_for_backward(x, low, *factors)
        ctx.scalings = scalings
        return tuple(F.linear(x, weight) + part for weight, part in zip(weights, added, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *factors = ctx.saved_tensors
        count, scalings = len(grads), ctx.scalings
        weights, down, up = _matrices(factors, scalings, x.dtype)
        grad = grads[0] if count == 1 else torch.cat(grads, dim=-1)
        grad_low = grad @ up
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ (weights[0] if count == 1 else torch.cat(weights)) + grad_low @ down
        grads_down = _over_tokens(grad_low, x).split([factor.shape[0] for factor in factors[count : 2 * count]])
        grads_up, row, column = [], 0, 0
        grad_up = _over_tokens(grad, low)
        for factor, scaling in zip(factors[2 * count :], scalings, strict=True):
            rows, columns = factor.shape
            grads_up.append(grad_up[row : row + rows, column : column + columns] * scaling)
            row, column = row + rows, column + columns
        of_factors = (g.to(f.dtype) for g, f in zip((*grads_down, *grads_up), factors[count:], strict=True))
        return grad_x, None, *(None,) * count, *of_factors


def _matrices(
    factors: tuple[Tensor, ...] | list[Tensor], scalings: tuple[float, ...], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the weights W_i, A and B, in `dtype`."""
    count = len(scalings)
    weights, downs, ups = factors[:count], factors[count : 2 * count], factors[2 * count :]
    down = torch.cat(downs) if count > 1 else downs[0]
    rank, before, blocks = down.shape[0], 0, []
    for up, scaling in zip(ups, scalings, strict=True):
        after = rank - before - up.shape[1]
        blocks.append(F.pad(up * scaling, (before, after)))
        before += up.shape[1]
    return [weight.to(dtype) for weight in weights], down.to(dtype), torch.cat(blocks).to(dtype)


def _over_tokens(x: Tensor, y: Tensor) -> Tensor:
    """Compute `sum_n x_n^T y_n` of x `[..., rows]` and y `[..., columns]`, float32 at least."""
    # Sum chunks of tokens in one batched product: the result is small, and a single product would occupy few
    # multiprocessors of a GPU.
    x, y = (z.reshape(-1, z.shape[-1]) for z in (x, y))
    chunks = x.shape[0] // CHUNK_TOKENS
    whole = chunks * CHUNK_TOKENS
    if chunks < 2:
        return _products(x[None], y[None])[0]
    total = _products(*(z[:whole].unflatten(0, (chunks, CHUNK_TOKENS)) for z in (x, y))).sum(0)
    return total if whole == x.shape[0] else total + _products(x[None, whole:], y[None, whole:])[0]


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Compute `x^T y` for each x `[N, T, rows]` and y `[N, T, columns]`, float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype != wide:
        return torch.bmm(x.mT, y, out_dtype=wide)
    return torch.bmm(x.mT.to(wide), y.to(wide))
