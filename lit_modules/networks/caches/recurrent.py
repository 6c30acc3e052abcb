"""The cache of a recurrent layer: its states and the last inputs of its short convolutions; constant in size."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_modules.networks.caches.counted import CountedCacheLayer


class RecurrentCacheLayer(CountedCacheLayer):
    """The past of one recurrent layer, in constant memory.

    `gated_recurrence_step` may update the states in place. Cached tensors carry no gradient. `crop` can remove all
    tokens or none.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.states: tuple[Tensor, ...] | None = None  # [B, H, Dk, Dv] float32 (float64) each
        self.tails: dict[str, Tensor] = {}  # [B, width - 1, channels] of each short convolution

    def lazy_initialization(self, *states: Tensor) -> None:
        """Record the dtype and the device of these states."""
        self.dtype, self.device = states[0].dtype, states[0].device
        self.is_initialized = True

    def update(  # type: ignore[override]  # called by our mixers
        self, states: tuple[Tensor, ...], tokens: int
    ) -> tuple[Tensor, ...]:
        """Store and return `states` `[B, H, Dk, Dv]`, float32 at least, after `tokens` more tokens."""
        if not self.is_initialized:
            self.lazy_initialization(*states)
        self.states = tuple(state.detach() for state in states)
        self.length += tokens
        return self.states

    def update_tail(self, name: str, inputs: Tensor, size: int) -> Tensor:
        """Keep the last `size` inputs of the convolution `name`; return the previous ones, zeros at the start.

        Args:
            inputs: `[B, T, channels]`.

        Returns:
            `[B, size, channels]`.
        """
        before = self.tails.get(name)
        if before is None:
            before = inputs.new_zeros(inputs.shape[0], size, inputs.shape[2])
        # A copy, because a view would keep the whole prompt in memory.
        self.tails[name] = torch.cat((before, inputs.detach()), dim=1)[:, inputs.shape[1] :].clone()
        return before

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a positive number is the length to keep): all or none.

        Raises:
            ValueError: if some but not all tokens would be removed.
        """
        removed = self._removed(tokens_to_remove)
        if removed >= self.length:
            self.reset()
        elif removed:
            raise ValueError(
                f"crop({tokens_to_remove}) takes back {removed} of {self.length} tokens, which a recurrent state "
                "cannot: generate without assistant_model and prompt_lookup_num_tokens"
            )

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        if self.states is not None:
            self.states = tuple(move(state) for state in self.states)
        self.tails = {name: move(tail) for name, tail in self.tails.items()}
