"""The cache of an attention layer with a sliding window: the last keys and values, as far as the window reaches."""

import torch
from torch import Tensor

from lit_modules.networks.caches.attention import AttentionCacheLayer


class SlidingAttentionCacheLayer(AttentionCacheLayer):
    """Keys and values of the last `window - 1` tokens: what the next token sees beside itself.

    Tensors are `[batch, time, heads, width]`. Tokens can be taken back until the first one has left the window.

    Args:
        window: tokens that a token sees, itself included.
    """

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor, None]:
        """Append keys `[B, T, Hk, Dk]` and values `[B, T, Hv, Dv]`, and let go of what has left the window.

        Returns:
            What the new tokens see: keys `[B, S, Hk, Dk]` and values `[B, S, Hv, Dv]`, whose first position is the one
            that `get_mask_sizes` gave before; and None, for there are no gates.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.keys, self.values
        seen = tuple(torch.cat(pair, dim=1) for pair in zip(held, (key_states, value_states), strict=True))
        self.length += key_states.shape[1]
        self.keys, self.values = (self._last(states.detach()) for states in seen)
        return *seen, None

    def _last(self, states: Tensor) -> Tensor:
        left = max(0, states.shape[1] - self.window + 1)
        # A copy where much is let go of, or a view would hold the whole prompt.
        return states[:, left:].clone() if left > 1 else states[:, left:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `query_length` new tokens will see, and the position of the first of them."""
        held = self.keys.shape[1] if self.is_initialized else 0
        return held + query_length, self.length - held

    def get_max_length(self) -> int:
        """-1: takes any number of tokens."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers

    def reset(self) -> None:
        """Forget everything, memory included."""
        self.__init__(self.window)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; a positive number is the length to keep.

        Raises:
            ValueError: some, but not all, where a token has left the window that would be seen again.
        """
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)
        if removed >= self.length:
            self.reset()
        elif removed and self.keys.shape[1] < self.length:
            raise ValueError(
                f"crop({tokens_to_remove}) takes back {removed} of {self.length} tokens, and a window of {self.window} "
                "no longer has what they saw: generate without assistant_model and prompt_lookup_num_tokens"
            )
        elif removed:
            self.length -= removed
            self.keys, self.values = (states[:, : self.length] for states in (self.keys, self.values))
