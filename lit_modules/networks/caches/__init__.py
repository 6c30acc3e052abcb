"""What generation remembers: one transformers `CacheLayerMixin` for each way of attending to the past."""

from lit_modules.networks.caches.attention import AttentionCacheLayer
from lit_modules.networks.caches.recurrent import RecurrentCacheLayer
from lit_modules.networks.caches.sliding import SlidingAttentionCacheLayer
from lit_modules.networks.caches.static import StaticAttentionCacheLayer

__all__ = ["AttentionCacheLayer", "RecurrentCacheLayer", "SlidingAttentionCacheLayer", "StaticAttentionCacheLayer"]
