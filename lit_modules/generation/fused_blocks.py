"""The one-token step of this project's own blocks with attention, in few launches.

q, k, v     one product with the norm before it
or, with augmented queries
            k and v in one product with the norm, and the queries in two (see `AugmentedQueries`)
cache       queries and keys are rotated, and keys and values written, in one launch (without rotation, in two)
attention   a split and, where a row's keys are divided, a join
output      one product with the residual; the MLP is two more, as in `fused_layers`
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kernels import forgetting_attention
from kernels.packed_kv import rotate_and_write, write_tokens
from lit_modules.generation.fused_layers import FusedProduct, are_plain, side_by_side
from lit_modules.networks.block import Block
from lit_modules.networks.caches import StaticAttentionCacheLayer
from lit_modules.networks.causal_lm import PalimpsestForCausalLM
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions
from lit_modules.networks.rotary import rotary_tables


class AugmentedQueries(NamedTuple):
    """Augmented queries (arXiv 2501.13629): `q = W_down (silu(W_gate h) * (W_up h))` with `h = W_q n(x)`.

    `h` is linear in n(x), so `W_gate h = (W_gate W_q) n(x)`, and likewise for W_up. With these two products of matrices
    W_q is not read in decoding: 3 d_aug hidden weights in two launches, in place of hidden^2 more in three.

    Attributes:
        first: W_q with the norm before it; None where it is folded into `gate_up`.
        gate_up: W_gate and W_up, with the norm before them where they are folded.
        down: W_down.
    """

    first: FusedProduct | None
    gate_up: FusedProduct
    down: FusedProduct

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the queries `[rows, hidden_size]` of hidden states `[rows, hidden_size]` before the norm."""
        inner = rows if self.first is None else self.first(rows)
        return self.down(self.gate_up(inner, gated=True))


