"""The layers that stay softmax attention, on this project's kernels and caches."""

from torch import Tensor

from lit_modules.caches import AttentionCacheLayer
from lit_modules.networks.linearized.base import Rotary, SubstitutedAttention
from lit_modules.networks.positions import Positions


class SoftmaxAttention(SubstitutedAttention):
    """The stock layer's attention, with whatever adapters its projections have."""

    def new_cache(self) -> AttentionCacheLayer:
        """An empty cache of all keys and values."""
        return AttentionCacheLayer()

    def student(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: AttentionCacheLayer | None,
    ) -> Tensor:
        """Attention over the whole document, or the stock layer's window; as `SubstitutedAttention.student`."""
        q, k = self.rotate(q, k, position_embeddings)
        if cache is None:
            return self.softmax_attention(q, k, v, positions)
        # A cache of fixed room says how much of it is held.
        keys, values, held = cache.update(k, v)
        return self.softmax_attention(q, keys, values, positions, kv_end=held)

    def _difference(self, *args) -> None:
        """There is none: the teacher's attention is the layer's own."""
