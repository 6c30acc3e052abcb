"""The definition of quantization, packing and attention over packed keys and values; tests compare against it."""

import torch
from torch import Tensor

from kernels.packed_kv.formats import MANY_QUERIES, MAX_OFFSET, MAX_SCALE, Format, Packed, PackedPast


def quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `x` `[B, H, T, D]`; see `Format`.

    Args:
        x: any floating dtype; float64 is computed in float64, all else in float32. Groups with NaN give NaN scales.
        format: the quantization; with groups along tokens T is a multiple of the group.

    Returns:
        Codes uint8 `[B, H, T, D]`; scales and offsets float16, `[B, H, T, D / group]` along channels,
        `[B, H, T / group, D]` along tokens. Codes are rounded with the float16 scale and offset.

    Raises:
        ValueError: T or D is not a multiple of the group.
    """
    batch, heads, time, head_dim = x.shape
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if format.groups_along == "tokens":
        if time % format.group:
            raise ValueError(f"{time} tokens are not a multiple of group={format.group}")
        grouped = x.unflatten(2, (-1, format.group))
        axis = 3
    else:
        format.check_head_dim(head_dim)
        grouped = x.unflatten(3, (-1, format.group))
        axis = 4
    if format.clip < 1:
        bound = grouped.abs().sort(axis).values.select(axis, format.clip_rank).unsqueeze(axis)
        grouped = grouped.clamp(-bound, bound)
    least, most = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
    levels = _levels(format, x)
    # A step below the precision of the least number would gain nothing.
    scales = torch.maximum((most - least) / levels, least.abs() / MAX_OFFSET).clamp(max=MAX_SCALE).to(torch.float16)
    step = torch.where(scales == 0, 1.0, scales.to(x.dtype))
    offsets = (least / step).to(torch.float16)
    codes = grouped / step - offsets.to(x.dtype)
    codes = codes.round().clamp(min=0).minimum(levels.expand_as(codes)).to(torch.uint8)
    return codes.view(batch, heads, time, head_dim), scales.squeeze(axis), offsets.squeeze(axis)


def dequantize(
    codes: Tensor, scales: Tensor, offsets: Tensor, format: Format, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `scale * (code + offset)`, `[B, H, T, D]` in `dtype`; arguments as `quantize` returns them."""
    if format.groups_along == "tokens":
        grouped, axis = codes.unflatten(2, (-1, format.group)), 3
    else:
        grouped, axis = codes.unflatten(3, (-1, format.group)), 4
    values = scales.to(dtype).unsqueeze(axis) * (grouped.to(dtype) + offsets.to(dtype).unsqueeze(axis))
    return values.reshape(codes.shape)


def pack(x: Tensor, format: Format, block: int, *, by_channel: bool = False) -> Packed:
    """Quantize `x` `[B, H, T, D]` and pack it in blocks of `block` tokens; T is a multiple of `block`.

    Args:
        x: keys or values.
        format: the quantization; with groups along tokens its group is `block`.
        block: tokens of a block, a multiple of 16.
        by_channel: the layout of values; see `Packed`.

    Raises:
        ValueError: the sizes do not fit.
    """
    time, head_dim = x.shape[2:]
    format.check_head_dim(head_dim)
    if block < 16 or block % 16 or time % block:
        raise ValueError(f"block={block} has to be a multiple of 16 that divides the {time} tokens")
    if format.groups_along == "tokens" and format.group != block:
        raise ValueError(f"group={format.group} along tokens has to be block={block}")
    codes, scales, offsets = quantize(x, format)
    codes = codes.unflatten(2, (-1, block))
    high = format.high_of(head_dim)
    if format.groups_along == "channels":  # [B, H, T, D / group] -> [B, H, N, D / group, block]
        scales, offsets = (x.unflatten(2, (-1, block)).mT for x in (scales, offsets))
    return Packed(
        low=_words(codes & 3, by_channel),
        high=_words(codes[..., :high] >> 2, by_channel) if high else None,
        metadata=torch.stack((scales, offsets), -1),
        format=format,
        by_channel=by_channel,
    )


