"""Sums of log decays over parts of a chunk, and which parts a chunk is cut into, so that no exponent overflows.

Decays are kept in units of log 2. Over a chunk of C = 64 tokens, for each channel of the decaying axis:

    before_i = sum_{t <= i} g_t           from the chunk's start to token i
    after_i  = sum_{t > i} g_t            from token i to the chunk's end
    pairs (i, j), i > j: exp2(before_i - before_j), the decay between them, as a product of a factor of i and one of j:

- Weak chunks: c_i = before_i - before_middle, exp2(c_i) exp2(-c_j). Right while |c| stays under LARGEST.
- Others: for levels s = C/2, C/4, ..., w, the pairs of neighbouring blocks of s tokens, i in an odd block and j in the
  even one before it: exp2(sum from the block's start to i) exp2(sum from j to the block's end). No exponent is above 0.
  Pairs inside blocks of w tokens are left, and for these |c| is small again: w is halved until it is, down to w = 1,
  the diagonal.

Each sum is a product with a matrix of ones, and adds only what lies between: never the difference of long sums. A log
decay under CLOSED counts as CLOSED, of which exp2 is 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-160.0)
LARGEST = tl.constexpr(50.0)


def sum_matrices(chunk: int, device: torch.device) -> Tensor:
    """[2, C, C] bfloat16, for weak chunks: times g it is c; the second adds the tokens from each one on."""
    cached = (chunk, device)
    if cached not in _MATRICES:
        token = torch.arange(chunk, device=device)
        ones = token[:, None] >= token
        matrices = torch.stack([ones.int() - (token < chunk // 2).int(), ones.mT.int()]).bfloat16()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return matrices  # which holds nothing before the graph is replayed
        _MATRICES[cached] = matrices
    return _MATRICES[cached]


_MATRICES: dict[tuple[int, torch.device], Tensor] = {}


@triton.jit
def in_log2(log_decay):
    """Natural logs to units of log 2, none under CLOSED."""
    return tl.maximum(log_decay.to(tl.float32) * LOG2_E, CLOSED)


@triton.jit
def weighted_sums(weights, x, IN_HALVES: tl.constexpr):
    """weights [C, C] of -1, 0 and 1 times x [C, D] float32.

    IN_HALVES: on tensor cores, x as the sum of two bfloat16 (16 bits of its mantissa).
    """
    if IN_HALVES:
        weights = weights.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(weights, low, tl.dot(weights, high))
    return tl.dot(weights.to(tl.float32), x, input_precision="ieee")


@triton.jit
def count_levels(centred, log_decay, CHUNK: tl.constexpr, HALVINGS: tl.constexpr):
    """How many levels of pairs between neighbouring blocks a chunk needs, 0 for a weak one. Closed gates are strong.

    centred: c of the whole chunk. Blocks of w tokens have |c| of at most w / 2 times the largest gate. HALVINGS: log2 of
    the chunk's tokens.
    """
    steepest = tl.max(tl.max(-log_decay, 1), 0)
    strong = (tl.max(tl.max(tl.abs(centred), 1), 0) > LARGEST) | (steepest >= -CLOSED)
    levels = strong.to(tl.int32)
    for halvings in tl.static_range(HALVINGS - 1):
        half = CHUNK >> (halvings + 2)
        levels += (strong & (steepest * half > LARGEST)).to(tl.int32)
    return levels


@triton.jit
def level_sums(row, column, size):
    """[C, C] of 0 and 1: row i holds the tokens from its block's start to i (odd blocks of `size`), or after i to its
    block's end (even blocks). row [C, 1] and column [1, C]; exchanged, they give the transpose."""
    block = row // size
    inside = column // size == block
    return (inside & ((column <= row) == (block % 2 == 1))).to(tl.float32)


@triton.jit
def centred_sums(row, column, size):
    """[C, C] of -1, 0 and 1: row i holds the signed tokens between i and the middle of its block of `size`."""
    block = row // size
    middle = block * size + tl.maximum(size // 2 - 1, 0)
    signed = (column <= row).to(tl.float32) - (column <= middle).to(tl.float32)
    return tl.where(column // size == block, signed, 0.0)


@triton.jit
def between_neighbours(row, column, size):
    """[C, C] bool: row in an odd block of `size`, column in the even block before it."""
    block = row // size
    return (block % 2 == 1) & (column // size == block - 1)


@triton.jit
def matrix(matrices, index, row, column, CHUNK: tl.constexpr):
    """One of `sum_matrices`."""
    return tl.load(matrices + (index * CHUNK + row) * CHUNK + column)


@triton.jit
def ones(mask):
    """A matrix of 0 and 1."""
    return mask.to(tl.float32)
