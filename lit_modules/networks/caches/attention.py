"""The full cache of an attention layer: every key, value and forget gate, growing by doubling."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_modules.networks.caches.counted import CountedCacheLayer
from lit_modules.networks.caches.shifted import REWINDABLE, UnshiftedStates

REBASE_EVERY = 256
"""Tokens after which the sums of log gates are rebased to the newest token."""


class AttentionCacheLayer(UnshiftedStates, CountedCacheLayer):
    """Keys, values and summed log forget gates of one layer, and the last unshifted keys and values.

    Keys and values may differ in heads and width. Nothing is repeated for query heads that share them.

    Tensors are `[batch, time, heads, ...]`, not Hugging Face's `[batch, heads, time, ...]`. Storage is larger than its
    content, is written in place, and at least doubles when full, so T tokens cost O(T) copies. Cached tensors carry no
    gradient.

    Attention uses only differences of the sums, so their origin is free. It stays near the newest token, because a
    float32 near -10000 cannot resolve gates of 0.999.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.cumulative: Tensor | None = None  # [B, capacity, H] float32, None without a gate
        self.positions: Tensor | None = None  # [B, capacity] int32, None unless keys are rotated when read
        self._since_rebase = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate empty storage like these `[B, T, heads, width]`: batch size, heads, widths, dtype and device."""
        self.keys = key_states.new_empty(key_states.shape[0], 0, *key_states.shape[2:])
        self.values = value_states.new_empty(value_states.shape[0], 0, *value_states.shape[2:])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(  # type: ignore[override]  # called by our mixers
        self, key_states: Tensor, value_states: Tensor, log_forget: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys `[B, T, Hk, Dk]`, values `[B, T, Hv, Dv]` and log forget gates `[B, T, Hq]` (None without).

        Returns:
            Views of all cached tokens: keys `[B, S, Hk, Dk]`, values `[B, S, Hv, Dv]`, and the sum of the log gates up
            to each token `[B, S, Hq]`, in log_forget's dtype and up to a constant per row and head, or None.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.length, self.length + key_states.shape[1]
        self.keys = _fitting(self.keys, start, stop)
        self.values = _fitting(self.values, start, stop)
        self.keys[:, start:stop] = key_states.detach()
        self.values[:, start:stop] = value_states.detach()
        if log_forget is not None:
            self._append_gates(log_forget.detach(), start, stop)
        self.length = stop
        cumulative = None if self.cumulative is None else self.cumulative[:, :stop]
        return self.keys[:, :stop], self.values[:, :stop], cumulative

    def update_positions(self, positions: Tensor) -> Tensor:
        """Append the positions `[B, T]` of keys that are cached unrotated; call before `update`.

        Returns:
            A view `[B, S]` int32 of the positions of all tokens, the new ones included.
        """
        start, stop = self.length, self.length + positions.shape[1]
        if self.positions is None:
            self.positions = positions.new_empty(positions.shape[0], 0, dtype=torch.int32)
        self.positions = _fitting(self.positions, start, stop)
        self.positions[:, start:stop] = positions
        return self.positions[:, :stop]

    def _append_gates(self, log_forget: Tensor, start: int, stop: int) -> None:
        if self.cumulative is None:
            self.cumulative = log_forget.new_empty(log_forget.shape[0], 0, log_forget.shape[2])
        self.cumulative = _fitting(self.cumulative, start, stop)
        # Float64, because this sum may run over a whole prompt.
        new = log_forget.double().cumsum(1)
        if start:
            new += self.cumulative[:, start - 1 : start]
        self._since_rebase += stop - start
        if self._since_rebase >= REBASE_EVERY:
            origin = new[:, -1:]
            self.cumulative[:, :start] -= origin.to(self.cumulative.dtype)
            new = new - origin
            self._since_rebase = 0
        self.cumulative[:, start:stop] = new

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number is the length to keep.

        Raises:
            ValueError: if the KV-shift would need an unshifted key that is no longer kept.
        """
        removed = self._removed(tokens_to_remove)
        if removed >= self.length:
            recording = self.record_past
            self.reset()
            self.record_past = recording
            return
        self._crop_unshifted(removed)
        self.length -= removed

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.keys, self.values = move(self.keys), move(self.values)
        if self.cumulative is not None:
            self.cumulative = move(self.cumulative)
        if self.positions is not None:
            self.positions = move(self.positions)
        self._map_unshifted(move)


def _fitting(storage: Tensor, held: int, needed: int) -> Tensor:
    """Return `storage` `[B, capacity, ...]` if `needed` tokens fit, else a copy with at least twice the capacity."""
    capacity = storage.shape[1]
    if needed <= capacity:
        return storage
    grown = storage.new_empty(storage.shape[0], max(2 * capacity, needed + REWINDABLE), *storage.shape[2:])
    grown[:, :held] = storage[:, :held]
    return grown
