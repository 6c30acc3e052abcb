"""Generation caches: one transformers `CacheLayerMixin` per kind of token mixing."""

from lit_modules.networks.caches.attention import AttentionCacheLayer
from lit_modules.networks.caches.recurrent import RecurrentCacheLayer
from lit_modules.networks.caches.selection import log_sparse_positions
from lit_modules.networks.caches.sliding import SlidingAttentionCacheLayer
from lit_modules.networks.caches.static import StaticAttentionCacheLayer

__all__ = [
    "AttentionCacheLayer",
    "RecurrentCacheLayer",
    "SlidingAttentionCacheLayer",
    "StaticAttentionCacheLayer",
    "log_sparse_positions",
]
