"""Caches that keep some tokens in 16 bits, and pack or evict the others: for stock models and for ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from common.settings import SettingError, check_whole
from lit_modules.networks.caches.books import Books
from lit_modules.networks.caches.compressed_layer import CompressedCacheLayer, Transforms
from lit_modules.networks.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.caches.recurrent import RecurrentCacheLayer
from lit_modules.networks.caches.rotations import Transform, hadamard, model_identity, read_rotations
from lit_modules.networks.caches.settings import CacheSettings, TensorSettings
from lit_modules.networks.caches.sliding import SlidingAttentionCacheLayer
from lit_modules.networks.caches.stock_attention import model_sizes, restore_attention, use_compressed_attention
from lit_modules.networks.config import PalimpsestConfig


class CompressedCache(Cache):
    """A cache for `past_key_values` whose layers of full attention are compressed; others keep their own caches.

    With a stock model it also sets the model's attention implementation to one that can read it; nothing else changes
    there. Left padding is found at the first tokens, and never kept.

    Args:
        config: the model's configuration, `model.config`.
        settings: what is kept and how; the default is LogQuant's.
        capacity: tokens of a row, padding included, in storage at fixed addresses, so that decoding steps can be
            captured; see `prepare_step`. None: storage grows.

    Raises:
        ValueError: the model has no attention that can be compressed, or the settings do not fit it.
    """

    def __init__(
        self, config: PreTrainedConfig, settings: CacheSettings | None = None, *, capacity: int | None = None
    ) -> None:
        self.settings = settings = CacheSettings() if settings is None else settings
        check_whole("capacity", capacity, 1, null=True)
        self.config: PreTrainedConfig = config.get_text_config(decoder=True)
        self.books = Books(settings, capacity)
        if capacity is not None:
            self._check_capacity()
        self._check_widths()
        self._rotations = None
        if settings.rotations is not None:
            self._rotations = read_rotations(Path(settings.rotations), self.config)
        super().__init__(layers=self._new_layers())
        if not (isinstance(self.config, PalimpsestConfig) or _linearization(self.config)):
            use_compressed_attention(self.config)
            self.books.model = model_sizes(self.config)

    @property
    def compressed_layers(self) -> list[CompressedCacheLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, CompressedCacheLayer)]

    @property
    def capacity(self) -> int | None:
        """Tokens of a row that there is room for, or None without a limit."""
        return self.books.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Give new keys and values `[B, H, T, D]` to a layer; compressed layers return themselves, see there."""
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states, *args, **kwargs)

    def prepare_step(self) -> None:
        """Prepare a decoding step that is captured or replayed; with a capacity, call it before each such step.

        It counts the new token and, where it is time, packs old ones, for all layers. The step itself then only
        launches the same work at the same addresses. Within the step `get_seq_length` counts the new token, so give the
        model `position_ids`.

        Raises:
            ValueError: there is no capacity, no prompt yet, or no more room.
        """
        layers = self.compressed_layers
        if self.books.capacity is None or not layers or not layers[0].is_initialized:
            raise ValueError("prepare_step is for a cache with capacity=... that holds a prompt")
        self.books.is_called_by_hand = True
        self.books.advance(self.books.keys.batch(), 1, layers[0].device)

    def memory(self) -> dict[str, int]:
        """Return the bytes allocated in compressed layers, by part: `packed`, `metadata`, `dense`, `numbers`."""
        total = dict.fromkeys(("packed", "metadata", "dense", "numbers"), 0)
        for layer in self.compressed_layers:
            for part, size in layer.nbytes().items():
                total[part] += size
        return total

    @property
    def bits_per_element(self) -> float:
        """Bits for each number of the keys and values so far, metadata and 16-bit tokens included; 0.0 without any.

        Sums of forget gates and the like are left out: a full cache has them too.
        """
        elements = sum(layer.elements() for layer in self.compressed_layers)
        held = self.memory()
        return 8 * (sum(held.values()) - held["numbers"]) / elements if elements else 0.0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row `beam_idx[i]` (beam search)."""
        self.books.settle()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # declared for integers alone
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.books.settle()
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(self.books.keys.batch()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, numbers or a bool for each row."""
        self.books.settle()
        super().batch_select_indices(indices)
        self._select(torch.arange(self.books.keys.batch(), device=indices.device)[indices])

    def reset(self) -> None:
        """Drop all content; with a capacity, storage keeps its address."""
        super().reset()
        self.books.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number is the length to keep.

        Raises:
            ValueError: a token would be needed with 16 bits that was packed or evicted since.
        """
        self.books.settle()
        length = self.books.length
        removed = min(length, -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove))
        if length and removed == length:
            self.reset()
            return
        if removed:
            layers = self.compressed_layers
            for layer in layers:
                layer.check_crop(removed)
            slots = [ledger.rewind(length - removed) for ledger in self.books.ledgers]
            for layer in layers:
                layer.keep_slots(slots[0], slots[-1], removed)
        others: list[Any] = [layer for layer in self.layers if not isinstance(layer, CompressedCacheLayer)]
        for other in others:
            other.crop(-removed)

    def _select(self, rows: Tensor) -> None:
        self.books.rolls.forget()
        for ledger in self.books.ledgers:
            ledger.select(rows.tolist, len(rows))

    def _new_layers(self) -> list[Any]:
        linearization = _linearization(self.config)
        layers: list[Any]
        if isinstance(self.config, PalimpsestConfig):
            names = self.config.layer_mixers
            layers = [
                self._new_layer(i) if name == "attention" else RecurrentCacheLayer() for i, name in enumerate(names)
            ]
        else:
            if self.config.is_encoder_decoder:
                raise _not_supported(self.config, "has an encoder")
            stock = DynamicCache(config=self.config).layers
            # A compressed layer is made where it is used alone: the first one begins each step.
            layers = [
                self._replaced(number, layer) if linearization is None
                else self._softmax_layer(number, layer) if number in linearization.softmax_layers
                else LinearizedCacheLayer(linearization.window, linearization.sinks)
                for number, layer in enumerate(stock)
            ]  # fmt: skip
        if not any(isinstance(layer, CompressedCacheLayer | DynamicSlidingWindowLayer) for layer in layers):
            raise _not_supported(self.config, "has no layer of full attention")
        return layers

    def _replaced(self, number: int, layer: Any) -> Any:
        """Return a compressed layer for a stock one of full attention, and windows and recurrences as they are."""
        if type(layer) is DynamicLayer:
            return self._new_layer(number)
        if isinstance(layer, DynamicSlidingWindowLayer) or type(layer) is LinearAttentionLayer:
            if self.capacity is not None:
                raise SettingError("capacity", self.capacity, "leave it out", "is for models with full attention alone")
            return layer
        raise _not_supported(self.config, f"has layers of its own kind, {type(layer).__name__}")

    def _softmax_layer(self, number: int, layer: Any) -> CacheLayerMixin:
        """Return our cache for a linearized model's layer that stays softmax attention."""
        if not isinstance(layer, DynamicSlidingWindowLayer):
            made: CacheLayerMixin = self._replaced(number, layer)
        elif self.capacity is None:
            made = SlidingAttentionCacheLayer(layer.sliding_window)
        else:
            made = LinearizedCacheLayer(layer.sliding_window)
        return made

    def _new_layer(self, number: int) -> CompressedCacheLayer:
        return CompressedCacheLayer(
            self.books,
            Transforms(
                keys=self._transform(number, self.settings.keys, "key"),
                values=self._transform(number, self.settings.values, "value"),
            ),
        )

    def _transform(self, number: int, tensor: TensorSettings, name: str) -> Callable[[int], Transform] | None:
        if not tensor.is_packed or tensor.transform in ("none", "sorted"):
            return None
        if self._rotations is None or tensor.transform == "hadamard":
            return lambda width: Transform.rotation(hadamard(width))
        transform = self._rotations.of_layer(number).transform(name, tensor.transform)
        return lambda width: transform

    def _check_widths(self) -> None:
        if hasattr(self.config, "kv_lora_rank") or not hasattr(self.config, "num_attention_heads"):
            return  # their widths are known only with the first keys, which are checked again
        sizes = model_identity(self.config)
        for name, tensor in self.settings.tensors.items():
            tensor.check_width(f"cache.{name}", sizes[f"{name[:-1]}_dim"])

    def _check_capacity(self) -> None:
        problem, fix = None, "leave it out"
        if isinstance(self.config, PalimpsestConfig):
            problem = "is for stock and linearized models"
        elif self.books.apart or self.books.keys.keep in ("heavy_hitters", "forget_gate"):
            problem = "is for policies of positions or prompt_attention, the same for keys and values"
        if problem is not None:
            raise SettingError("capacity", self.capacity, fix, problem)


