"""The cache of a linearized attention layer: its states, and rings of what its window still sees; constant in size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_modules.networks.caches.recurrent import RecurrentCacheLayer


def later(x: Tensor, tokens: int) -> Tensor:
    """`x` `[B, T, ...]` so many tokens later, zeros at first."""
    return F.pad(x, (*(0, 0) * (x.ndim - 2), tokens, 0))[:, : x.shape[1]]


class LinearizedCacheLayer(RecurrentCacheLayer):
    """What the tokens so far have left in one linearized layer, however many they were.

    Slots 0 to sinks - 1 of the ring hold a row's first tokens behind its padding, slot `sinks + t % window` holds token
    t. Whatever depends on how many tokens came before reads `counter`, on the device, so that a step of decoding can be
    recorded once and replayed; rings, counter and, in steps, states are updated in place.

    Args:
        window: tokens that the ring holds; 0: none, and there is no ring.
        sinks: first tokens that it keeps as well.
    """

    # Names of what counts tokens on the device, those of a step included or not.
    counters_with_new: tuple[str, ...] = ()
    counters_before_new: tuple[str, ...] = ("counter",)

    def __init__(self, window: int, sinks: int = 0):
        super().__init__()
        self.window, self.sinks = window, sinks
        self.counter: Tensor | None = None  # int32 [1]: tokens held, padding included
        self.is_counted_elsewhere = False  # whether someone else moves the counters by new tokens
        self.ring_keys: Tensor | None = None  # [B, sinks + window, Hk, D], rotated
        self.ring_values: Tensor | None = None  # [B, sinks + window, Hk, D]
        # What waits for a recurrence that lags behind, [B, window + 1, ...] each, token t in slot t % (window + 1): a
        # kernel writes the new token where no program of it reads the one that leaves.
        self.late: tuple[Tensor, ...] = ()

    def start(self, example: Tensor) -> None:
        """Note dtype and device of a tensor like those to come, unless it is done."""
        if self.counter is None:
            self.lazy_initialization(example)
            self.counter = torch.zeros(1, dtype=torch.int32, device=example.device)

    def time(self, tokens: int) -> Tensor:
        """The places `[tokens]` int64 of so many new tokens in their rows, padding included."""
        return self.counter + torch.arange(tokens, device=self.counter.device)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, kv_start: Tensor | None, *, after: int = 0) -> None:
        """Write the new tokens' rotated keys and values `[B, T, Hk, D]` into the ring.

        Args:
            kv_start: `[B]` int32, padding on the left of each row; None: none.
            after: tokens since `counter` that have been written before these.
        """
        self.start(keys)
        if self.ring_keys is None:
            size = (keys.shape[0], self.sinks + self.window, *keys.shape[2:])
            self.ring_keys, self.ring_values = keys.new_zeros(size), values.new_zeros(size)
        time = self.time(keys.shape[1]) + after
        slots = self.sinks + time[-self.window :] % self.window
        for ring, new in ((self.ring_keys, keys), (self.ring_values, values)):
            ring.index_copy_(1, slots, new[:, -self.window :])
            if self.sinks:
                self._keep_sinks(ring, new, time[0], kv_start)

    def _keep_sinks(self, ring: Tensor, new: Tensor, begin: Tensor, kv_start: Tensor | None) -> None:
        """Write those of the new tokens, the first of them at `begin`, that are the first of their rows."""
        tokens = new.shape[1]
        first = -begin.expand(len(new)) if kv_start is None else kv_start - begin
        place = first[:, None] + torch.arange(self.sinks, device=new.device)
        found = new[torch.arange(len(new), device=new.device)[:, None], place.clamp(0, tokens - 1)]
        among = ((place >= 0) & (place < tokens))[..., None, None]
        ring[:, : self.sinks] = torch.where(among, found, ring[:, : self.sinks])

    def delay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep `inputs` `[B, T, ...]` of new tokens; returns those of as many tokens, `window` earlier, zeros at first.

        No gradient flows through what is kept.
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
        """What is in the place of `new` `[B, T, Hk, D]` as many tokens earlier as the window is long, zeros at first.

        Args:
            name: of the ring that `append` will write it to.
        """
        ring = getattr(self, name)
        if ring is None:
            return later(new, self.window)
        return self._earlier(ring, self.sinks + self.time(new.shape[1]) % self.window, new)

    def _earlier(self, ring: Tensor, slots: Tensor, new: Tensor) -> Tensor:
        """`new` `[B, T, ...]` a window later, after what is held: `slots` `[T]` is where, for its first tokens."""
        held = ring.index_select(1, slots[: self.window])
        return held if new.shape[1] <= self.window else torch.cat((held, new[:, : -self.window]), dim=1)

    def update(self, states: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
        """Hold `states`, float32 at least, which so many more tokens have led to; the last thing to do with them.

        A layer that has a window alone gives none, after `start`.
        """
        if states:
            self.start(states[0])
        if not self.is_counted_elsewhere:
            self.counter += tokens
        return super().update(states, tokens)

    def reset(self) -> None:
        """Forget everything, memory included."""
        self.__init__(self.window, self.sinks)

    def _map(self, move) -> None:
        super()._map(move)
        self.late = tuple(move(held) for held in self.late)
        if self.ring_keys is not None:
            self.ring_keys, self.ring_values = move(self.ring_keys), move(self.ring_values)
