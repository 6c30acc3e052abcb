"""Writing new tokens into the slots of a cache, at places that only the device knows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operation import register_operation
from kernels.packed_kv.triton.rotation import CHUNK, load_chunk, product, rows_of_program
from kernels.rounding import cdiv, next_power_of_2


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first R channels of `x` `[B, H, T, D]` in pairs R / 2 apart (RoPE, arXiv 2104.09864).

    Args:
        x: queries or keys.
        cosine, sine: `[B, T, R]`.

    Returns:
        `[B, H, T, D]` in the dtype of x, computed in float32 at least.
    """
    dtype, width = torch.promote_types(x.dtype, torch.float32), cosine.shape[-1]
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    first, second = turned.chunk(2, -1)
    turned = turned * cosine[:, None].to(dtype) + torch.cat((-second, first), -1) * sine[:, None].to(dtype)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _write_tokens(storage: Tensor, new: Tensor, end: Tensor) -> None:
    """Write `new` `[B, H, T, D]` into the slots of `storage` `[B, H, S, D]` that end at `end` int32 `[B]`.

    A row that has no room for its tokens is not written.
    """
    batch, heads, tokens, width = new.shape
    if storage.is_cuda and storage.stride(3) == 1 and new.stride(3) == 1:
        with torch.cuda.device_of(storage):
            _write_row[(batch * heads * tokens,)](
                storage, new, end, *storage.stride()[:3], *new.stride()[:3], heads, tokens, storage.shape[2], width,
                next_power_of_2(width), num_warps=1,
            )  # fmt: skip
        return
    place = end.long()[:, None] - tokens + torch.arange(tokens, device=end.device)
    storage.scatter_(2, place[:, None, :, None].expand_as(new), new)


write_tokens = register_operation("write_tokens", _write_tokens, lambda storage, new, end: None, mutates=("storage",))


