"""The position of each token of a batch: computed once per forward pass, read by every mixer."""

from typing import NamedTuple

import torch
from torch import Tensor


class Positions(NamedTuple):
    """The layout of one batch `[B, T]`.

    Attributes:
        index: `[B, T]` int64, the token's position in its document; 0 at the first token of every document, and at the
            left padding and the first real token of a padded row.
        cu_seqlens: `[N + 1]` int32, the starts of packed documents and the end of the last, or None; B is 1 then.
        kv_start: `[B]` int32, the number of padding tokens on the left of each row, or None.
        rotary_index: `[B, T]` int64, positions for the rotary embedding, or None without RoPE.
        rotary: cosines and sines `[B, T, head_dim]` float32 for `rotary_index`, or None without RoPE.
    """

    index: Tensor  # type: ignore[assignment]  # in place of the tuple's own method, which nothing calls
    cu_seqlens: Tensor | None = None
    kv_start: Tensor | None = None
    rotary_index: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None


def locate(
    batch: int,
    length: int,
    past: int,
    device: torch.device,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Positions:
    """Compute the positions of `[batch, length]` new tokens that follow `past` cached ones.

    Args:
        attention_mask: `[batch, past + length]` of 0 and 1 (or bool): zeros on the left or on the right of each row.
        cu_seqlens: `[N + 1]` int32; needs batch 1 and an empty cache.
        position_ids: `[batch or 1, length]`, positions for the rotary embedding; without them `rotary_index` is None.

    Raises:
        ValueError: if mask and cu_seqlens are both given, a shape is wrong, a mask has holes, packed documents continue
            a cache, or position_ids restart within a row without a mask or cu_seqlens.
    """
    positions = _located(batch, length, past, device, attention_mask, cu_seqlens)
    if position_ids is None:
        return positions
    if attention_mask is None and cu_seqlens is None:
        _check_position_ids(position_ids)
    return positions._replace(rotary_index=position_ids.expand(batch, length))


def _located(
    batch: int,
    length: int,
    past: int,
    device: torch.device,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Positions:
    time = torch.arange(past, past + length, device=device)
    if cu_seqlens is not None:
        _check_packed(batch, length, past, attention_mask, cu_seqlens)
        document = torch.searchsorted(cu_seqlens, time.to(cu_seqlens.dtype), right=True) - 1
        return Positions((time - cu_seqlens[document])[None], cu_seqlens=cu_seqlens)
    if attention_mask is None:
        return Positions(time.expand(batch, length))
    kv_start = _left_padding(attention_mask, (batch, past + length)).to(device)
    return Positions((time - kv_start[:, None]).clamp(min=0), kv_start=kv_start.int())


def _check_position_ids(position_ids: Tensor) -> None:
    """Refuse `position_ids` `[B, T]` that restart within a row: packed documents need cu_seqlens.

    Raises:
        ValueError: with the first such row and token.
    """
    restarts = (position_ids[:, 1:] < position_ids[:, :-1]).nonzero()
    if len(restarts):
        row, token = restarts[0].tolist()
        raise ValueError(
            f"position_ids start again at token {token + 1} of row {row}: give packed documents as cu_seqlens, "
            "or they will see each other"
        )


def _check_packed(batch: int, length: int, past: int, attention_mask: Tensor | None, cu_seqlens: Tensor) -> None:
    if attention_mask is not None:
        raise ValueError(
            "attention_mask and cu_seqlens are both given: packed documents have no padding, drop the mask"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, found {batch}: pack the documents into one row")
    if past:
        raise ValueError(f"cu_seqlens continues a cache of {past} tokens: packed documents cannot be cached")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 2:
        found = f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}".replace("torch.", "")
        raise ValueError(f"cu_seqlens is {found}: give int32 [documents + 1], from 0 to {length}")


def _left_padding(attention_mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the leading zeros of each row, `[B]` int64.

    Every call checks for holes, not only the first: a right-padded prompt has a hole only after a generated token is
    appended, and its padding would be read as text. Unpadded batches have no mask and skip the check.
    """
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}, the tokens (with those cached) are {list(shape)}: "
            "give one 0 or 1 for each"
        )
    real = attention_mask != 0
    left = (real.cumsum(1) == 0).sum(1)
    changes = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    if bool((changes > 1).any()):
        row = int((changes > 1).nonzero()[0, 0])
        raise ValueError(
            f"attention_mask has a hole in row {row}: pad on the left (on the right only where nothing is generated), "
            "and pack documents with cu_seqlens"
        )
    return left
