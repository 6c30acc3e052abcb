"""Shared parts of the recurrent mixers: state sizes, padding, convolutions and cache use."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from common.settings import SettingError
from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step
from kernels.gated_recurrence.forms import Recurrence
from lit_modules.networks.caches import RecurrentCacheLayer
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.positions import Positions
from lit_modules.networks.short_convolution import ShortConvolution

STEP_LENGTH = 16
"""Largest number of new tokens that run token by token; more run by chunks."""


class StateShape(NamedTuple):
    """Heads of a recurrent layer, and widths of one head's keys and values; a state is key x value."""

    heads: int
    key_dim: int
    value_dim: int


class RecurrentMixer(nn.Module):
    """A mixer with a decaying state of constant size per head; a subclass computes q, k, v and log_decay."""

    expand_value: ClassVar[float] = 1
    """Value channels of all heads over hidden_size, if the configuration gives None."""

    @classmethod
    def default_key_dim(cls, value_dim: int) -> int:
        """Return the width of a head's keys if the configuration gives no `state_dim`."""
        return value_dim

    @classmethod
    def state_shape(cls, config: PalimpsestConfig) -> StateShape:
        """Return the state sizes of `config` for this mixer.

        Raises:
            ValueError: if the heads do not divide the value channels.
        """
        heads = config.state_heads or config.num_heads
        expand = config.expand_value or cls.expand_value
        channels = round(expand * config.hidden_size, 6)
        if channels % heads:
            problem = (
                f"does not divide the {channels:g} value channels (expand_value={expand:g} times "
                f"hidden_size={config.hidden_size})"
            )
            key = "state_heads" if config.state_heads else "num_heads"
            raise SettingError(key, heads, "give state_heads that divide them", problem)
        value_dim = int(channels) // heads
        return StateShape(heads, config.state_dim or cls.default_key_dim(value_dim), value_dim)

    def __init__(self, config: PalimpsestConfig):
        super().__init__()
        self.shape = self.state_shape(config)
        self.convolutions: nn.ModuleDict | None = None
        self.look_back = (config.short_conv_width or 1) - 1  # preceding tokens that the convolutions see

    caches_keys_and_values_alone = False

    def new_cache(self) -> RecurrentCacheLayer:
        """Return an empty cache for this layer."""
        return RecurrentCacheLayer()

    def takes(self, cache: CacheLayerMixin) -> bool:
        """Return whether a cache is of the kind that this layer fills."""
        return type(cache) is RecurrentCacheLayer

    @staticmethod
    def new_convolutions(config: PalimpsestConfig, bias: bool = False, **channels: int) -> nn.ModuleDict | None:
        """Create one short convolution per name with the given channels; None without a `short_conv_width`."""
        width = config.short_conv_width
        if width is None:
            return None
        return nn.ModuleDict({name: ShortConvolution(count, width, bias) for name, count in channels.items()})

    def convolve(
        self, x: dict[str, Tensor], positions: Positions, cache: RecurrentCacheLayer | None
    ) -> dict[str, Tensor]:
        """Apply to each `x` `[B, T, channels]` the convolution of its name, if there are convolutions."""
        if self.convolutions is None:
            return x
        return {name: self.convolutions[name](inputs, positions.index, cache, name) for name, inputs in x.items()}

    def operation(
        self, inputs: Recurrence, positions: Positions, cache: RecurrentCacheLayer | None = None, *, scale: float = 1.0
    ) -> Tensor:
        """Run `gated_recurrence` on new tokens, starting from the cache and updating it; returns `[B, T, H, Dv]`.

        The gates are per key channel or per head: `decay_axis` and `bonus` are not passed on.
        """
        inputs = inputs._replace(v=without_padding(inputs.v, positions, cache))
        if cache is None:
            return gated_recurrence(*inputs, scale=scale, cu_seqlens=positions.cu_seqlens)[0]
        tokens = inputs.q.shape[1]
        if takes_steps(inputs, cache, positions) and cache.states is not None:  # the second is for mypy
            out = gated_recurrence_step(*inputs, *cache.states, scale=scale)
            cache.update(cache.states, tokens)
            return out
        (initial,) = cache.states or (None,)
        out, final = gated_recurrence(*inputs, scale=scale, initial_state=initial)
        cache.update((final,), tokens)
        return out

    def mixing_flops(self, length: int) -> int:
        """Return the operations per token of the forward pass, without the projections; independent of `length`.

        Five per element of the state (arXiv 2503.02130, table 6): decay, outer product, sum, and two for the read.
        """
        return 5 * self.shape.heads * self.shape.key_dim * self.shape.value_dim


def without_padding(x: Tensor, positions: Positions, cache: RecurrentCacheLayer | None) -> Tensor:
    """Zero the left padding of `x` `[B, T, H, D]`, the input that is written into the state.

    Nothing else needs a mask: the state is still empty there, so its decay has no effect.
    """
    if positions.kv_start is None:
        return x
    past = 0 if cache is None else cache.get_seq_length()
    time = torch.arange(past, past + x.shape[1], device=x.device)
    return x.masked_fill((time < positions.kv_start[:, None])[..., None, None], 0)


def takes_steps(inputs: tuple[Tensor, ...], cache: RecurrentCacheLayer, positions: Positions) -> bool:
    """Return whether the new tokens' `inputs` `[B, T, ...]` are few, follow a state and need no gradients.

    Raises:
        ValueError: for packed documents, because each has a separate state.
    """
    if positions.cu_seqlens is not None:
        raise ValueError("cu_seqlens with a cache: packed documents have a state each, set use_cache=False")
    few = inputs[0].shape[1] <= STEP_LENGTH
    return cache.states is not None and few and not any(x.requires_grad for x in inputs)
