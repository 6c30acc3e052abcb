"""Attention over packed and 16-bit tokens as one torch operation; chooses the implementation by device and size."""

import torch
from torch import Tensor

from kernels.forgetting_attention import forgetting_attention
from kernels.operation import register_operation
from kernels.packed_kv import chunked
from kernels.packed_kv.chunked import RunningSoftmax, merge
from kernels.packed_kv.formats import MANY_QUERIES, Format, Packed, PackedPast
from kernels.packed_kv.reference import read_squares
from kernels.packed_kv.triton import launch
from kernels.packed_kv.triton.unpack import attend_unpacked


def _packed_attention(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    packed: list[Tensor],
    blocks: Tensor | None,
    past_decay: Tensor | None,
    key_rotation: Tensor | None,
    value_rotation: Tensor | None,
    past_q: Tensor | None,
    key_format: list[float],
    value_format: list[float],
    debias: bool,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Implement `packed_attention`; `packed` has the tensors of the keys, then of the values."""
    dense = dense_keys, dense_values, dense_end, dense_start, decay
    if blocks is None:
        return _attend_dense(q, *dense, scale, softcap, return_lse=False)[0].to(q.dtype)
    keys, values = _read(packed, key_format, value_format)
    past = PackedPast(keys, values, blocks, past_decay, key_rotation, value_rotation, debias)
    if q.is_cuda and q.dtype != torch.float64 and softcap is None:
        if q.shape[2] <= MANY_QUERIES:
            return launch.attend(q, *dense, past, scale, past_q)
        return attend_unpacked(q, *dense, past, scale)
    out, lse = _attend_dense(q, *dense, scale, softcap, return_lse=True)
    query_decay = None if decay is None else _own(decay, dense_end, q.shape[2])
    squares = read_squares(q, past.key_rotation, dense_end, dense_start, scale) if debias else None
    past_out, past_lse = chunked.attend_past(q, past, query_decay, scale, softcap, squares)
    # A query of padding sees no dense token, not even itself: nothing packed either.
    past_lse = past_lse.masked_fill(lse == -torch.inf, -torch.inf)
    return merge(out, lse, past_out, past_lse).to(q.dtype)


def _fake(q, dense_keys, dense_values, *_):
    return q.new_empty(*q.shape[:3], dense_values.shape[3])


operation = register_operation("packed_attention", _packed_attention, _fake)


def flat(side: Packed) -> tuple[list[Tensor], list[float]]:
    """Return a Packed's tensors and its format as an operation takes them."""
    format = side.format
    return list(side.tensors()), [
        format.bits, format.groups_along == "tokens", format.group, format.high_channels, format.clip,
    ]  # fmt: skip


def _read(packed: list[Tensor], key_format: list[float], value_format: list[float]) -> tuple[Packed, Packed]:
    """Undo `flat` for keys and values."""
    sides, tensors = [], list(packed)
    for numbers, by_channel in ((key_format, False), (value_format, True)):
        bits, along_tokens, group, high, clip = numbers
        format = Format(int(bits), "tokens" if along_tokens else "channels", int(group), int(high), clip)
        has_high = format.bits == 4 or bool(format.high_channels)
        low = tensors.pop(0)
        high_words = tensors.pop(0) if has_high else None
        sides.append(Packed(low, high_words, tensors.pop(0), format, by_channel))
    return sides[0], sides[1]


def _own(decay: Tensor, dense_end: Tensor, queries: int) -> Tensor:
    """Return the sums of log gates at the queries' own slots, `[B, Hq, T]`."""
    own = dense_end.long()[:, None] - queries + torch.arange(queries, device=decay.device)
    return decay.gather(2, own.clamp(min=0)[:, None].expand(-1, decay.shape[1], -1))


def _attend_dense(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    end: Tensor,
    start: Tensor | None,
    decay: Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally to the 16-bit tokens: output `[B, Hq, T, Dv]` and lse `[B, Hq, T]`, which may be left out."""
    if softcap is not None:
        own = end.long()[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
        slot = torch.arange(keys.shape[2], device=q.device)
        visible = slot <= own[..., None]
        if start is not None:
            visible &= slot >= start[:, None, None]
        bias = None if decay is None else _own(decay, end, q.shape[2])[..., None] - decay[:, :, None]
        softmax = RunningSoftmax(q, scale, softcap)
        softmax.add(keys, values, visible[:, None], bias)
        return softmax.result()
    found = forgetting_attention(
        *(x.transpose(1, 2) for x in (q, keys, values)),
        None if decay is None else decay.transpose(1, 2),
        scale=scale,
        kv_start=start,
        kv_end=end,
        cumulative=decay is not None,
        return_lse=return_lse,
    )
    out, lse = found if return_lse else (found, None)
    return out.transpose(1, 2), lse if lse is None else lse.transpose(1, 2)
