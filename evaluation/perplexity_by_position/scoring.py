"""Losses of sequences that pass through a cache a few tokens at a time, summed by position."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

CURVE_POINTS = 64


def token_losses(model: Any, cache: Cache, tokens: Tensor, chunk: int) -> Tensor:
    """Return the loss in nats of each token but the first, `[B, T - 1]` on the CPU, float32 or the model's float64.

    Tokens pass through `chunk` at a time, each with the cache that the ones before have left: so the tokens of a chunk
    see each other as they are, and what is older as the cache has kept it.

    Args:
        cache: an empty one.
        tokens: ids `[B, T]`, T of 2 or more.

    Raises:
        ValueError: a loss is not a number.
    """
    losses = []
    for start in range(0, tokens.shape[1] - 1, chunk):
        stop = min(start + chunk, tokens.shape[1] - 1)
        with torch.no_grad():
            logits = model(tokens[:, start:stop], past_key_values=cache, use_cache=True).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = tokens[:, start + 1 : stop + 1]
        losses.append(functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu())
    found = torch.cat(losses, dim=1)
    if not found.isfinite().all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(
            f"checkpoint: its losses are not numbers, so weights are damaged, or dtype={dtype} is too coarse for them"
        )
    return found


def buckets(length: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens before a token: [1, 2), [2, 4), [4, 8), ... to a sequence's length."""
    edges = [1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return list(itertools.pairwise(edges))


def curve_ranges(length: int) -> list[tuple[int, int]]:
    """Return equal ranges of tokens before a token, 64 or fewer, to a sequence's length."""
    points = min(CURVE_POINTS, length - 1)
    edges = [1 + (length - 1) * point // points for point in range(points + 1)]
    return list(itertools.pairwise(edges))


def mean_losses(losses: Tensor, ranges: Sequence[tuple[int, int]]) -> list[float]:
    """Return a sequence's mean loss in each range of tokens before, from the losses `[T - 1]` of tokens 1, 2, ..."""
    losses = losses.double()
    return [float(losses[start - 1 : stop - 1].mean()) for start, stop in ranges]
