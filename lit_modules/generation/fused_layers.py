"""A decoder layer's one-token step in four matrix products, with the surrounding operations fused into them.

Queries, keys and values are one product with the preceding norm; the output projection adds the residual; gate and up
projection are one product with their norm and SwiGLU; the down projection adds the residual. Between the first two, the
attention module's own code runs.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kernels.small_batch_linear import small_batch_linear
from lit_modules.networks.linearized.base import Rotary, SubstitutedAttention
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions

FEW_ROWS = 16
"""Rows up to which one kernel for a product and its neighbors is the fastest; see `FusedProduct`."""
SMALL_MATRIX = 2**25
"""Bytes of a matrix below which that holds for twice as many rows: launches take as long as reading it."""

ATTENTION = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
GATED = (("gate_up_proj",), ("gate_proj", "up_proj"))
"""Names of projections that read the same input, in order; some model families have them merged."""


class FusedProduct(NamedTuple):
    """One or several concatenated linear layers, and the norm before them."""

    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0

    def __call__(self, x: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
        """Apply to `x` `[rows, K]`; arguments as in `small_batch_linear`."""
        if len(x) > (2 * FEW_ROWS if self.weight.nbytes < SMALL_MATRIX else FEW_ROWS):
            return self.in_parts(x, residual, gated)
        return small_batch_linear(
            x,
            self.weight,
            self.bias,
            norm_weight=self.norm_weight,
            norm_eps=self.norm_eps,
            residual=residual,
            gated=gated,
        )

    def in_parts(self, x: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
        """Apply by torch's own operations, which are faster for many rows."""
        if self.norm_weight is not None:
            x = F.rms_norm(x, x.shape[-1:], self.norm_weight, self.norm_eps)
        if residual is not None and self.bias is None and not gated:
            return torch.addmm(residual, x, self.weight.mT)
        out = F.linear(x, self.weight, self.bias)
        if gated:
            gate, up = out.chunk(2, -1)
            out = F.silu(gate) * up
        return out if residual is None else out + residual


class FusedLayer(NamedTuple):
    """The parts of a layer's fused step."""

    attention: SubstitutedAttention
    qkv: FusedProduct
    out: FusedProduct
    gate_up: FusedProduct
    down: FusedProduct


def fused_layers(model: Any) -> list[FusedLayer | None]:
    """Return the fused layers of `model`; None for a layer that must run unfused.

    That is a layer that differs from Llama's in these parts (adapters, other norms or activations). Matrices that are
    read together become views of one tensor, here and in all modules that share them, so no second copy is held.
    """
    usual = model.config.hidden_act in ("silu", "swish")
    dtype = model.model.embed_tokens.weight.dtype
    return [_fused(layer, dtype) if usual else None for layer in model.model.layers]


def fused_head(model: Any) -> FusedProduct | None:
    """Return the final norm and the head fused, or None as in `fused_layers`."""
    head, norm = model.lm_head, model.model.norm
    dtype = model.model.embed_tokens.weight.dtype
    epsilon = _epsilon(norm, dtype)
    if epsilon is None or not are_plain([head], dtype):
        return None
    return FusedProduct(head.weight, head.bias, norm.weight, epsilon)


def fused_layer_step(
    layer: FusedLayer, hidden: Tensor, positions: Positions, tables: Rotary, cache: CacheLayerMixin
) -> Tensor:
    """Return `hidden` `[B, 1, hidden_size]` after the layer, in `student` mode."""
    attention, heads = layer.attention, layer.attention.heads
    rows = hidden[:, 0]
    widths = [count * heads.dim for count in (heads.query, heads.key, heads.key)]
    q, k, v = (x.unflatten(-1, (-1, heads.dim))[:, None] for x in layer.qkv(rows).split(widths, dim=-1))
    if hasattr(attention, "q_norm"):
        # Under autocast, norms with float32 weights return float32.
        q, k = attention.q_norm(q).to(v.dtype), attention.k_norm(k).to(v.dtype)
    nothing: Any = None  # in place of the normalized hidden states, which no fused attention reads
    mixed = attention.student(nothing, q, k, v, positions, tables, cache)
    rows = layer.out(mixed.flatten(1), residual=rows)
    rows = layer.down(layer.gate_up(rows, gated=True), residual=rows)
    return rows[:, None]


def _fused(layer: Any, dtype: torch.dtype) -> FusedLayer | None:
    """Fuse the layer for hidden states of `dtype`, or return None."""
    attention, mlp = layer.self_attn, layer.mlp
    if getattr(attention, "gate_proj", None) is not None:  # gates that read the hidden states
        return None
    qkv, gate_up = _of(attention, ATTENTION), _of(mlp, GATED)
    if not are_plain([*qkv, attention.o_proj, *gate_up, mlp.down_proj], dtype):
        return None
    norms = ((layer.input_layernorm, qkv), (layer.post_attention_layernorm, gate_up))
    if not all(_epsilon(norm, dtype) is not None and _have_equal_biases(linears) for norm, linears in norms):
        return None
    before_qkv, before_gate_up = (
        FusedProduct(*side_by_side(linears), norm.weight, norm.variance_epsilon) for norm, linears in norms
    )
    out, down = (FusedProduct(linear.weight, linear.bias) for linear in (attention.o_proj, mlp.down_proj))
    return FusedLayer(attention, before_qkv, out, before_gate_up, down)


def _of(module: Any, choices: tuple[tuple[str, ...], ...]) -> list[Any]:
    names = next(names for names in choices if hasattr(module, names[0]))
    return [getattr(module, name) for name in names]


def are_plain(linears: list[nn.Module], dtype: torch.dtype) -> bool:
    """Return whether each is a plain linear layer of `dtype`."""
    return all(type(linear) is nn.Linear and linear.weight.dtype == dtype for linear in linears)


def _have_equal_biases(linears: list[nn.Module]) -> bool:
    return len({linear.bias is None for linear in linears}) == 1


def _epsilon(norm: nn.Module, dtype: torch.dtype) -> float | None:
    """Return the epsilon of an RMS norm of `dtype`, ours or as in Llama, told by that name; None of other norms."""
    epsilon = norm.eps if isinstance(norm, RMSNorm) else getattr(norm, "variance_epsilon", None)
    return None if epsilon is None or norm.weight.dtype != dtype else epsilon


@torch.no_grad()
def side_by_side(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases; the layers' own weights become views of the result."""
    weights = [linear.weight for linear in linears]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    follow = (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairwise(weights)
    )
    if all(weight.is_contiguous() for weight in weights) and all(follow):
        rows, (_, k) = sum(map(len, weights)), weights[0].shape
        return weights[0].detach().as_strided((rows, k), (k, 1)), bias
    whole = torch.cat(weights)
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    if whole.is_cuda:
        torch.cuda.empty_cache()  # the freed parts have sizes that nothing will request again
    return whole, bias