class LogQuantCache(CompressedCache):
    """LogQuant (arXiv 2503.19950): log-spaced tokens keep 16 bits, the others have 2 or 4.

    Keys have a scale for each channel and 128 tokens, values for each token: with heads of 128 and W of 64 these are
    2.4 bits a number at 32k tokens, all counted. The paper's groups are of 64 (`group=64`).

    Args:
        config: the model's configuration, `model.config`.
        window: W; 2W to 3W - 1 tokens keep 16 bits.
        bits: of the other tokens, 2 or 4.
        others: arguments of `CompressedCache` and of `TensorSettings`, for keys and values alike.
    """

    def __init__(self, config: PreTrainedConfig, window: int = 64, bits: int = 2, **others: Any) -> None:
        capacity = others.pop("capacity", None)
        keys = TensorSettings(bits=bits, **{"groups_along": "tokens"} | others)
        values = TensorSettings(bits=bits, **others)
        super().__init__(config, CacheSettings(keys=keys, values=values, window=window), capacity=capacity)


@contextmanager
def compressed(model: PreTrainedModel, settings: CacheSettings | None = None) -> Iterator[PreTrainedModel]:
    """Let `model.generate` begin with a fresh compressed cache wherever it is given none.

    Args:
        model: a stock model or one of ours.
        settings: of the caches.

    Raises:
        ValueError: the model has no attention that can be compressed.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    CompressedCache(model.config, settings)  # what does not fit is said here
    changed: Any = model  # an attribute of the object goes before the method of its class
    prepare = changed._prepare_cache_for_generation

    def prepare_compressed(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = CompressedCache(model.config, settings)
        return prepare(generation_config, model_kwargs, *args, **kwargs)

    changed._prepare_cache_for_generation = prepare_compressed
    try:
        yield model
    finally:
        del changed._prepare_cache_for_generation
        if config._attn_implementation != before:
            restore_attention(config)


def _linearization(config: PreTrainedConfig) -> Any:
    """Return the settings of a linearized model, None for others."""
    if getattr(config, "linearization", None) is None:
        return None
    from lit_modules.networks.linearized.settings import Linearization  # its package imports the caches

    return Linearization(**config.linearization)


def _not_supported(config: PreTrainedConfig, problem: str) -> ValueError:
    return ValueError(f"{config.model_type} {problem}: use its own cache (cache=full)")
