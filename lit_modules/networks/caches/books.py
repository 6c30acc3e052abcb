"""What the layers of one compressed cache share: the ledgers, and what the current tokens do."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_modules.networks.caches.ledger import Ledger
from lit_modules.networks.caches.moves import Array, Move, match
from lit_modules.networks.caches.replayed_rolls import Layer, ReplayedRolls
from lit_modules.networks.caches.settings import CacheSettings


class Books:
    """The bookkeeping of one cache. Its first layer begins a step; the others join it.

    Args:
        settings: of the cache.
        capacity: tokens of a row in storage at fixed addresses; None: storage grows.
    """

    def __init__(self, settings: CacheSettings, capacity: int | None = None):
        self.settings, self.capacity = settings, capacity
        keys, values = (settings.partition(tensor) for tensor in (settings.keys, settings.values))
        self.apart = keys != values
        self.keys, self.values = (
            Ledger(*partition, packs=tensor.bits != 0, tracks=self.apart)
            for partition, tensor in ((keys, settings.keys), (values, settings.values))
        )
        if not self.apart:
            self.values = self.keys
        self.layers: list[Layer] = []
        self.model = ""  # for stock models: what the cache was made for
        self.moves: tuple[Move, Move] | None = None
        self.rolls = ReplayedRolls()
        self.is_called_by_hand = False  # whether `prepare_step` is called before each decoding step
        self._link: tuple[tuple[int, ...], Tensor] | None = None
        self._rolls_late = False  # whether layers wait with the last move's roll until the next step

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return self.keys.length

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The one ledger, or those of the keys and of the values."""
        return (self.keys, self.values) if self.apart else (self.keys,)

    def step(
        self,
        layer: Layer,
        batch: int,
        tokens: int,
        device: torch.device,
        padding: Callable[[], Sequence[int]] | None = None,
    ) -> tuple[Move, Move]:
        """Return the moves of keys and values for new tokens; the first layer of the cache begins the step.

        Args:
            layer: the layer that asks.
            padding: as in `Ledger.advance`.

        Raises:
            ValueError: the tokens do not fit, see `Ledger.advance`.
        """
        if layer is self.layers[0] and not (self.is_called_by_hand and tokens == 1):
            self.advance(batch, tokens, device, padding)
        assert self.moves is not None
        return self.moves

    def advance(
        self, batch: int, tokens: int, device: torch.device, padding: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Begin a step, after the roll that may still be due."""
        self.settle()
        if self.capacity is not None and self.length + tokens > self.capacity:
            raise ValueError(
                f"{self.length + tokens} tokens are more than the cache's capacity={self.capacity}: make it for the "
                "prompt and all new tokens"
            )
        read: list[Sequence[int]] = []

        def once() -> Sequence[int]:
            if not read:
                assert padding is not None
                read.append(padding())
            return read[0]

        moves = [ledger.advance(batch, tokens, device, None if padding is None else once) for ledger in self.ledgers]
        self.moves, self._link = (moves[0], moves[-1]), None
        # A step that is replayed cannot move tokens: what is due is done before the next step, for all layers.
        self._rolls_late = self.capacity is not None and tokens == 1

    def settle(self) -> None:
        """Do what is still due after the last step: rolls of layers with fixed addresses."""
        if self._rolls_late:
            self._rolls_late = False
            assert self.moves is not None
            self.rolls(self.moves[0], self.layers, self.keys.packs)

    @property
    def rolls_now(self) -> bool:
        """Whether a layer lets tokens go right after attention."""
        return not self._rolls_late

    def link(self, sizes: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        """Return for each value the place of its key, see `match`; None where they lie in the same order."""
        if not self.apart:
            return None
        assert self.moves is not None
        if self._link is None or self._link[0] != sizes:
            table: Array = match(*self.moves, sizes)
            self._link = sizes, torch.from_numpy(table).to(device)
        return self._link[1]

    def reset(self) -> None:
        """Forget all tokens."""
        for ledger in self.ledgers:
            ledger.reset()
        self.moves, self._link, self._rolls_late, self.is_called_by_hand = None, None, False, False
