"""Shared parts of the attention layers that replace stock ones: projections, modes and the teacher."""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from common.settings import SettingError
from kernels import forgetting_attention
from lit_modules.networks.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.linearized import lora_projections
from lit_modules.networks.linearized.families import family_of, head_counts
from lit_modules.networks.positions import Positions

if TYPE_CHECKING:
    from lit_modules.networks.linearized.settings import Linearization

MODES = ("student", "teacher", "transfer")

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[B, T, R]`, for the first R channels of a head."""


class StockAttention(Protocol):
    """What is read of a family's attention layer, besides the modules that are taken from it."""

    layer_idx: int
    scaling: float


class SubstitutedAttention(nn.Module):
    """Replacement of a stock attention layer, with the same weights under the same names.

    `mode` selects the output: "student", the replaced attention; "teacher", the stock attention, without adapters;
    "transfer", both from the same hidden states, returning the teacher's and storing the difference in `transfer_loss`.

    Args:
        attention: the stock layer, whose projections are reused.
        config: the model's configuration.
        settings: the linearization settings.
    """

    taken: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")
    """Names of the reused modules of the stock layer; not every family has all of them."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: StockAttention, config: PreTrainedConfig, settings: "Linearization"):
        super().__init__()
        self.settings, self.layer_idx = settings, attention.layer_idx
        self.heads, self.scale = head_counts(config), attention.scaling
        self.sliding_window = family_of(config).window(config, self.layer_idx)
        for name in self.taken:
            if hasattr(attention, name):
                self.add_module(name, getattr(attention, name))
        self.mode = "student"
        self.transfer_loss: Tensor | None = None

    def new_cache(self, capacity: int | None = None) -> CacheLayerMixin:
        """Return an empty cache of this layer's states and ring.

        Args:
            capacity: maximum tokens, in storage at a fixed address; None means no limit. A ring holds any number.
        """
        return LinearizedCacheLayer(self.settings.window, self.settings.sinks)

    def takes(self, cache: CacheLayerMixin) -> bool:
        """Return whether a cache is of the kind that this layer fills."""
        return isinstance(cache, LinearizedCacheLayer)

    def student(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: CacheLayerMixin | None,
    ) -> Tensor:
        """Compute the layer's own attention.

        Args:
            hidden: `[B, T, hidden_size]`.
            q: `[B, T, Hq, D]`, not rotated.
            k, v: `[B, T, Hk, D]`; k is not rotated.
            positions: positions of the tokens.
            position_embeddings: rotary tables for `rotate`.
            cache: a cache from `new_cache`, updated in place, or None.

        Returns:
            `[B, T, Hq, D]`.
        """
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        past_key_values: Cache | None = None,
        positions: Positions | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix `hidden_states` `[B, T, hidden_size]` over time, with the stock layer's signature.

        Raises:
            ValueError: if positions are missing, because the stack was called without the language model, or a cache
                comes with another mode than "student".
        """
        if positions is None:
            raise ValueError("positions are not given: call the language model, not its `model` alone")
        if past_key_values is not None and self.mode != "student":
            raise SettingError("mode", self.mode, "only the student remembers, set use_cache=False", "with a cache")
        if self.mode == "student":
            cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
            assert cache is None or isinstance(cache, CacheLayerMixin)
            q, k, v = self.project(hidden_states)
            out = self.student(hidden_states, q, k, v, positions, position_embeddings, cache)
            return lora_projections.project([self.o_proj], out.flatten(2))[0], None
        with torch.no_grad():
            taught = self.teacher(hidden_states, positions, position_embeddings)
            out = _without_adapter(self.o_proj)(taught.flatten(2))
        if self.mode == "transfer":
            self.transfer_loss = self._difference(hidden_states.detach(), taught, positions, position_embeddings)
        return out, None

    def teacher(self, hidden: Tensor, positions: Positions, position_embeddings: Rotary) -> Tensor:
        """Compute the stock layer's attention `[B, T, Hq, D]`, before its output projection, without adapters."""
        q, k, v = self.project(hidden, adapted=False)
        return self.softmax_attention(*self.rotate(q, k, position_embeddings), v, positions)

    def softmax_attention(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, kv_end: Tensor | None = None
    ) -> Tensor:
        """Compute softmax attention of rotated q and k, over the whole document or the stock layer's window."""
        out = forgetting_attention(
            q,
            k,
            v,
            scale=self.scale,
            window=self.sliding_window,
            cu_seqlens=positions.cu_seqlens,
            kv_start=positions.kv_start,
            kv_end=kv_end,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    def project(self, hidden: Tensor, *, adapted: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, T, Hq, D]`, keys and values `[B, T, Hk, D]`, normalized if the family does so.

        Args:
            hidden: `[B, T, hidden_size]`.
            adapted: include peft's adapters of the projections, if any.
        """
        fused = hasattr(self, "qkv_proj")
        modules = [self.qkv_proj] if fused else [self.q_proj, self.k_proj, self.v_proj]
        if adapted:
            projected = lora_projections.project(modules, hidden)
        else:
            projected = [_without_adapter(module)(hidden) for module in modules]
        if fused:
            widths = [heads * self.heads.dim for heads in (self.heads.query, self.heads.key, self.heads.key)]
            projected = projected[0].split(widths, dim=-1)
        q, k, v = (x.unflatten(-1, (-1, self.heads.dim)) for x in projected)
        if hasattr(self, "q_norm"):
            # Under autocast, norms with float32 weights return float32.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, position_embeddings: Rotary) -> tuple[Tensor, Tensor]:
        """Rotate the first R channels of q and k `[B, T, H, D]`, where R is the width of the tables."""
        return _rotated(q, position_embeddings), _rotated(k, position_embeddings)

    def _difference(
        self, hidden: Tensor, taught: Tensor, positions: Positions, position_embeddings: Rotary
    ) -> Tensor | None:
        """Return the mean squared difference between student and teacher attention, float32."""
        q, k, v = self.project(hidden)
        learned = self.student(hidden, q, k, v, positions, position_embeddings, None)
        return F.mse_loss(learned.float(), taught.float())


def _rotated(x: Tensor, tables: Rotary) -> Tensor:
    cosine, sine = (table.unsqueeze(2).to(x.dtype) for table in tables)
    width = cosine.shape[-1]
    turned = x[..., :width]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _without_adapter(module: nn.Module) -> nn.Module:
    """Return the module that peft wrapped, or the module itself."""
    return getattr(module, "base_layer", module)
