"""The cache of an attention layer with fixed capacity, which a CUDA graph can write to."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_modules.networks.caches.counted import CountedCacheLayer


class StaticAttentionCacheLayer(CountedCacheLayer):
    """Keys and values of one layer in storage at a fixed address, with the fill level on the device.

    Each call reads its write position from the device, so that a captured call is correct for every token. Tensors are
    `[batch, time, heads, width]`. Cached tensors carry no gradient.

    Args:
        capacity: maximum tokens per row, padding included.
    """

    is_sliding = False
    is_compileable = True
    is_croppable = True
    # Names of the device counters, including the tokens of the current step or not.
    counters_with_new: tuple[str, ...] = ("held",)
    counters_before_new: tuple[str, ...] = ("place",)
    # Set by lazy_initialization.
    place: Tensor  # int64 [1], slot of the next token
    held: Tensor  # int32 [B], the same for each row, as attention expects

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.is_counted_elsewhere = False  # True if the caller advances the device counters

    @classmethod
    def around(cls, keys: Tensor, values: Tensor, length: int) -> "StaticAttentionCacheLayer":
        """Return a cache that holds the first `length` tokens of keys and values `[B, capacity, heads, width]`."""
        cache = cls(keys.shape[1])
        cache.keys, cache.values, cache.length = keys, values, length
        cache.place = torch.full((1,), length, dtype=torch.int64, device=keys.device)
        cache.held = torch.full((len(keys),), length, dtype=torch.int32, device=keys.device)
        cache.dtype, cache.device, cache.is_initialized = keys.dtype, keys.device, True
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage with the batch size, heads, widths, dtype and device of these `[B, T, heads, width]`."""
        self.keys, self.values = (
            states.new_zeros(states.shape[0], self.capacity, *states.shape[2:]) for states in (key_states, value_states)
        )
        self.place = torch.zeros(1, dtype=torch.int64, device=key_states.device)
        self.held = torch.zeros(key_states.shape[0], dtype=torch.int32, device=key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(  # type: ignore[override]  # called by our mixers
        self, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys `[B, T, Hk, Dk]` and values `[B, T, Hv, Dv]`.

        Returns:
            The whole storage, keys `[B, capacity, Hk, Dk]` and values `[B, capacity, Hv, Dv]`, and its number of valid
            tokens, `kv_end` int32 `[B]`. The next update changes all three in place.

        Raises:
            ValueError: if the tokens exceed the capacity. Replays of a captured call are not counted.
        """
        tokens = key_states.shape[1]
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"{self.length + tokens} tokens are more than the cache's capacity={self.capacity}: make it for the "
                "prompt and all new tokens"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self.place if tokens == 1 else self.place + torch.arange(tokens, device=self.place.device)
        self.keys.index_copy_(1, places, key_states.detach())
        self.values.index_copy_(1, places, value_states.detach())
        if not self.is_counted_elsewhere:
            self.place += tokens
            self.held += tokens
        self.length += tokens
        return self.keys, self.values, self.held

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in older transformers

    def reset(self) -> None:
        """Drop all content; the storage keeps its address."""
        self.length = 0
        if self.is_initialized:
            self.place.zero_()
            self.held.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number is the length to keep."""
        removed = min(self._removed(tokens_to_remove), self.length)
        self.length -= removed
        if self.is_initialized:
            self.place -= removed
            self.held -= removed

    def offload(self) -> None:
        """Move everything to the CPU."""
        super().offload()
        if self.is_initialized:
            self.place = self.place.to("cpu")

    def prefetch(self) -> None:
        """Move everything back to its original device."""
        super().prefetch()
        if self.is_initialized:
            self.place = self.place.to(self.device)

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Apply `move` to every tensor with batch rows."""
        if self.is_initialized:
            self.keys, self.values, self.held = move(self.keys), move(self.values), move(self.held)