def _rotate_and_write(
    key_storage: Tensor,
    value_storage: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cosine: Tensor,
    sine: Tensor,
    end: Tensor,
    key_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write rotated keys `[B, Hk, T, D]` and values `[B, Hv, T, Dv]` as `write_tokens` does; rotate the queries.

    On CUDA one launch, in place of a dozen small ones for each layer of a decoding step.

    Args:
        key_storage, value_storage: `[B, Hk, S, D]` and `[B, Hv, S, Dv]`.
        q: `[B, Hq, T, D]`.
        cosine, sine: see `rotate`.
        end: int32 `[B]`, where the new tokens' slots end.
        key_map: float32 `[D, D]`, or None.

    Returns:
        The rotated queries, and these times `key_map`; both `[B, Hq, T, D]`, the second `[0]` without a map.
    """
    everything = (key_storage, value_storage, q, keys, values, cosine, sine)
    if not (q.is_cuda and q.dtype != torch.float64 and all(x.stride(-1) == 1 for x in everything)):
        write_tokens(key_storage, rotate(keys, cosine, sine), end)
        write_tokens(value_storage, values, end)
        turned = rotate(q, cosine, sine)
        return turned, q.new_empty(0) if key_map is None else mapped(turned, key_map)
    return launch_rotation(*everything, end, key_map)


def mapped(q: Tensor, key_map: Tensor) -> Tensor:
    """Return queries `[B, Hq, T, D]` times `key_map` `[D, D]`, in q's dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return (q.to(dtype) @ key_map.to(dtype)).to(q.dtype)


def launch_rotation(
    key_storage: Tensor,
    value_storage: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cosine: Tensor,
    sine: Tensor,
    end: Tensor,
    key_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `rotate_and_write` in one launch; channels are neighbors in all arguments but the map."""
    batch, query_heads, tokens, width = q.shape
    out = q.new_empty(q.shape)
    maps = key_map is not None
    out_mapped = q.new_empty(q.shape if maps else 0)
    padded = next_power_of_2(max(width, values.shape[3], CHUNK if maps else 1))
    query_rows = batch * query_heads * tokens
    rows, chunks = (rows_of_program(query_rows), cdiv(width, CHUNK)) if maps else (1, 1)
    query_programs = cdiv(query_rows, rows) * chunks
    others = batch * (keys.shape[1] + values.shape[1]) * tokens
    with torch.cuda.device_of(q):
        _rotate_and_write_rows[(query_programs + others,)](
            q, keys, values, cosine, sine, key_storage, value_storage, out, out_mapped, key_map, end,
            *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *cosine.stride()[:2], *sine.stride()[:2],
            *key_storage.stride()[:3], *value_storage.stride()[:3], *(key_map.stride() if maps else (0, 0)),
            query_heads, keys.shape[1], values.shape[1], tokens, key_storage.shape[2], query_rows, query_programs,
            width, values.shape[3], cosine.shape[2], padded, ROWS=rows, CHUNKS=chunks, CHUNK=CHUNK,
            num_warps=4 if maps else 1,
        )  # fmt: skip
    return out, out_mapped


def _fake_rotated(key_storage, value_storage, q, keys, values, cosine, sine, end, key_map=None):
    return q.new_empty(q.shape), q.new_empty(0 if key_map is None else q.shape)


rotate_and_write = register_operation(
    "rotate_and_write", _rotate_and_write, _fake_rotated, mutates=("key_storage", "value_storage")
)


@triton.jit
def _store_at(storage, in_row, slot, slots, slot_stride, channel, values, WIDTH: tl.constexpr):
    """Store a token's channels in its slot, if there is such a slot."""
    place = storage + in_row + slot.to(tl.int64) * slot_stride + channel
    tl.store(place, values, mask=(channel < WIDTH) & (slot >= 0) & (slot < slots))


@triton.jit(do_not_specialize=["heads", "tokens", "slots"])
def _write_row(
    storage, new, end, storage_b, storage_h, storage_s, new_b, new_h, new_t, heads, tokens, slots,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) % tokens
    head = tl.program_id(0) // tokens % heads
    row = (tl.program_id(0) // (tokens * heads)).to(tl.int64)
    slot = tl.load(end + row) - tokens + token
    channel = tl.arange(0, PADDED)
    values = tl.load(new + row * new_b + head * new_h + token * new_t + channel, mask=channel < WIDTH)
    in_row = row * storage_b + head.to(tl.int64) * storage_h
    _store_at(storage, in_row, slot, slots, storage_s, channel, values, WIDTH)


@triton.jit
def _rotated_rows(x, cosine, sine, channel, WIDTH: tl.constexpr, TURNED: tl.constexpr):
    """Load channels of the heads at `x` and rotate the first TURNED."""
    own = tl.load(x + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    is_first, turns = channel < TURNED // 2, channel < TURNED
    partner = tl.where(is_first, channel + TURNED // 2, channel - TURNED // 2)
    other = tl.load(x + partner, mask=turns, other=0.0).to(tl.float32)
    by_cosine = tl.load(cosine + channel, mask=turns, other=1.0).to(tl.float32)
    by_sine = tl.load(sine + channel, mask=turns, other=0.0).to(tl.float32)
    return own * by_cosine + tl.where(is_first, -other, other) * by_sine


@triton.jit
def _rotate_queries(
    program, q, cosine, sine, out, out_mapped, key_map, q_b, q_h, q_t, cosine_b, cosine_t, sine_b, sine_t,
    map_from, map_to, heads, tokens, rows,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS queries, a row for each head and token, and map them to a chunk of channels."""
    channel, chunk = tl.arange(0, PADDED), program % CHUNKS
    some = chunk * CHUNK + tl.arange(0, CHUNK)
    if key_map is not None:
        # First, so that it comes beside the queries.
        turn = load_chunk(key_map, channel, some, map_from, map_to, WIDTH)
    row = program // CHUNKS * ROWS
    if ROWS > 1:
        row += tl.arange(0, ROWS)[:, None]
    stores, place = row < rows, row.to(tl.int64) * WIDTH
    row = tl.minimum(row, rows - 1)
    token, head, batch = row % tokens, row // tokens % heads, (row // (tokens * heads)).to(tl.int64)
    turned = _rotated_rows(
        q + batch * q_b + head * q_h + token * q_t, cosine + batch * cosine_b + token * cosine_t,
        sine + batch * sine_b + token * sine_t, channel, WIDTH, TURNED,
    ).to(out.dtype.element_ty)  # fmt: skip
    if chunk == 0:
        tl.store(out + place + channel, turned, mask=stores & (channel < WIDTH))
    if key_map is not None:
        rounded = tl.where(channel < WIDTH, turned.to(tl.float32), 0.0)
        result = product(rounded, turn, ROWS)
        tl.store(out_mapped + place + some, result.to(out.dtype.element_ty), mask=stores & (some < WIDTH))


@triton.jit(
    do_not_specialize=["query_heads", "key_heads", "value_heads", "tokens", "slots", "query_rows", "query_programs"]
)
def _rotate_and_write_rows(
    q, keys, values, cosine, sine, key_storage, value_storage, out, out_mapped, key_map, end,
    q_b, q_h, q_t, key_b, key_h, key_t, value_b, value_h, value_t, cosine_b, cosine_t, sine_b, sine_t,
    key_storage_b, key_storage_h, key_storage_s, value_storage_b, value_storage_h, value_storage_s, map_from, map_to,
    query_heads, key_heads, value_heads, tokens, slots, query_rows, query_programs,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TURNED: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some queries, or one head of one token: of a key or a value."""
    if tl.program_id(0) < query_programs:
        _rotate_queries(
            tl.program_id(0), q, cosine, sine, out, out_mapped, key_map, q_b, q_h, q_t, cosine_b, cosine_t, sine_b,
            sine_t, map_from, map_to, query_heads, tokens, query_rows, WIDTH, TURNED, PADDED, ROWS, CHUNKS, CHUNK,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - query_programs
        heads = key_heads + value_heads
        token, head = program % tokens, program // tokens % heads
        row = (program // (tokens * heads)).to(tl.int64)
        slot = tl.load(end + row) - tokens + token
        channel = tl.arange(0, PADDED)
        if head < key_heads:
            turned = _rotated_rows(
                keys + row * key_b + head * key_h + token * key_t, cosine + row * cosine_b + token * cosine_t,
                sine + row * sine_b + token * sine_t, channel, WIDTH, TURNED,
            ).to(key_storage.dtype.element_ty)  # fmt: skip
            in_row = row * key_storage_b + head.to(tl.int64) * key_storage_h
            _store_at(key_storage, in_row, slot, slots, key_storage_s, channel, turned, WIDTH)
        else:
            head -= key_heads
            value = values + row * value_b + head * value_h + token * value_t
            new = tl.load(value + channel, mask=channel < VALUE_WIDTH)
            in_row = row * value_storage_b + head.to(tl.int64) * value_storage_h
            _store_at(value_storage, in_row, slot, slots, value_storage_s, channel, new, VALUE_WIDTH)
