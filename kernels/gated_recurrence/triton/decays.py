"""Sums of log decays over parts of a chunk, and the division of a chunk into parts so that no exponent overflows.

Log decays are in base 2. Over a chunk of C = 64 tokens, for each channel of the decaying axis:

    before_i = sum_{t <= i} g_t           from the chunk's start to token i
    after_i  = sum_{t > i} g_t            from token i to the chunk's end
    pairs (i, j), i > j: exp2(before_i - before_j), the decay between them, as a factor of i times a factor of j:

- Weak chunks: neither half decays below 2^-60 in any channel (the limit is tighter with fewer tokens). With
  c_i = before_i - before_middle, exp2(c_i) exp2(-c_j).
- Strong chunks: for levels s = C/2, C/4, ..., w, the pairs of neighbouring blocks of s tokens, i in an odd block and j
  in the even one before it: exp2(sum from the block's start to i) exp2(sum from j to the block's end). No exponent is
  above 0. Pairs inside blocks of w tokens remain, where |c| is small. Between tokens of a strong chunk, a gate below
  2^-25 is raised to 2^-25, which is negligible next to the token's own term; then |c| <= 100 at w = 8 or before. With
  bfloat16 the bound is 2^-12, and w = 16. Closed gates stay closed and need levels down to w = 1. Gates between chunks
  are not raised, and a gate's own gradient is multiplied by the factor that raising leaves out.

Each sum is a product with a 0-1 matrix over exactly the tokens in between, never a difference of long sums. A log decay
below CLOSED is replaced by CLOSED, whose exp2 is 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # tokens
MOST_LEVELS = CHUNK.bit_length() - 1
LEVELS_OF_OPEN, LEVELS_OF_OPEN_IN_HALVES = 3, 2  # enough without closed gates: blocks of 8 and 16 tokens
LOG2_E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-160.0)
FAINTEST, FAINTEST_IN_HALVES = tl.constexpr(-25.0), tl.constexpr(-12.0)
LARGEST_WEAK, LARGEST_STRONG = tl.constexpr(60.0), tl.constexpr(100.0)


# Indices into `sum_matrices`; CENTRED and LEVEL have one matrix per number of halvings.
UNTIL, AFTER, FROM, BEFORE, CENTRED, CENTRED_TRANSPOSED, LEVEL, LEVEL_TRANSPOSED = map(
    tl.constexpr, (0, 1, 2, 3, 4, 11, 18, 24)
)


def sum_matrices(device: torch.device) -> Tensor:
    """Return [30, C, C] bfloat16 matrices of -1, 0 and 1; their products with g are the sums above. Cached per device.

    Row i of UNTIL selects the tokens up to i, of AFTER those after i; FROM and BEFORE are their transposes. CENTRED +
    n: tokens between i and the middle of its block of C / 2^n tokens, signed. LEVEL + n, with blocks of C / 2^(n + 1):
    tokens from the block's start to i in odd blocks, tokens after i to the block's end in even ones.
    """
    if device not in _MATRICES:
        row, column = torch.arange(CHUNK, device=device)[:, None], torch.arange(CHUNK, device=device)
        until, after = column <= row, column > row
        centred, levels = [], []
        for halvings in range(MOST_LEVELS + 1):
            size = CHUNK >> halvings
            block = row // size
            middle = block * size + max(size // 2 - 1, 0)
            centred.append((until.int() - (column <= middle).int()) * (column // size == block))
            if halvings:
                levels.append((column // size == block) & torch.where(block % 2 == 1, until, after))
        groups = [until, after], [until.mT, after.mT], centred, [m.mT for m in centred], levels, [m.mT for m in levels]
        matrices = torch.stack([m.bfloat16() for group in groups for m in group])
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return matrices  # not cached: its memory is unset until the graph is replayed
        _MATRICES[device] = matrices
    return _MATRICES[device]


_MATRICES: dict[torch.device, Tensor] = {}


@triton.jit
def in_log2(log_decay):
    """Convert natural logs to base 2, with CLOSED as lower bound."""
    return tl.maximum(log_decay.to(tl.float32) * LOG2_E, CLOSED)


@triton.jit
def weighted_sums(weights, x, IN_HALVES: tl.constexpr):
    """Multiply weights [C, C] of -1, 0 and 1 with x [C, D] float32.

    IN_HALVES: on tensor cores, with x as the sum of two bfloat16 (16 bits of its mantissa).
    """
    if IN_HALVES:
        weights = weights.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(weights, low, tl.dot(weights, high))
    return tl.dot(weights.to(tl.float32), x, input_precision="ieee")


@triton.jit
def sums_until(x, IN_HALVES: tl.constexpr):
    """Return the cumulative sums of x; float64 unless bfloat16 hides the rounding of their differences."""
    return tl.cumsum(x if IN_HALVES else x.to(tl.float64), 0)


@triton.jit
def matrix(matrices, index, row, column):
    """Load one of `sum_matrices`, [C, C]. row [C, 1], column [1, C]."""
    SIZE: tl.constexpr = row.shape[0]
    return tl.load(matrices + (index * SIZE + row) * SIZE + column)


@triton.jit
def same_block(row, column, size):
    """Return [C, C] bool: row and column are in one block of `size`, a power of two."""
    return (row ^ column) < size


@triton.jit
def neighbours(row, column, size):
    """Return [C, C] bool: row and column are in two blocks of `size`, an even one and the odd one after it."""
    return ((row ^ column) >= size) & ((row ^ column) < 2 * size)


@triton.jit
def bounded(log_decay, IN_HALVES: tl.constexpr):
    """Raise gates between tokens of a strong chunk to FAINTEST; closed gates stay closed."""
    least: tl.constexpr = FAINTEST_IN_HALVES if IN_HALVES else FAINTEST
    return tl.where(log_decay <= CLOSED, CLOSED, tl.maximum(log_decay, least))


@triton.jit
def left_out(log_decay, IN_HALVES: tl.constexpr):
    """Return the factor that `bounded` leaves out."""
    least: tl.constexpr = FAINTEST_IN_HALVES if IN_HALVES else FAINTEST
    return tl.exp2(tl.minimum(log_decay - least, 0.0))


@triton.jit
def fewest_levels(matrices, log_decay, row, column, IN_HALVES: tl.constexpr, MOST: tl.constexpr, OPEN: tl.constexpr):
    """Return the number of levels after which |c| is small in a strong chunk. log_decay: from `bounded`."""
    levels = tl.where(tl.min(tl.min(log_decay, 1), 0) <= CLOSED, MOST, OPEN)
    # Half precision is enough; with float32 gates and TF32, Triton 3.6 cannot compile the code after the loop.
    narrow = log_decay.to(tl.bfloat16 if IN_HALVES else tl.float16)
    most = levels
    for step in range(most - 1):
        halvings = most - 1 - step
        weights = matrix(matrices, CENTRED + halvings, row, column).to(narrow.dtype)
        centred = tl.dot(weights, narrow, input_precision="ieee")
        # The sums of rounded gates may be off by one percent: leave that margin.
        fits = tl.max(tl.max(tl.abs(centred), 1), 0) <= 0.99 * LARGEST_STRONG
        levels = tl.where(fits, halvings, levels)
    return levels