def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what was packed, rounded, as `[B, H, N * block, D]`."""
    format = packed.format
    codes = _codes(packed.low, packed.by_channel)
    if packed.high is not None:
        high = _codes(packed.high, packed.by_channel)
        codes[..., : high.shape[-1]] += high << 2
    scales, offsets = packed.metadata.unbind(-1)
    if format.groups_along == "channels":
        scales, offsets = (x.mT.flatten(2, 3) for x in (scales, offsets))
    return dequantize(codes.flatten(2, 3), scales, offsets, format, dtype)


def read_squares(q: Tensor, rotation: Tensor | None, end: Tensor, start: Tensor | None, scale: float) -> Tensor:
    """Return the squares by which channels of packed keys are read, `[B, Hq, T or 1, D]` for `error_variance`.

    Args:
        q: `[B, Hq, T, D]`, not rotated.
        rotation: the keys' of `PackedPast`.
        end: int32 `[B]`, where the slots in use end, the queries' own last.
        start: int32 `[B]`, the first slot that is no padding, or None. Queries of padding do not count.
        scale: factor on the logits.
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if rotation is not None:
        q = q @ rotation.to(q.dtype)
    squares = (scale * q).square()
    if q.shape[2] <= MANY_QUERIES:
        return squares
    if start is None:
        return squares.mean(2, keepdim=True)
    own = end[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    counts = (own >= start[:, None])[:, None, :, None]
    total = squares.masked_fill(~counts, 0.0).sum(2, keepdim=True)
    return total / counts.sum(2, keepdim=True).clamp(min=1)


def error_variance(keys: Packed, squares: Tensor) -> Tensor:
    """Return the variance of logits by the keys' rounding, if errors are even within a step: `step^2 / 12` a channel.

    Args:
        keys: N blocks.
        squares: `[B, Hq, T, D]` of `read_squares`.

    Returns:
        `[B, Hq, T, N * block]` in the dtype of the squares.
    """
    batch, heads, time, _ = squares.shape
    variances = keys.metadata[..., 0].to(squares.dtype).square() / 12
    squares = squares.unflatten(1, (variances.shape[1], -1)).flatten(2, 3)  # [B, Hk, heads of a key head * T, D]
    if keys.format.groups_along == "tokens":
        found = (squares @ variances.mT).repeat_interleave(keys.block, -1)
    else:
        by_group = squares.unflatten(-1, (variances.shape[3], -1)).sum(-1)
        found = by_group @ variances.transpose(2, 3).flatten(3)
    return found.reshape(batch, heads, time, -1)


def packed_attention_reference(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    past: PackedPast | None = None,
    *,
    dense_start: Tensor | None = None,
    scale: float | None = None,
    decay: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `packed_attention` by its definition: everything is dequantized at once; same arguments.

    Computes in float64 for float64 queries, otherwise in float32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, heads, time, _ = q.shape
    slot = torch.arange(dense_keys.shape[2], device=q.device)
    own = dense_end.long()[:, None] - time + torch.arange(time, device=q.device)  # [B, T] slots of the queries
    visible = slot <= own[..., None]
    if dense_start is not None:
        visible = visible & (slot >= dense_start.long()[:, None, None])
    visible = visible[:, None].expand(-1, heads, -1, -1)
    scores = _per_query_head(q, q, dtype) @ _per_query_head(dense_keys, q, dtype).mT
    values = _per_query_head(dense_values, q, dtype)
    if decay is not None:
        query_decay = decay.gather(2, own.clamp(min=0)[:, None].expand(-1, heads, -1))[..., None]
        bias = query_decay - decay[:, :, None]
    if past is not None:
        keys, packed_values = unpack(past.keys, dtype), unpack(past.values, dtype)
        if past.key_rotation is not None:
            keys = keys @ past.key_rotation.to(dtype).mT
        if past.value_rotation is not None:
            packed_values = packed_values @ past.value_rotation.to(dtype).mT
        held = torch.arange(keys.shape[2], device=q.device) < past.keys.block * past.blocks[:, None]
        held = held[:, None, None].expand(-1, heads, time, -1)
        # A query before the first key of its row is padding: it sees nothing, not even packed tokens.
        packed_scores = _per_query_head(q, q, dtype) @ _per_query_head(keys, q, dtype).mT
        if past.debias:
            squares = read_squares(q, past.key_rotation, dense_end, dense_start, scale)
            packed_scores = packed_scores - error_variance(past.keys, squares) / (2 * scale)
        scores = torch.cat((packed_scores, scores), 3)
        values = torch.cat((_per_query_head(packed_values, q, dtype), values), 2)
        visible = torch.cat((held & visible.any(-1, keepdim=True), visible), 3)
        if decay is not None:
            assert past.decay is not None
            bias = torch.cat((query_decay - past.decay.flatten(2)[:, :, None], bias), 3)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if decay is not None:
        scores = scores + bias.to(dtype)
    sees_nothing = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~visible, -torch.inf).masked_fill(sees_nothing, 0.0).softmax(-1)
    weights = weights.masked_fill(~visible, 0.0)
    # Slots that no query sees may hold anything, even NaN, and 0 * NaN is NaN.
    values = values.masked_fill(~visible.any(2)[..., None], 0.0)
    return (weights @ values).to(q.dtype)


def _per_query_head(x: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` `[B, H, S, D]` as `[B, Hq, S, D]`, each head repeated for the query heads that share it."""
    return x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _levels(format: Format, x: Tensor) -> Tensor:
    """Return the largest code of each channel `[D]`, or `[1]` if they are the same."""
    if not format.high_channels:
        return x.new_full((1,), 2**format.bits - 1)
    levels = x.new_full((x.shape[-1],), 3.0)
    levels[: format.high_channels] = 15.0
    return levels


def _words(codes: Tensor, by_channel: bool) -> Tensor:
    """Pack 2-bit codes `[B, H, N, block, C]` into bytes `[B, H, N, block, C / 4]`, or `[B, H, N, C / 4, block]`."""
    shifts = 2 * torch.arange(4, device=codes.device, dtype=torch.uint8)
    words = (codes.unflatten(-1, (4, -1)) << shifts[:, None]).sum(-2, dtype=torch.uint8)
    return words.mT.contiguous() if by_channel else words


def _codes(words: Tensor, by_channel: bool) -> Tensor:
    """Undo `_words`: uint8 `[B, H, N, block, C]`."""
    words = words.mT if by_channel else words
    shifts = 2 * torch.arange(4, device=words.device, dtype=torch.uint8)
    return ((words[..., None, :] >> shifts[:, None]) & 3).flatten(-2)
