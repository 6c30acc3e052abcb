"""The cache of an attention layer with room for a fixed number of tokens, which a CUDA graph can write to."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class StaticAttentionCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in storage that never moves, and on the device how much of it is held.

    Where new tokens are written is read from the device at each call, so that a captured call is right for every token.
    Tensors are `[batch, time, heads, width]`. No gradient flows through what is cached.

    Args:
        capacity: tokens of a row, padding included.
    """

    is_sliding = False
    is_compileable = True
    is_croppable = True
    # Names of what counts tokens on the device, those of a step included or not.
    counters_with_new: tuple[str, ...] = ("held",)
    counters_before_new: tuple[str, ...] = ("place",)

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.place: Tensor | None = None  # int64 [1], where the next token goes
        self.held: Tensor | None = None  # int32 [B], the same number for each row, as attention asks for it
        self.is_counted_elsewhere = False  # whether someone else moves the counters by new tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make storage for the batch size, heads, widths, dtype and device of these `[B, T, heads, width]`."""
        self.keys, self.values = (
            states.new_zeros(states.shape[0], self.capacity, *states.shape[2:]) for states in (key_states, value_states)
        )
        self.place = torch.zeros(1, dtype=torch.int64, device=key_states.device)
        self.held = torch.zeros(key_states.shape[0], dtype=torch.int32, device=key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys `[B, T, Hk, Dk]` and values `[B, T, Hv, Dv]`.

        Returns:
            All storage, keys `[B, capacity, Hk, Dk]` and values `[B, capacity, Hv, Dv]`, and how many tokens of it are
            held, `kv_end` int32 `[B]`: the cache's own tensor, which the next update changes.

        Raises:
            ValueError: for more tokens than there is room for, as far as `length` counts: replays of a captured call
                are not counted.
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

    def get_seq_length(self) -> int:
        """Tokens held, padding included, without those of replays."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `query_length` new tokens will see, and the position of the first of them."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """The capacity."""
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in older transformers

    def reset(self) -> None:
        """Forget everything; the storage stays where it is."""
        self.length = 0
        if self.is_initialized:
            self.place.zero_()
            self.held.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; a positive number is the length to keep."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)
        removed = min(removed, self.length)
        self.length -= removed
        if self.is_initialized:
            self.place -= removed
            self.held -= removed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held (beam search)."""
        self._map(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._map(lambda states: states[indices])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._map(lambda states: states.to("cpu", non_blocking=True))
        if self.is_initialized:
            self.place = self.place.to("cpu")

    def prefetch(self) -> None:
        """Move everything back to the device it was made on."""
        self._map(lambda states: states.to(self.device, non_blocking=True))
        if self.is_initialized:
            self.place = self.place.to(self.device)

    def _map(self, move) -> None:
        """Rows of the batch, of all that has rows."""
        if self.is_initialized:
            self.keys, self.values, self.held = move(self.keys), move(self.values), move(self.held)
