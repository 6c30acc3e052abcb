"""The launches of attention over packed tokens: sizes of tiles, number of splits."""

import functools
import math

import torch
import triton.language as tl
from torch import Tensor

from kernels.packed_kv.formats import Packed, PackedPast
from kernels.packed_kv.triton.attention import LOG2_E, attend_split
from kernels.packed_kv.triton.join import join
from kernels.packed_kv.triton.rotation import rotated
from kernels.rounding import next_power_of_2

MIN_TOKENS, MAX_TOKENS = 32, 128
"""Packed tokens of one step, a power of 2: a product of int8 sums over 32 at least."""
MAX_ROWS = 32
"""Rows (query x head) of one program, of two warps: Triton 3.6 cannot lower these products for four on Hopper."""
DENSE_TILE = 32
"""Dense tokens of one step."""
SLOTS_PER_SPLIT = 128
"""Dense slots of one program; where programs are few, one step of them."""
FEW_PROGRAMS = 16
"""Programs of a split up to which a GPU is never full."""
BLOCKS_PER_DENSE_SPLIT = 3
"""Packed blocks that take as long as SLOTS_PER_SPLIT dense slots."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs that a multiprocessor runs at once: their registers fill it."""
JOIN_NUMBERS = 4096
"""Numbers of the splits' outputs that a warp of the join holds at once, where few rows leave it the registers."""
MANY_ROWS = 512
"""Rows that fill a GPU with one warp each, and share the reads of a rotation."""
NUM_STAGES = 3
"""Depth of the pipeline that loads blocks."""


