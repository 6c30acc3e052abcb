"""What generation remembers: one transformers `CacheLayerMixin` for each way of attending to the past."""

from lit_modules.caches.attention import AttentionCacheLayer
from lit_modules.caches.recurrent import RecurrentCacheLayer

__all__ = ["AttentionCacheLayer", "RecurrentCacheLayer"]
