"""The two launches of selective attention: sizes of tiles, scratch memory, number of splits."""

import torch
from torch import Tensor

from kernels.forgetting_attention.decode.kernel import strides_in_units
from kernels.forgetting_attention.decode.tiling import NUM_STAGES, NUM_WARPS, SMALLEST_PRODUCT, block_dim, choose_splits
from kernels.rounding import cdiv, next_power_of_2
from kernels.selective_attention.triton.choice import choose_and_attend
from kernels.selective_attention.triton.scores import score_split

CHUNK = 32
"""Keys of a chunk. 64k keys have 2,048 maxima, and 100 chosen ones lie in 100 chunks of them: 3,200 scores."""
MAX_ROWS = 32
"""Query heads of a program of the first launch."""
MAX_KEYS, TILE_BYTES = 128, 16 * 1024
"""Keys of its tile, and the bytes that the tile may have."""
BLOCK, CHOICE_WARPS = 4096, 8
"""Numbers that a program of the second launch holds at once: the scores of up to 128 chunks in 16 registers each."""
MAX_ITEMS, VALUE_NUMBERS = 128, 8192
"""Values that it reads at once, and their numbers."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_values: int,
    decay: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    softcap: float | None,
    num_splits: int | None = None,
) -> Tensor:
    """Compute `selective_attention`; same arguments and result. num_splits: see `score`."""
    order, maxima = score(q, k, decay, kv_start, kv_end, scale, softcap, num_splits)
    return choose(order, maxima, v, top_values, kv_start, kv_end)


def score(
    q: Tensor,
    k: Tensor,
    decay: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    scale: float,
    softcap: float | None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the scores of all keys in use, in the first launch; arguments as in `selective_attention`.

    Args:
        num_splits: of a row's keys; chosen from the sizes and the device when None.

    Returns:
        int32 [B, Hq, chunks * CHUNK] in the order of the scores, and the largest of each chunk [B, Hq, chunks]. Chunks
        without a key in use are not written.
    """
    batch, _, num_heads, key_dim = q.shape
    num_keys, key_heads = k.shape[1:3]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (q_unit, q_strides), (k_unit, k_strides) = strides_in_units(q), strides_in_units(k)
    along_keys, decay, decay_strides = _readable_decay(decay)
    num_chunks, per_key_head = cdiv(num_keys, CHUNK), num_heads // key_heads
    rows = max(SMALLEST_PRODUCT, min(next_power_of_2(per_key_head), MAX_ROWS))
    programs = key_heads * cdiv(per_key_head, rows)
    if num_splits is None:
        num_splits = choose_splits(batch * programs, num_keys, q.device)
    order = q.new_empty(batch, num_heads, num_chunks * CHUNK, dtype=torch.int32)
    maxima = q.new_empty(batch, num_heads, num_chunks, dtype=torch.int32)
    with torch.cuda.device_of(q):
        score_split[(programs, num_splits, batch)](
            q, k, decay, kv_start, kv_end, order, maxima,
            q_strides[0], q_strides[2], *k_strides, *decay_strides, num_keys, num_chunks, scale, softcap,
            Q_UNIT=q_unit,
            K_UNIT=k_unit,
            DECAY_ALONG_KEYS=along_keys,
            NUM_HEADS=num_heads,
            HEADS_PER_KEY_HEAD=per_key_head,
            ROWS=rows,
            CHUNK=CHUNK,
            BLOCK_KEYS=max(CHUNK, min(TILE_BYTES // (block_dim(key_dim) * k.element_size()), MAX_KEYS)),
            KEY_DIM=key_dim,
            BLOCK_KEY_DIM=block_dim(key_dim),
            # Three products in tf32 for one in float32: tf32 alone has 10 bits.
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return order, maxima


def choose(
    order: Tensor,
    maxima: Tensor,
    v: Tensor,
    top_values: int,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
) -> Tensor:
    """Attend to the keys of the highest scores, in the second launch.

    Args:
        order, maxima: what `score` returns.
        v, top_values, kv_start, kv_end: as in `selective_attention`.

    Returns:
        [B, 1, Hq, Dv] in v's dtype.
    """
    batch, num_heads, num_chunks = maxima.shape
    num_keys, value_heads, value_dim = v.shape[1:]
    v = v if v.stride(-1) == 1 else v.contiguous()
    v_unit, v_strides = strides_in_units(v)
    most_keys = min(top_values, num_keys)
    keys = order.new_empty(batch, num_heads, most_keys)
    weights = keys.new_empty(keys.shape, dtype=torch.float32)
    out = v.new_empty(batch, 1, num_heads, value_dim)
    with torch.cuda.device_of(v):
        choose_and_attend[(batch * num_heads,)](
            order, maxima, v, kv_start, kv_end, torch.empty_like(maxima), keys, weights, out,
            *v_strides, num_keys, num_chunks, top_values, most_keys,
            V_UNIT=v_unit,
            NUM_HEADS=num_heads,
            HEADS_PER_VALUE_HEAD=num_heads // value_heads,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            ITEMS=max(1, min(MAX_ITEMS, VALUE_NUMBERS // block_dim(value_dim))),
            VALUE_DIM=value_dim,
            BLOCK_VALUE_DIM=block_dim(value_dim),
            num_warps=CHOICE_WARPS,
        )  # fmt: skip
    return out


def _readable_decay(decay: Tensor | None) -> tuple[bool, Tensor | None, tuple[int, int]]:
    """Return whether a head's sums lie together, sums that the kernel can read, and their strides.

    The strides are that of the batch, and that of the heads where a head's sums lie together, else that of the keys.
    """
    if decay is None:
        return False, None, (0, 0)
    along_keys = decay.stride(1) == 1 and decay.stride(2) != 1
    if not along_keys and decay.stride(2) != 1:
        decay = decay.contiguous()
    return along_keys, decay, (decay.stride(0), decay.stride(2 if along_keys else 1))