class FusedAttention(NamedTuple):
    """An attention layer's step; see the module's docstring.

    Attributes:
        attention: the layer.
        projections: queries, keys and values with the norm before them; keys and values where queries are augmented.
        augmented: augmented queries, or None.
        out: the output projection.
    """

    attention: Attention
    projections: FusedProduct
    augmented: AugmentedQueries | None
    out: FusedProduct

    @property
    def queries(self) -> FusedProduct | AugmentedQueries:
        """The query projections alone."""
        if self.augmented is not None:
            return self.augmented
        return self.projections._replace(weight=self.projections.weight[: self.attention.q_proj.out_features])

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[B, 1, Hq, D]`, k `[B, 1, Hk, D]` and v `[B, 1, Hv, D]`, not rotated, of `rows` `[B, hidden]`."""
        layer = self.attention
        widths = [linear.out_features for linear in (layer.q_proj, layer.k_proj, layer.v_proj)]
        if self.augmented is None:
            parts = self.projections(rows).split(widths, dim=-1)
        else:
            parts = (self.augmented(rows), *self.projections(rows).split(widths[1:], dim=-1))
        q, k, v = (part.unflatten(-1, (-1, layer.head_dim))[:, None] for part in parts)
        return q, k, v

    def attend(self, q: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
        """Compute attention of rotated queries over the cache, `[B, hidden]`."""
        out = forgetting_attention(q, cache.keys, cache.values, kv_start=positions.kv_start, kv_end=cache.held)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out.flatten(1)

    def step(self, rows: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
        """Return `rows` `[B, hidden]` plus the layer's output; the cache's counters include the new token."""
        q, k, v = self.project(rows)
        mixed = self.attend(remember(q, k, v, positions, cache), positions, cache)
        return self.out(mixed, residual=rows)


class FusedBlock(NamedTuple):
    """A block's step: attention, and the MLP in two products, or None for a block without one."""

    attention: FusedAttention
    gate_up: FusedProduct | None
    down: FusedProduct | None

    def step(self, hidden: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
        """Return `hidden` `[B, 1, hidden_size]` after the block."""
        rows = self.attention.step(hidden[:, 0], positions, cache)
        if self.gate_up is not None and self.down is not None:
            rows = self.down(self.gate_up(rows, gated=True), residual=rows)
        return rows[:, None]


class BlockSteps:
    """The steps of all blocks of one of our own networks, fused where possible.

    Args:
        model: the network, in eval mode; its layers cache keys and values alone.
        cache: from `new_cache` with a capacity; holds the prompts.
        fused: fuse blocks where possible.
    """

    def __init__(self, model: PalimpsestForCausalLM, cache: Cache, *, fused: bool):
        self.config, self.blocks = model.config, list(model.model.layers)
        self.caches = [layer for layer in cache.layers if isinstance(layer, StaticAttentionCacheLayer)]
        self.fused = fused_blocks(model) if fused else [None] * len(self.blocks)
        self._held = cache.get_seq_length()
        self._step, self._fused_step = _block_step, FusedBlock.step

    def __call__(self, hidden: Tensor, positions: Positions) -> Tensor:
        """Return `hidden` `[B, 1, hidden_size]` after all blocks; the caches' counters are advanced elsewhere."""
        positions = rotated_positions(self.config, positions)
        for block, fused, cache in zip(self.blocks, self.fused, self.caches, strict=True):
            if fused is not None:
                hidden = self._fused_step(fused, hidden, positions, cache)
            else:
                hidden = self._step(block, hidden, positions, cache)
            cache.length = self._held  # a constant where the step is compiled; a replay does not change it either
        return hidden

    def compile(self) -> None:
        """Compile the steps."""
        self._step, self._fused_step = torch.compile(_block_step), torch.compile(FusedBlock.step)


def _block_step(block: nn.Module, hidden: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
    return block(hidden, positions, cache)


def remember(q: Tensor, k: Tensor, v: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
    """Write one token's keys and values `[B, 1, heads, D]` to the cache, rotated; return the rotated queries.

    The token's slot is the last of those that the cache's counter `held` has.
    """
    storage = (cache.keys.transpose(1, 2), cache.values.transpose(1, 2))
    new = (x.transpose(1, 2) for x in (q, k, v))
    if positions.rotary is not None:
        return rotate_and_write(*storage, *new, *positions.rotary, cache.held)[0].transpose(1, 2)
    for held, token in zip(storage, (k, v), strict=True):
        write_tokens(held, token.transpose(1, 2), cache.held)
    return q


def rotated_positions(config: PalimpsestConfig, positions: Positions) -> Positions:
    """Return `positions` with the rotary tables of a model, if it rotates."""
    if not config.rope:
        return positions
    return positions._replace(rotary=rotary_tables(positions.index, config.head_dim, config.rope_base))


def fused_blocks(model: PalimpsestForCausalLM) -> list[FusedBlock | None]:
    """Return the fused blocks of `model`; None for a block that must run unfused.

    That is one with more than projections around its attention, or with weights of another dtype than the embedding's.
    Matrices that are read together become views of one tensor. Folded matrices of augmented queries are copies, of
    `2 d_aug hidden` weights for each layer: they are made anew by each call, and live as long as its result.
    """
    dtype = model.model.embed_tokens.weight.dtype
    return [_fused_block(layer, dtype) if isinstance(layer, Block) else None for layer in model.model.layers]


def _fused_block(block: Block, dtype: torch.dtype) -> FusedBlock | None:
    if not isinstance(block.self_attn, Attention):
        return None
    attention = fused_attention(block.input_layernorm, block.self_attn, dtype)
    if attention is None or block.mlp is None:
        return None if attention is None else FusedBlock(attention, None, None)
    mlp, norm = block.mlp, block.post_attention_layernorm
    linears = [mlp.gate_proj, mlp.up_proj]
    if not (are_plain([*linears, mlp.down_proj], dtype) and norm.weight.dtype == dtype):
        return None
    return FusedBlock(attention, behind(norm, linears), FusedProduct(mlp.down_proj.weight, None))


def fused_attention(
    norm: RMSNorm, attention: Attention, dtype: torch.dtype, *, fold: bool = True
) -> FusedAttention | None:
    """Return the step of an attention layer and the norm before it, or None where it must run unfused.

    Args:
        norm: the norm before the layer.
        attention: the layer.
        dtype: of the hidden states.
        fold: fold W_q of augmented queries into the two matrices after it.
    """
    extras = (attention.q_norm, attention.k_norm, attention.o_norm, attention.g_proj)
    if not attention.caches_keys_and_values_alone or any(extra is not None for extra in extras):
        return None
    queries, augmented = attention.q_proj, attention.augmented_q
    linears = [queries, attention.k_proj, attention.v_proj]
    inner = [] if augmented is None else [augmented.gate_proj, augmented.up_proj, augmented.down_proj]
    if not are_plain([*linears, *inner, attention.o_proj], dtype) or norm.weight.dtype != dtype:
        return None
    out = FusedProduct(attention.o_proj.weight, None)
    if augmented is None:
        return FusedAttention(attention, behind(norm, linears), None, out)
    down = FusedProduct(augmented.down_proj.weight, None)
    gate_up = FusedProduct(side_by_side([augmented.gate_proj, augmented.up_proj])[0], None)
    if fold:
        folded = FusedProduct(fold_queries(gate_up.weight, queries.weight), None, norm.weight, norm.eps)
        own = AugmentedQueries(None, folded, down)
    else:
        own = AugmentedQueries(behind(norm, [queries]), gate_up, down)
    return FusedAttention(attention, behind(norm, linears[1:]), own, out)


def behind(norm: RMSNorm, linears: list[nn.Linear]) -> FusedProduct:
    """Return the concatenated product of linear layers with the norm before them."""
    return FusedProduct(side_by_side(linears)[0], None, norm.weight, norm.eps)


@torch.no_grad()
def fold_queries(after: Tensor, queries: Tensor) -> Tensor:
    """Return `after @ queries`, `[N, hidden]`, in their dtype: computed in float32 at least, and rounded once."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    return (after.to(wide) @ queries.to(wide)).to(queries.dtype)
