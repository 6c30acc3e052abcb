"""The cache of a sliding-window attention layer: the keys and values that the window still reaches."""

import torch
from torch import Tensor

from lit_modules.networks.caches.attention import AttentionCacheLayer


class SlidingAttentionCacheLayer(AttentionCacheLayer):
    """Keys and values of the last `window - 1` tokens, which the next token sees in addition to itself.

    Tensors are `[batch, time, heads, width]`. `crop` can remove tokens until the first one has left the window.

    Args:
        window: number of tokens that a token sees, itself included.
    """

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def update(  # type: ignore[override]  # a window has no gates
        self, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Append keys `[B, T, Hk, Dk]` and values `[B, T, Hv, Dv]`, and drop those that left the window.

        Returns:
            Keys `[B, S, Hk, Dk]` and values `[B, S, Hv, Dv]` that the new tokens see, starting at the position that
            `get_mask_sizes` returned before, and None because there are no gates.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = torch.cat((self.keys, key_states), dim=1), torch.cat((self.values, value_states), dim=1)
        self.length += key_states.shape[1]
        self.keys, self.values = self._last(keys.detach()), self._last(values.detach())
        return keys, values, None

    def _last(self, states: Tensor) -> Tensor:
        left = max(0, states.shape[1] - self.window + 1)
        # A copy if many tokens are dropped, because a view would keep the whole prompt in memory.
        return states[:, left:].clone() if left > 1 else states[:, left:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` new tokens will see, and the position of the first key."""
        held = self.keys.shape[1] if self.is_initialized else 0
        return held + query_length, self.length - held

    def reset(self) -> None:
        """Drop all content and free its memory."""
        self.__init__(self.window)  # type: ignore[misc]  # no subclass has other arguments

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number is the length to keep.

        Raises:
            ValueError: if some but not all tokens would be removed, after tokens have left the window.
        """
        removed = self._removed(tokens_to_remove)
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
