"""The part that all cache layers share: the count of tokens, and the operations of generation on batch rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class CountedCacheLayer(CacheLayerMixin):
    """A cache layer that counts its tokens in `length`. Subclasses apply a function to their tensors in `_map`.

    `device` and `dtype` are set by `lazy_initialization`, and so are `keys` and `values` where a layer has them.
    """

    keys: Tensor
    values: Tensor
    device: torch.device
    dtype: torch.dtype

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` new tokens will see, and the position of the first key."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers

    def reset(self) -> None:
        """Drop all content and free its memory."""
        self.__init__()  # type: ignore[misc]  # subclasses with arguments have their own

    def _removed(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` removes: `-tokens_to_remove`, or all above a positive number to keep."""
        return -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row `beam_idx[i]` (beam search)."""
        self._map(lambda held: held.index_select(0, beam_idx.to(held.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._map(lambda held: held.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._map(lambda held: held[indices])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._map(lambda held: held.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to its original device."""
        self._map(lambda held: held.to(self.device, non_blocking=True))

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor with batch rows by what `move` makes of it."""
        raise NotImplementedError
