"""One layer of a compressed cache: what it holds, and attention over it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.packed_kv import PackedPast, packed_attention, read_squares, rotate, rotate_and_write
from kernels.selective_attention import selective_attention
from lit_modules.networks.caches.beside import Beside
from lit_modules.networks.caches.books import Books
from lit_modules.networks.caches.choosing import prompt_votes
from lit_modules.networks.caches.counted import CountedCacheLayer
from lit_modules.networks.caches.held import Held, HeldStates
from lit_modules.networks.caches.in_parts import Finish, Side, attend_in_parts
from lit_modules.networks.caches.moves import Array, Move
from lit_modules.networks.caches.rotations import Transform
from lit_modules.networks.caches.settings import CacheSettings
from lit_modules.networks.caches.shifted import UnshiftedStates


@dataclass(frozen=True)
class Transforms:
    """The transforms of a layer for heads of a given width, None where its tensor is packed as it is."""

    keys: Callable[[int], Transform] | None = None
    values: Callable[[int], Transform] | None = None


class CompressedCacheLayer(UnshiftedStates, CountedCacheLayer):
    """Keys and values of one layer: some in their own dtype, the others packed in 2 or 4 bits, or evicted.

    Tensors are `[batch, heads, time, head_dim]`. Tokens with 16 bits lie in slots; which, the cache's `Books` know.
    `attend` appends the new tokens, attends to all, and lets go of those whose time has come. A key is quantized once.
    Numbers that are not finite are packed as such: a NaN in a key shows in every later output of its heads.

    Args:
        books: what the cache's layers share.
        transforms: what is done to keys and values before they are packed.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, books: Books, transforms: Transforms):
        super().__init__()
        self.books, self.transforms = books, transforms
        self.pending: tuple[Tensor, Tensor] | None = None
        self.key_states: HeldStates | None = None
        self.value_states: HeldStates | None = None
        self.beside: Beside | None = None
        self._layouts: dict[str, Tensor] = {}  # what the last attention saw, until its roll
        books.layers.append(self)

    @property
    def settings(self) -> CacheSettings:
        """The settings of the cache."""
        return self.books.settings

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # an attribute of the class there
        """Whether tokens can always be taken back."""
        return not self.settings.compresses

    @property
    def shape(self) -> Any:
        """Raise: attention took this handle for a tensor."""
        raise ValueError(
            "a compressed cache was given to attention that cannot read it: make it of this model's own config, after "
            "model.set_attn_implementation; where it still says this, use the model's own cache (cache=full)"
        )

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.books.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens with `query_length` new ones, and 0, the position of the first."""
        return self.books.length + query_length, 0

    def get_max_length(self) -> int:
        """Return the capacity, or -1 without one."""
        return -1 if self.books.capacity is None else self.books.capacity

    get_max_cache_shape = get_max_length  # its name in older transformers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Prepare for keys `[B, Hk, T, Dk]` and values `[B, Hv, T, Dv]`.

        Raises:
            ValueError: heads of this width cannot be packed.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = self.books.capacity
        made = []
        for name, states, ledger in (
            ("keys", key_states, self.books.keys),
            ("values", value_states, self.books.values),
        ):
            tensor, width = self.settings.tensors[name], states.shape[3]
            tensor.check_width(f"cache.{name}", width)
            format = tensor.format_of(width) if tensor.is_packed else None
            transform = getattr(self.transforms, name)
            slots = ledger.bound
            if capacity is not None:
                slots = capacity if slots is None else min(slots, capacity)
            made.append(
                HeldStates(
                    format,
                    ledger.block,
                    by_channel=name == "values",
                    transform=None if transform is None or format is None else transform(width).like(states),
                    sorts=tensor.transform == "sorted",
                    slots=slots,
                    blocks=None if capacity is None or format is None else ledger.most_blocks(capacity),
                    is_fixed=capacity is not None,
                )
            )
        self.key_states, self.value_states = made
        self.beside = Beside(self.books, made[0], math.gcd(key_states.shape[1], value_states.shape[1]))
        if capacity is not None:
            for held, states in zip(made, (key_states, value_states), strict=True):
                held.allocate(states)
        self.is_initialized = True

    def update(  # type: ignore[override]  # attention gets the layer in place of tensors
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple["CompressedCacheLayer", "CompressedCacheLayer"]:
        """Take a stock model's new keys and values `[B, H, T, D]`; attention gets this layer, for `attend_new`."""
        self.pending = key_states, value_states
        return self, self

    def attend_new(self, q: Tensor, **options: Any) -> Tensor:
        """Append what `update` took, and attend; arguments as in `attend`."""
        assert self.pending is not None
        (keys, values), self.pending = self.pending, None
        return self.attend(q, keys, values, **options)

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        padding: Callable[[], Sequence[int]] | None = None,
        softcap: float | None = None,
        log_forget: Tensor | None = None,
        finish: Finish | None = None,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Append T tokens, attend to all tokens, and let go of those that no longer keep 16 bits.

        Args:
            q: `[B, Hq, T, D]`.
            keys, values: `[B, Hk, T, Dk]` and `[B, Hv, T, Dv]`.
            scale: factor on the logits; None: `D ** -0.5`.
            padding: returns the padding on the left of each row, all tokens considered; None without a mask.
            softcap: logits become `softcap * tanh(logit / softcap)`; None leaves them.
            log_forget: log forget gates `[B, T, Hq]`, or None.
            finish: for keys that are cached before they are mapped and rotated, what does so.
            positions: with `finish`, the rotary positions of the new tokens, `[B, T]`.
            rotary: cosines and sines `[B, T, R]` by which q and keys are to be rotated, or None.

        Returns:
            `[B, Hq, T, Dv]` in q's dtype; 0 for padding.

        Raises:
            ValueError: the tokens do not fit what is held.
        """
        keys, values = keys.detach(), values.detach()
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.key_states is not None
        assert self.value_states is not None
        assert self.beside is not None
        self._check(keys, values)
        if softcap is not None and self.key_states.mean is not None:
            raise ValueError("a mean of keys cannot be left out where logits are capped: calibrate the model anew")
        key_move, value_move = self.books.step(self, len(keys), keys.shape[2], keys.device, padding)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        past_q = None
        if rotary is not None and self._writes_in_place(key_move):
            key_slots, value_slots = self.key_states.dense, self.value_states.dense
            assert key_slots is not None
            assert value_slots is not None
            key_map = self.key_states.inverse if self.key_states.packed else None
            q, turned = rotate_and_write(key_slots, value_slots, q, keys, values, *rotary, key_move.end, key_map)
            past_q = None if key_map is None else turned
            layouts = {"keys": key_slots, "values": value_slots}
        else:
            if rotary is not None:
                q, keys = rotate(q, *rotary), rotate(keys, *rotary)
            layouts = {
                "keys": self.key_states.write(self.key_states.centred(keys), key_move),
                "values": self.value_states.write(self.value_states.centred(values), value_move),
            }
        layouts |= self.beside.write(key_move, keys, log_forget, positions)
        self._layouts = layouts
        keep = self.books.keys.keep
        if keep == "prompt_attention" and key_move.tokens > 1:
            layouts["scores"].copy_(self._votes(q, layouts, key_move, scale, softcap, finish))
        seen = layouts["keys"]
        if finish is not None and not self.settings.compresses:
            # Nothing is packed, so all keys are mapped at once, as the full cache does.
            seen, finish = finish(seen, layouts["rotary"][:, 0]).to(q.dtype), None
        if self.settings.top_values is not None and key_move.tokens == 1:
            out = self._attend_selectively(q, seen, layouts, key_move, scale, softcap)
        elif finish is None and not self.books.apart and keep != "heavy_hitters":
            out = packed_attention(
                q,
                seen,
                layouts["values"],
                key_move.end,
                self._past(key_move),
                dense_start=key_move.start,
                scale=scale,
                decay=layouts.get("sums"),
                softcap=softcap,
                past_q=past_q,
            )
        else:
            out = self._attend_in_parts(q, layouts, key_move, value_move, scale, softcap, finish)
        if self.books.rolls_now:
            self.roll(key_move, value_move)
        return self._restored(out, key_move)

    def roll(self, key_move: Move, value_move: Move | None = None) -> None:
        """Let the tokens go that the last moves release: pack or evict them, and close the gaps.

        Args:
            key_move: of the keys.
            value_move: of the values; None: the same.
        """
        value_move = key_move if value_move is None else value_move
        layouts = self._layouts
        self.forget_layouts()
        assert self.key_states is not None
        assert self.value_states is not None
        assert self.beside is not None
        key_side: dict[str, Held] = {"keys": self.key_states, **self.beside.held}
        sides: list[tuple[Move, dict[str, Held]]] = [(key_move, key_side), (value_move, {"values": self.value_states})]
        chosen: tuple[Tensor, Tensor] | None = None
        for move, helds in sides:
            if move.roll is None:
                continue
            kept, released = move.roll.kept, move.roll.released
            if move.turns:
                # Keys and values share the policy, and so the choice.
                chosen = chosen or self.beside.choose(move.turns, layouts)
                released, kept = chosen
            assert kept is not None
            for name, held in helds.items():
                # A replayed step leaves no layout here: it wrote into the slots.
                layout = layouts.get(name, held.dense)
                assert layout is not None
                held.roll(layout, kept, released, move.roll.filing)
        self.beside.rebase()

    def forget_layouts(self) -> None:
        """Drop what the last attention saw, of which a roll takes its tokens."""
        self._layouts = {}

    def positions(self, head: int = 0, tensor: str = "keys") -> list[list[int]]:
        """Return for each row the positions, after its padding, that keep 16 bits by the policy, ascending.

        Tokens that wait for a full block are not among them, although they have 16 bits too.

        Args:
            head: the key head; they differ only where tokens are chosen by their content.
            tensor: "keys" or "values".
        """
        self.books.settle()
        ledger = self.books.keys if tensor == "keys" else self.books.values
        rows = range(ledger.batch())
        if not ledger.reads_content:
            return [ledger.positions(row) for row in rows]
        assert self.key_states is not None
        assert self.key_states.dense is not None
        assert self.beside is not None
        held = self.beside.held["positions"].dense
        assert held is not None
        number = head * held.shape[1] // self.key_states.dense.shape[1]
        groups = [ledger.groups[start] for start in ledger.starts or ()]
        return [
            [*held[row, number, : group.since].tolist(), *range(group.length - group.count + group.since, group.length)]
            for row, group in zip(rows, groups, strict=True)
        ]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes held: `packed` codes, `metadata` (scales and offsets), `dense`, and `numbers` beside.

        The numbers are what a full cache would hold too: sums of gates, positions, scores; and what KV-shift needs.
        """
        self.books.settle()
        sizes = dict.fromkeys(("packed", "metadata", "dense", "numbers"), 0)
        for held in (self.key_states, self.value_states):
            if held is not None:
                codes, metadata = held.packed_nbytes
                sizes["packed"] += codes
                sizes["metadata"] += metadata
                sizes["dense"] += held.nbytes
        sizes["numbers"] = 0 if self.beside is None else self.beside.nbytes
        sizes["numbers"] += sum(each.nbytes for each in self.unshifted or ())
        return sizes

    def elements(self) -> int:
        """Return the numbers that the tokens so far have, without padding."""
        if self.key_states is None or self.value_states is None:
            return 0
        tokens = sum(group.length for group in map(self.books.keys.groups.__getitem__, self.books.keys.starts or ()))
        dense = [held.dense for held in (self.key_states, self.value_states) if held.dense is not None]
        return tokens * sum(each.shape[1] * each.shape[3] for each in dense)

    def keep_slots(self, keys: list[Array], values: list[Array], removed: int) -> None:
        """Keep these slots of each row alone, after tokens were taken back (`Ledger.rewind`)."""
        self._crop_unshifted(removed)
        for rows, held in ((keys, self.key_states), (values, self.value_states)):
            if held is not None and held.dense is not None:
                held.compact(rows)
        if self.beside is not None:
            self.beside.keep_slots(keys)

    def check_crop(self, removed: int) -> None:
        """Raise ValueError if KV-shift cannot take back so many tokens."""
        self._check_unshifted(removed)

    def reset(self) -> None:
        """Drop all content; with a capacity, storage keeps its address."""
        self._layouts, self.unshifted = {}, None
        if self.books.capacity is None:
            self.key_states = self.value_states = self.beside = None
            self.is_initialized = False
        elif self.beside is not None:
            self.beside.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: the layers of a compressed cache are cropped together, by the cache."""
        raise NotImplementedError("call the cache's crop: its layers share what they know of the tokens")

    def _check(self, keys: Tensor, values: Tensor) -> None:
        for name, held, new in (("keys", self.key_states, keys), ("values", self.value_states, values)):
            dense = None if held is None else held.dense
            if dense is None or not dense.shape[0]:
                continue
            if dense.shape[1::2] != new.shape[1::2] or dense.dtype != new.dtype:
                raise ValueError(
                    f"the cache holds {name} of {dense.shape[1]} heads of {dense.shape[3]} in {dense.dtype}, the new "
                    f"ones are {new.shape[1]} of {new.shape[3]} in {new.dtype}: begin another model with a new cache"
                )

    def _writes_in_place(self, move: Move) -> bool:
        """Return whether keys and values are written, as they are, at the end of the slots."""
        assert self.key_states is not None
        assert self.value_states is not None
        is_centred = self.key_states.mean is not None or self.value_states.mean is not None
        return self.books.capacity is not None and move.tokens == 1 and not (move.is_padded or is_centred)

    def _past(self, move: Move) -> PackedPast | None:
        """Return the packed tokens before the new ones."""
        keys, values = self.key_states, self.value_states
        assert keys is not None
        assert values is not None
        assert self.beside is not None
        # With fixed addresses always: a captured step cannot begin to read packed tokens.
        if not keys.packed or (self.books.capacity is None and not move.past):
            return None
        return PackedPast(
            keys.as_packed(),
            values.as_packed(),
            move.blocks,
            decay=self.beside.held["sums"].packed[0] if "sums" in self.beside.held else None,
            key_rotation=keys.inverse,
            value_rotation=values.inverse,
            debias=self.settings.keys.debias,
        )

    def _votes(
        self,
        q: Tensor,
        layouts: dict[str, Tensor],
        move: Move,
        scale: float,
        softcap: float | None,
        finish: Finish | None,
    ) -> Tensor:
        """Return `prompt_votes` of what attention sees."""
        assert self.key_states is not None
        keys, mean = layouts["keys"], self.key_states.mean
        if finish is not None:
            keys = finish(keys if mean is None else keys + mean, layouts["rotary"][:, 0])
        return prompt_votes(
            q,
            keys,
            move.end,
            layouts["scores"].shape[1],
            scale=scale,
            start=move.start,
            softcap=softcap,
            decay=layouts.get("sums"),
        )

    def _attend_selectively(
        self, q: Tensor, keys: Tensor, layouts: dict[str, Tensor], move: Move, scale: float, softcap: float | None
    ) -> Tensor:
        """Attend to finished keys `[B, Hk, slots, D]`, and read the values of the highest scores alone."""
        assert self.settings.top_values is not None
        sums = layouts.get("sums")
        out = selective_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            layouts["values"].transpose(1, 2),
            self.settings.top_values,
            None if sums is None else sums.transpose(1, 2),
            scale=scale,
            softcap=softcap,
            kv_start=move.start,
            kv_end=move.end,
        )
        return out.transpose(1, 2)

    def _attend_in_parts(
        self,
        q: Tensor,
        layouts: dict[str, Tensor],
        key_move: Move,
        value_move: Move,
        scale: float,
        softcap: float | None,
        finish: Finish | None,
    ) -> Tensor:
        assert self.key_states is not None
        assert self.value_states is not None
        assert self.beside is not None
        decay, places = (
            (layouts[name], self.beside.held[name].packed[0] if key_move.past else None) if name in layouts else None
            for name in ("sums", "rotary")
        )
        keys, values = (
            Side(
                layouts[name],
                move.end,
                held.as_packed() if move.past else None,
                move.blocks,
                held.inverse,
                finish if name == "keys" else None,
                places if name == "keys" else None,
                held.mean if name == "keys" else None,
            )
            for name, held, move in (("keys", self.key_states, key_move), ("values", self.value_states, value_move))
        )
        sizes = keys.packed_tokens, keys.layout.shape[2], values.packed_tokens, values.layout.shape[2]
        squares = None
        if self.settings.keys.debias and finish is None:
            squares = read_squares(q, keys.inverse, key_move.end, key_move.start, scale)
        return attend_in_parts(
            q,
            keys,
            values,
            scale=scale,
            start=key_move.start,
            softcap=softcap,
            decay=decay,
            link=self.books.link(sizes, q.device),
            received=layouts.get("scores") if self.books.keys.keep == "heavy_hitters" else None,
            squares=squares,
        )

    def _restored(self, out: Tensor, move: Move) -> Tensor:
        """Return an output `[B, Hq, T, D]` with the mean that the held values lack; padding stays 0."""
        assert self.value_states is not None
        whole = self.value_states.restored(out)
        if move.start is None or whole is out:
            return whole
        slot = move.end[:, None] - move.tokens + torch.arange(move.tokens, device=out.device)
        return whole.masked_fill((slot < move.start[:, None])[:, None, :, None], 0.0)

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        for held in (self.key_states, self.value_states, self.beside):
            if held is not None:
                held.map(move)
        self._map_unshifted(move)
