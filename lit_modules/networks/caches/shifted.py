"""The unshifted keys and values that KV-shift needs of the tokens before, as part of a cache layer."""

from collections.abc import Callable

import torch
from torch import Tensor

REWINDABLE = 64
"""Tokens whose unshifted key and value are kept; `crop` can remove one fewer."""


class UnshiftedStates:
    """The last keys and values before KV-shift (arXiv 2503.02130, section 3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.unshifted: tuple[Tensor, ...] | None = None  # k~ and v~, [B, n, H, D], None without KV-shift
        self.record_past = False

    def update_unshifted(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor | None, ...]:
        """Append unshifted keys and values `[B, T, H, D]`; return their predecessors `[B, H, D]`, None at the start.

        All are kept after `activate_past_recording`, otherwise the last `REWINDABLE`.
        """
        new: tuple[Tensor, ...] = (key_states.detach(), value_states.detach())
        last: tuple[Tensor | None, ...] = (None, None)
        if self.unshifted is not None:
            last = tuple(states[:, -1] for states in self.unshifted)
            new = tuple(torch.cat(pair, dim=1) for pair in zip(self.unshifted, new, strict=True))
        self.unshifted = new
        if not self.record_past:
            self._trim_unshifted()
        return last

    def activate_past_recording(self) -> None:
        """Keep all unshifted keys and values from now on, so that `crop` can remove any number of tokens."""
        self.record_past = True

    def _check_unshifted(self, removed: int) -> None:
        """Raise ValueError if so many tokens cannot be taken back."""
        if self.unshifted is not None and removed >= self.unshifted[0].shape[1]:
            raise ValueError(
                f"crop(-{removed}) takes back {removed} tokens, but KV-shift can take back "
                f"{self.unshifted[0].shape[1] - 1}: call activate_past_recording() before the tokens are added"
            )

    def _crop_unshifted(self, removed: int) -> None:
        """Take back tokens."""
        if self.unshifted is not None:
            self._check_unshifted(removed)
            kept = self.unshifted[0].shape[1] - removed
            self.unshifted = tuple(states[:, :kept] for states in self.unshifted)
            self._trim_unshifted()

    def _trim_unshifted(self) -> None:
        if self.unshifted is not None and self.unshifted[0].shape[1] > REWINDABLE:
            # A copy, because a view would keep the whole prompt in memory.
            self.unshifted = tuple(states[:, -REWINDABLE:].clone() for states in self.unshifted)

    def _map_unshifted(self, move: Callable[[Tensor], Tensor]) -> None:
        if self.unshifted is not None:
            self.unshifted = tuple(move(states) for states in self.unshifted)
