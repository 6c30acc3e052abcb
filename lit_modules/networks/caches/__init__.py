"""Generation caches: one transformers `CacheLayerMixin` per kind of token mixing, and compressed caches for any model.

`CompressedCache` and its settings are for `past_key_values`; `compressed` is a context in which `generate` uses them.
"""

from lit_modules.networks.caches.attention import AttentionCacheLayer
from lit_modules.networks.caches.compressed_cache import CompressedCache, LogQuantCache, compressed
from lit_modules.networks.caches.compressed_layer import CompressedCacheLayer
from lit_modules.networks.caches.recurrent import RecurrentCacheLayer
from lit_modules.networks.caches.selection import log_sparse_positions
from lit_modules.networks.caches.settings import CacheSettings, TensorSettings
from lit_modules.networks.caches.sliding import SlidingAttentionCacheLayer
from lit_modules.networks.caches.static import StaticAttentionCacheLayer

__all__ = [
    "AttentionCacheLayer",
    "CacheSettings",
    "CompressedCache",
    "CompressedCacheLayer",
    "LogQuantCache",
    "RecurrentCacheLayer",
    "SlidingAttentionCacheLayer",
    "StaticAttentionCacheLayer",
    "TensorSettings",
    "compressed",
    "log_sparse_positions",
]