def attend(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
    past_q: Tensor | None = None,
) -> Tensor:
    """Compute `packed_attention` in two launches, for MANY_QUERIES queries or fewer; same arguments."""
    if past_q is None:
        past_q = q.contiguous() if past.key_rotation is None else rotated(q.contiguous(), past.key_rotation, q.dtype)
    partial, lse, past_splits = _launch(q, past_q, dense_keys, dense_values, dense_end, dense_start, decay, past, scale)
    rows, dim = lse[0].numel(), dense_values.shape[3]
    turn = None if past.value_rotation is None else past.value_rotation.mT
    # Many rows share the reads of a rotation, in a launch of its own.
    turns_alone = turn is not None and rows >= MANY_ROWS
    out = q.new_empty(*q.shape[:3], dim, dtype=torch.float32 if turns_alone else q.dtype)
    past_out = torch.empty_like(out) if turns_alone else None
    padded = next_power_of_2(dim)
    turns_here = turn is not None and not turns_alone
    chunk, splits, warps = _join_tiles(rows, padded, len(lse), turns=turns_here)
    with torch.cuda.device_of(q):
        join[(rows, -(-dim // chunk))](
            partial, lse, out, past_out, turn if turns_here else None, dense_end, dense_start, rows, q.shape[2],
            q.shape[1] * q.shape[2], past_splits, len(lse), *((0, 0) if turn is None else turn.stride()),
            dim, padded, chunk, SPLITS=splits, num_warps=warps,
        )  # fmt: skip
    return rotated(past_out, turn, q.dtype, out) if turns_alone else out


def _launch(
    q: Tensor,
    past_q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    dense_start: Tensor | None,
    decay: Tensor | None,
    past: PackedPast,
    scale: float,
) -> tuple[Tensor, Tensor, int]:
    """Return the splits' outputs `[splits, B, Hq, T, Dv]` and lse (base 2), and how many are of packed tokens."""
    batch, num_heads, queries, key_dim = q.shape
    keys, values = past.keys, past.values
    value_dim = values.head_dim
    per_key, per_value = num_heads // keys.low.shape[1], num_heads // values.low.shape[1]
    heads = _largest_divisor(math.gcd(per_key, per_value), MAX_ROWS)
    padded_heads = next_power_of_2(heads)
    is_float32 = q.dtype == torch.float32
    rows = min(max(8 if is_float32 else 4, next_power_of_2(queries) * padded_heads), MAX_ROWS)
    row_tiles = -(-queries // (rows // padded_heads))
    past_splits, dense_splits = _splits(
        batch * (num_heads // heads) * row_tiles, keys.blocks, dense_keys.shape[2], q.device
    )
    splits = past_splits + dense_splits
    partial = q.new_empty(splits, batch, num_heads, queries, value_dim, dtype=torch.float32)
    lse = q.new_empty(splits, batch, num_heads, queries, dtype=torch.float32)
    q = q.contiguous()
    dense_keys, dense_values = (x if x.stride(-1) == 1 else x.contiguous() for x in (dense_keys, dense_values))
    decay, past_decay = (None if x is None else x.contiguous() for x in (decay, past.decay))
    with torch.cuda.device_of(q):
        attend_split[(splits, num_heads // heads * row_tiles, batch)](
            q, past_q, keys.low, keys.high, _pairs(keys), values.low, values.high, _pairs(values), past.blocks,
            past_decay,
            dense_keys, dense_values, dense_end, dense_start, decay, partial, lse,
            *dense_keys.stride()[:3], *dense_values.stride()[:3],
            queries, 0 if decay is None else decay.shape[2], keys.blocks, past_splits, scale * LOG2_E.value,
            NUM_HEADS=num_heads,
            HEADS_PER_KEY_HEAD=per_key,
            HEADS_PER_VALUE_HEAD=per_value,
            HEADS=heads,
            PADDED_HEADS=padded_heads,
            ROWS=rows,
            TILE=DENSE_TILE,
            BLOCK=keys.block,
            TOKENS=_tokens_per_step(past.keys, rows),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_GROUPS=_groups(past.keys),
            VALUE_GROUPS=_groups(past.values),
            HIGH_KEYS=keys.format.high_of(key_dim),
            FOUR_BIT_VALUES=values.format.bits == 4,
            DEBIAS=past.debias,
            DTYPE=tl.float32 if is_float32 else tl.int8,
            PRECISION="tf32x3" if is_float32 else "tf32",
            num_warps=max(1, rows // 16),
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return partial, lse, past_splits


def _tokens_per_step(keys: Packed, rows: int) -> int:
    """Return the tokens of one step: as many as a block has, and as registers hold beside the rows."""
    return max(MIN_TOKENS, min(next_power_of_2(keys.block), MAX_TOKENS if rows <= 8 else MAX_TOKENS // 2))


def _join_tiles(rows: int, channels: int, splits: int, *, turns: bool) -> tuple[int, int, int]:
    """Return the channels, splits of a step, and warps of a program that joins a row; many rows fill a GPU alone.

    Args:
        rows: to be joined.
        channels: of a row.
        splits: of the tokens.
        turns: whether the program rotates the row, and so reads all channels of packed tokens.
    """
    if rows >= MANY_ROWS:
        chunk, warps, numbers = channels, 1, JOIN_NUMBERS // 4
    else:
        chunk, warps, numbers = min(32, channels), 4, 4 * JOIN_NUMBERS
    return chunk, min(next_power_of_2(splits), numbers // (channels if turns else chunk)), warps


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _pairs(side: Packed) -> Tensor:
    """Return the scales and offsets as one int32 each."""
    return side.metadata.view(torch.int32)


def _groups(side: Packed) -> int:
    """Return the groups of a token's channels, 0 for groups along tokens."""
    return 0 if side.format.groups_along == "tokens" else side.head_dim // side.format.group


def _splits(programs: int, blocks: int, slots: int, device: torch.device) -> tuple[int, int]:
    """Return the splits of the packed blocks and of the dense slots.

    Args:
        programs: programs of one split.
        blocks: blocks that the past has room for.
        slots: slots that the dense tokens have room for.
    """
    dense = -(-slots // (DENSE_TILE if programs <= FEW_PROGRAMS else SLOTS_PER_SPLIT))
    if device.type != "cuda":
        return min(3, blocks), dense
    at_once = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    return _past_splits(programs, blocks, dense, at_once), dense


@functools.lru_cache(maxsize=1024)
def _past_splits(programs: int, blocks: int, dense: int, at_once: int) -> int:
    """Return the splits of `blocks` blocks that take the least time, beside `dense` splits of dense slots."""

    def cost(splits: int) -> float:
        """Estimate the time in steps of one block; a program's start and end take about another."""
        share = -(-blocks // splits) + 1
        if programs * (splits + dense) <= at_once:
            return share
        # Programs that do not fit wait for others: the last ones end half a program late on average.
        return programs * (splits * share + dense * BLOCKS_PER_DENSE_SPLIT) / at_once + share / 2

    return min(range(1, min(blocks, max(1, 4 * at_once // programs)) + 1), key=lambda splits: (cost(splits), splits))
