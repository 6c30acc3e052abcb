"""What generation remembers: one transformers `CacheLayerMixin` for each way of attending to the past."""

from lit_modules.caches.attention import AttentionCacheLayer

__all__ = ["AttentionCacheLayer"]
