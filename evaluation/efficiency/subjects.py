"""What is measured: copies of a model's attention layer, and of caches, in rotation.

In a model the other layers' weights and caches come between two uses of the same bytes, so a layer finds none of its
own in the GPU's cache memory. Here copies of the layer and of its cache stand for the other layers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from evaluation.efficiency.bytes_model import LayerBytes
from evaluation.efficiency.models import NamedModel
from lit_modules.generation.fused_blocks import FusedAttention, fused_attention, rotated_positions
from lit_modules.networks.caches import StaticAttentionCacheLayer
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions

UNCACHED = 4e8
"""Bytes that are read in rotation: several times the cache memory of any GPU."""
MOST_COPIES = 64
"""Copies of a cache at most: what is as small as that takes no time to read."""
PIECE = 2**28  # numbers that are drawn at a time


class Pool:
    """Random numbers that caches are views of, made once: all lengths, batches and models are measured on them.

    Args:
        size: numbers.
        dtype, device: of the numbers.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self.numbers = torch.empty(size, dtype=dtype, device=device)
        for piece in self.numbers.split(PIECE):
            piece.normal_()

    def tensor(self, start: int, *shape: int) -> Tensor:
        """Return the numbers from `start` on as a tensor of `shape`."""
        return self.numbers[start : start + math.prod(shape)].view(shape)


class Subject:
    """One of the two models on the device.

    Args:
        model: its sizes.
        dtype, device: of weights and caches.

    Attributes:
        modules: copies of an attention layer, each with the norm before it.
        layers: the same, as decoding runs them.
        sizes: the layer's bytes.
    """

    def __init__(self, model: NamedModel, dtype: torch.dtype, device: torch.device):
        self.name, self.config, self.dtype, self.device = model.name, model.config, dtype, device
        self.sizes = LayerBytes.of(model.config, dtype.itemsize)
        self.modules = [self._new_layer() for _ in range(copies_of(self.sizes.folded))]
        self.layers = self.fused(fold=True)

    def _new_layer(self) -> tuple[RMSNorm, Attention]:
        with self.device:
            norm, attention = RMSNorm(self.config.hidden_size, eps=self.config.norm_eps), Attention(self.config)
        for module in (norm, attention):
            module.to(self.dtype).requires_grad_(False)
        for matrix in attention.parameters():
            matrix.normal_(std=self.config.initializer_range)
        return norm, attention

    def fused(self, *, fold: bool) -> list[FusedAttention]:
        """Return the steps of all copies, with or without W_q folded into augmented queries."""
        steps = (fused_attention(norm, attention, self.dtype, fold=fold) for norm, attention in self.modules)
        return [step for step in steps if step is not None]  # all are alike, and `read_model` has checked one

    def query_ways(self) -> dict[str, list[Callable[[Tensor], Tensor]]]:
        """Return the ways to compute the queries of `[rows, hidden_size]`, each on all copies; the last is decoding's.

        As modules: norm, W_q and the augmented queries one after the other. In fused products: a norm, a gate and its
        partner are part of a matrix product. Folded: W_q is part of the two matrices after it.
        """
        ways: dict[str, list[Callable[[Tensor], Tensor]]] = {"as modules": [_by_modules(*own) for own in self.modules]}
        ways["in fused products"] = [layer.queries.__call__ for layer in self.fused(fold=False)]
        if self.config.augmented_query_dim is not None:
            ways["in fused products, folded"] = [layer.queries.__call__ for layer in self.layers]
        return ways

    def rows(self, batch: int) -> Tensor:
        """Return random hidden states of one token `[batch, hidden_size]`."""
        return torch.randn(batch, self.config.hidden_size, device=self.device).to(self.dtype)

    def positions(self, index: Tensor) -> Positions:
        """Return positions with rotary tables for `index` `[batch, 1]`."""
        return rotated_positions(self.config, Positions(index))

    def positions_of(self, batch: int, length: int) -> Positions:
        """Return the positions of the last of `length` tokens in every row."""
        return self.positions(torch.full((batch, 1), length - 1, device=self.device))

    def cache_numbers(self, batch: int, capacity: int) -> int:
        """Return how many numbers a layer's cache has."""
        return batch * capacity * self.sizes.per_token // self.dtype.itemsize

    def caches(self, pool: Pool, batch: int, capacity: int, held: int, copies: int) -> list[StaticAttentionCacheLayer]:
        """Return caches in the pool that hold `held` tokens; as many copies as it has room for, up to `copies`."""
        _, key_heads, value_heads = self.config.head_counts
        heads, size = key_heads + value_heads, self.cache_numbers(batch, capacity)
        found = []
        for start in range(0, min(copies * size, len(pool.numbers) - size + 1), size):
            keys = pool.tensor(start, batch, capacity, key_heads, self.config.head_dim)
            values = pool.tensor(start + size * key_heads // heads, batch, capacity, value_heads, self.config.head_dim)
            found.append(StaticAttentionCacheLayer.around(keys, values, held))
        return found


def _by_modules(norm: RMSNorm, attention: Attention) -> Callable[[Tensor], Tensor]:
    def queries(rows: Tensor) -> Tensor:
        projected = attention.q_proj(norm(rows))
        return projected if attention.augmented_q is None else attention.augmented_q(projected)

    return queries


def copies_of(nbytes: float) -> int:
    """Return how many copies of `nbytes` each are read in rotation."""
    return max(1, min(MOST_COPIES, math.ceil(UNCACHED / nbytes)))


def pool_size(subjects: list[Subject], batches: list[int], longest: int) -> int:
    """Return the numbers that the caches of all subjects need: the largest one, or what is read in rotation."""
    largest = max(subject.cache_numbers(max(batches), longest) for subject in subjects)
    itemsize = subjects[0].dtype.itemsize
    return largest + math.ceil(UNCACHED / itemsize)
