"""The cache of a linearized attention layer: states and a ring of the window's keys and values; constant in size."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_modules.networks.caches.recurrent import RecurrentCacheLayer


def delay_tokens(x: Tensor, tokens: int) -> Tensor:
    """Delay `x` `[B, T, ...]` by `tokens`, with zeros at the start."""
    return F.pad(x, (*(0, 0) * (x.ndim - 2), tokens, 0))[:, : x.shape[1]]


class LinearizedCacheLayer(RecurrentCacheLayer):
    """The past of one linearized layer, in constant memory.

    Slots 0 to sinks - 1 of the ring hold a row's first tokens after its padding; slot `sinks + t % window` holds token
    t. All operations read the token count from `counter` on the device, so that a decoding step can be captured once
    and replayed. Rings, counter and, in steps, states are updated in place.

    Args:
        window: tokens in the ring; 0 means no ring.
        sinks: first tokens of a row that the ring keeps too.
    """

    # Names of the device counters, including the tokens of the current step or not.
    counters_with_new: tuple[str, ...] = ()
    counters_before_new: tuple[str, ...] = ("counter",)
    counter: Tensor  # int32 [1]: tokens held, padding included; set by `start`

    def __init__(self, window: int, sinks: int = 0):
        super().__init__()
        self.window, self.sinks = window, sinks
        self.is_counted_elsewhere = False  # True if the caller advances the device counters
        self.ring_keys: Tensor | None = None  # [B, sinks + window, Hk, D], rotated
        self.ring_values: Tensor | None = None  # [B, sinks + window, Hk, D]
        # Inputs of a delayed recurrence, [B, window + 1, ...] each, token t in slot t % (window + 1). The extra slot
        # lets a kernel write the new token while its other programs read the one that leaves.
        self.late: tuple[Tensor, ...] = ()

    def start(self, example: Tensor) -> None:
        """Record dtype and device from `example` and create the counter, at the first call only."""
        if not self.is_initialized:
            self.lazy_initialization(example)
            self.counter = torch.zeros(1, dtype=torch.int32, device=example.device)

    def rings(self) -> tuple[Tensor, Tensor]:
        """Return the ring's keys and values, which `append` makes."""
        assert self.ring_keys is not None
        assert self.ring_values is not None
        return self.ring_keys, self.ring_values

    def time(self, tokens: int) -> Tensor:
        """Return the positions `[tokens]` int64 of the next `tokens` tokens in their rows, padding included."""
        return self.counter + torch.arange(tokens, device=self.counter.device)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, kv_start: Tensor | None, *, after: int = 0) -> None:
        """Write the new tokens' rotated keys and values `[B, T, Hk, D]` into the ring.

        Args:
            kv_start: `[B]` int32, left padding of each row; None means no padding.
            after: tokens already written since `counter`.
        """
        self.start(keys)
        if self.ring_keys is None or self.ring_values is None:
            size = (keys.shape[0], self.sinks + self.window, *keys.shape[2:])
            self.ring_keys, self.ring_values = keys.new_zeros(size), values.new_zeros(size)
        time = self.time(keys.shape[1]) + after
        slots = self.sinks + time[-self.window :] % self.window
        for ring, new in ((self.ring_keys, keys), (self.ring_values, values)):
            ring.index_copy_(1, slots, new[:, -self.window :])
            if self.sinks:
                self._keep_sinks(ring, new, time[0], kv_start)

    def _keep_sinks(self, ring: Tensor, new: Tensor, begin: Tensor, kv_start: Tensor | None) -> None:
        """Write the new tokens that are among the first of their rows; the first new token is at `begin`."""
        tokens = new.shape[1]
        first = -begin.expand(len(new)) if kv_start is None else kv_start - begin
        place = first[:, None] + torch.arange(self.sinks, device=new.device)
        found = new[torch.arange(len(new), device=new.device)[:, None], place.clamp(0, tokens - 1)]
        among = ((place >= 0) & (place < tokens))[..., None, None]
        ring[:, : self.sinks] = torch.where(among, found, ring[:, : self.sinks])

    def delay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Store `inputs` `[B, T, ...]` of new tokens; return those of `window` tokens earlier, zeros at the start.

        Stored tensors carry no gradient.
        """
        self.start(inputs[0])
        slots = self.window + 1
        if not self.late:
            self.late = tuple(x.new_zeros(len(x), slots, *x.shape[2:]) for x in inputs)
        time = self.time(inputs[0].shape[1])
        leaving = tuple(self._earlier(held, (time + 1) % slots, x) for held, x in zip(self.late, inputs, strict=True))
        newest = time[-self.window :] % slots
        with torch.no_grad():
            for held, x in zip(self.late, inputs, strict=True):
                held.index_copy_(1, newest, x[:, -self.window :])
        return leaving

    def leaving(self, name: str, new: Tensor) -> Tensor:
        """Return the tensors of `window` tokens before `new` `[B, T, Hk, D]`, zeros at the start.

        Args:
            name: attribute of the ring that `append` will write `new` to.
        """
        ring = getattr(self, name)
        if ring is None:
            return delay_tokens(new, self.window)
        return self._earlier(ring, self.sinks + self.time(new.shape[1]) % self.window, new)

    def _earlier(self, ring: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        """Return `new` `[B, T, ...]` delayed by a window; the first tokens come from `slots` `[T]` of `ring`."""
        held = ring.index_select(1, slots[: self.window])
        return held if new.shape[1] <= self.window else torch.cat((held, new[:, : -self.window]), dim=1)

    def update(  # type: ignore[override]  # called by our mixers
        self, states: tuple[Tensor, ...], tokens: int
    ) -> tuple[Tensor, ...]:
        """Store `states`, float32 at least, after `tokens` more tokens; call last.

        A layer with only a window passes no states, after `start`.
        """
        if states:
            self.start(states[0])
        if not self.is_counted_elsewhere:
            self.counter += tokens
        return super().update(states, tokens)

    def reset(self) -> None:
        """Drop all content and free its memory."""
        self.__init__(self.window, self.sinks)  # type: ignore[misc]  # no subclass has other arguments

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        super()._map(move)
        self.late = tuple(move(held) for held in self.late)
        if self.ring_keys is not None:
            self.ring_keys = move(self.ring_keys)
        if self.ring_values is not None:
            self.ring_values = move(self.ring_values)
