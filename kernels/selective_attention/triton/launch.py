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
    """Compute `selective_attention`; same arguments and result.

    num_splits of a row's keys is chosen from the sizes and the device when None.
    """
    batch, _, num_heads, key_dim = q.shape
    num_keys, value_dim = v.shape[1], v.shape[3]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (q_unit, q_strides), (k_unit, k_strides), (v_unit, v_strides) = map(strides_in_units, (q, k, v))
    along_keys, decay, decay_strides = _readable_decay(decay)
    num_chunks, most_keys = cdiv(num_keys, CHUNK), min(top_values, num_keys)
    per_key_head = num_heads // k.shape[2]
    rows = max(SMALLEST_PRODUCT, min(next_power_of_2(per_key_head), MAX_ROWS))
    programs = k.shape[2] * cdiv(per_key_head, rows)
    keys_at_once = TILE_BYTES // (block_dim(key_dim) * k.element_size())
    order = q.new_empty(batch, num_heads, num_chunks * CHUNK, dtype=torch.int32)
    maxima, chunks = (q.new_empty(batch, num_heads, num_chunks, dtype=torch.int32) for _ in range(2))
    keys = q.new_empty(batch, num_heads, most_keys, dtype=torch.int32)
    weights = q.new_empty(batch, num_heads, most_keys, dtype=torch.float32)
    out = q.new_empty(batch, 1, num_heads, value_dim)
    if num_splits is None:
        num_splits = choose_splits(batch * programs, num_keys, q.device)
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
            BLOCK_KEYS=max(CHUNK, min(keys_at_once, MAX_KEYS)),
            KEY_DIM=key_dim,
            BLOCK_KEY_DIM=block_dim(key_dim),
            # Three products in tf32 for one in float32: tf32 alone has 10 bits.
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )  # fmt: skip
        choose_and_attend[(batch * num_heads,)](
            order, maxima, v, kv_start, kv_end, chunks, keys, weights, out,
            *v_strides, num_keys, num_chunks, top_values, most_keys,
            V_UNIT=v_unit,
            NUM_HEADS=num_heads,
            HEADS_PER_VALUE_HEAD=num_heads // v.shape[2],
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
