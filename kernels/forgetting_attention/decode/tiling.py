"""Division of decoding into programs: groups of heads, tiles of keys, splits. On the host, from sizes alone."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rounding import next_power_of_2

NUM_WARPS = 4
# Depth of the pipeline that loads K, V and c: one tile in use, the others in flight.
NUM_STAGES = 3
# Programs that share a multiprocessor's shared memory: one computes while another waits.
PROGRAMS_PER_MULTIPROCESSOR = 2
# Shared memory of a program besides those tiles: scores exchanged between warps.
SHARED_MEMORY_BESIDE = 8 * 1024
MAX_KEYS = 128
# The smallest matrix product that tensor cores take, in rows and in keys.
SMALLEST_PRODUCT = 16
# Rows (queries times heads), and rows times channels, up to which accumulators and scores stay in registers.
MAX_ROWS = 64
MAX_ACCUMULATOR = 8192
# Fewer keys do not pay for another program and its part of the join.
MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True)
class Tiling:
    """Division of the heads into `groups`, and the tile of one program: rows x keys.

    A group has `heads` query heads, which read `key_heads` key heads and `value_heads` value heads. Its rows are
    `queries` x `padded_heads`, powers of 2.
    """

    groups: int
    heads: int
    key_heads: int
    value_heads: int
    queries: int
    padded_heads: int
    keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> "Tiling":
        """Choose the fewest groups that share no key head and no value head, if their tiles fit.

        Otherwise choose the fewest whose tiles fit: neighboring groups then read the same keys or values.
        """
        num_heads, num_key_heads, num_value_heads = q.shape[2], k.shape[2], v.shape[2]
        shared_memory = _shared_memory(q.device)
        for groups in range(math.gcd(num_key_heads, num_value_heads), num_heads + 1):
            if num_heads % groups or any(max(n, groups) % min(n, groups) for n in (num_key_heads, num_value_heads)):
                continue
            heads = num_heads // groups
            key_heads, value_heads = max(1, num_key_heads // groups), max(1, num_value_heads // groups)
            padded_heads = next_power_of_2(heads)
            queries = max(next_power_of_2(q.shape[1]), SMALLEST_PRODUCT // padded_heads)
            rows = queries * padded_heads
            channels = key_heads * block_dim(k.shape[3]) + value_heads * block_dim(v.shape[3])
            key_bytes = channels * k.element_size() + (0 if decay is None else padded_heads * decay.element_size())
            keys = shared_memory // ((NUM_STAGES - 1) * key_bytes)
            if keys >= SMALLEST_PRODUCT and rows <= MAX_ROWS and rows * block_dim(v.shape[3]) <= MAX_ACCUMULATOR:
                break
        keys = 1 << min(max(SMALLEST_PRODUCT, keys), MAX_KEYS).bit_length() - 1
        return cls(groups, heads, key_heads, value_heads, queries, padded_heads, keys)


def block_dim(head_dim: int) -> int:
    """Return the channels of a tile: a power of 2 that tensor cores accept."""
    return max(SMALLEST_PRODUCT, next_power_of_2(head_dim))


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory for the tiles of one program."""
    if device.type != "cuda":
        return 96 * 1024
    of_multiprocessor = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return of_multiprocessor // PROGRAMS_PER_MULTIPROCESSOR - SHARED_MEMORY_BESIDE


def choose_splits(programs: int, num_keys: int, device: torch.device) -> int:
    """Return the fewest splits of the keys that keep the device's multiprocessors nearly as busy as any other number.

    Args:
        programs: number of programs with one split.
        num_keys: keys of a row; a split gets at least MIN_KEYS_PER_SPLIT of them.
    """
    if device.type != "cuda":
        return 1
    at_once = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    most = max(1, min(num_keys // MIN_KEYS_PER_SPLIT, 4 * at_once // programs))
    busy = [programs * splits / (at_once * -(-programs * splits // at_once)) for splits in range(1, most + 1)]
    return next(splits for splits, share in enumerate(busy, 1) if share >= 0.95 * max(busy))
