"""Layers that stay softmax attention, on this project's kernels and caches."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lit_modules.networks.caches import (
    AttentionCacheLayer,
    CompressedCacheLayer,
    SlidingAttentionCacheLayer,
    StaticAttentionCacheLayer,
)
from lit_modules.networks.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.linearized.base import Rotary, SubstitutedAttention
from lit_modules.networks.linearized.ring_attention import cached_window_attention
from lit_modules.networks.positions import Positions


class SoftmaxAttention(SubstitutedAttention):
    """The stock layer's attention, with the adapters of its projections."""

    def new_cache(self, capacity: int | None = None) -> CacheLayerMixin:
        """Return an empty cache of all keys and values, or of those in the stock layer's window."""
        window = self.sliding_window
        if capacity is None:
            return AttentionCacheLayer() if window is None else SlidingAttentionCacheLayer(window)
        if window is None or capacity <= window:
            return StaticAttentionCacheLayer(capacity)
        return LinearizedCacheLayer(window)

    def takes(self, cache: CacheLayerMixin) -> bool:
        """Return whether a cache holds everything that this layer sees."""
        if isinstance(cache, SlidingAttentionCacheLayer | LinearizedCacheLayer):
            return cache.window == self.sliding_window
        if isinstance(cache, CompressedCacheLayer):
            return self.sliding_window is None
        return isinstance(cache, AttentionCacheLayer | StaticAttentionCacheLayer)

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
        """Compute attention over the whole document or the stock layer's window; see `SubstitutedAttention.student`."""
        if isinstance(cache, CompressedCacheLayer):
            kv_start = positions.kv_start
            padding = None if kv_start is None else kv_start.tolist
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = cache.attend(q, k, v, scale=self.scale, padding=padding, rotary=position_embeddings)
            return out.transpose(1, 2)
        q, k = self.rotate(q, k, position_embeddings)
        if cache is None:
            return self.softmax_attention(q, k, v, positions)
        if isinstance(cache, LinearizedCacheLayer):
            cache.start(k)
            out = cached_window_attention(q, k, v, cache, positions=positions, scale=self.scale)
            cache.update((), q.shape[1])
            return out
        _, first = cache.get_mask_sizes(q.shape[1])
        assert isinstance(cache, AttentionCacheLayer | StaticAttentionCacheLayer)
        # A cache of fixed capacity also returns its number of valid tokens.
        keys, values, held = cache.update(k, v)
        if first and positions.kv_start is not None:  # relative to the first key in the cache
            positions = positions._replace(kv_start=(positions.kv_start - first).clamp(min=0))
        return self.softmax_attention(q, keys, values, positions, kv_end=held)

    def _difference(self, *args: Any) -> None:
        """Return None: student and teacher are the same."""
