"""Triton functions from a Liger layer's projections to the inputs of state and window.

All compute in float32. 1 minus a gate has full precision for gates near 1 too: these are HGRN2's keys.
"""

import triton
import triton.language as tl


@triton.jit
def state_inputs(
    q, k, used, shift, head, temperature,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    PER_HEAD: tl.constexpr, GATE: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Return one head's state inputs: a tuple of queries, the key, and the log gate.

    q [BLOCK, QUERIES], QUERIES a power of 2, and k [BLOCK] are projections, zero beyond DIM, where `used` ends.
    The log gate has one value per channel, or with PER_HEAD a single value.
    """
    queries = _columns(_mapped(q, used[:, None], MAP), BLOCK, QUERIES)
    log_decay = _log_gate(k, shift, head, temperature, HEADS, DIM, PER_HEAD, GATE)
    if GATE == "hgrn2":
        k = once(_one_less_gate(log_decay).to(k.dtype))
    else:
        k = tl.reshape(_mapped(k[:, None], used[:, None], MAP), (BLOCK,))
    return queries, k, log_decay


@triton.jit
def once(x):
    """Return `x` [channels], computed by one thread and shared with the threads that need it.

    Without this sum over a single element, the compiler makes every thread recompute x from its inputs.
    """
    return tl.sum(x[:, None], 1)


@triton.jit
def load_pairs(x, cosine, sine, dim, used, ROTATED: tl.constexpr):
    """Load vectors at `x + dim`, their partners in the rotation of the first ROTATED channels, and its tables."""
    turned = dim < ROTATED
    here = tl.load(x + dim, mask=used, other=0.0)
    # Loaded again instead of exchanged between threads: it is in the cache.
    partner = tl.load(x + (dim + ROTATED // 2) % ROTATED, mask=used & turned, other=0.0)
    cosine = tl.load(cosine + dim, mask=turned, other=1.0)
    sine = tl.load(sine + dim, mask=turned, other=0.0)
    return here, partner, cosine, tl.where(dim < ROTATED // 2, -sine, sine)


@triton.jit
def rotated(pairs):
    """Return the rotated result of `load_pairs`, in the vectors' dtype."""
    here, partner, cosine, sine = pairs
    turned = here.to(tl.float32) * cosine.to(tl.float32) + partner.to(tl.float32) * sine.to(tl.float32)
    return turned.to(here.dtype)


@triton.jit
def _mapped(x, used, MAP: tl.constexpr):
    """Apply the feature map to `x` [channels, vectors], in its dtype; `used` [channels, 1]."""
    if MAP == "softmax":
        wide = tl.where(used, x.to(tl.float32), -float("inf"))
        weights = tl.exp(wide - tl.max(wide, 0)[None, :])
        x = (weights / tl.sum(weights, 0)[None, :]).to(x.dtype)
    return x


@triton.jit
def _columns(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return the columns of `x` as a tuple. A thread holds whole rows, so no data moves between threads."""
    parts = (x,)
    for level in tl.static_range(COUNT.bit_length() - 1):
        even, odd = (), ()
        for part in tl.static_range(1 << level):
            first, second = tl.split(tl.reshape(parts[part], (ROWS, COUNT >> (level + 1), 2)))
            even += (first,)
            odd += (second,)
        parts = even + odd
    columns = ()
    for part in tl.static_range(COUNT):
        columns += (tl.reshape(parts[part], (ROWS,)),)
    return columns


@triton.jit
def _log_gate(
    k, shift, head, temperature,
    HEADS: tl.constexpr, DIM: tl.constexpr, PER_HEAD: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    if GATE == "none":
        log_decay = tl.full((), 0.0, tl.float32)
    elif GATE == "fixed":
        log_decay = -tl.exp2(-8.0 * (head + 1) / HEADS)
    else:
        logits = k.to(tl.float32)
        if PER_HEAD:
            logits = tl.sum(logits, 0) / DIM
        logits += shift
        if GATE == "rwkv6":
            log_decay = -tl.exp(logits)
        elif GATE == "mamba2":
            log_decay = _log_sigmoid(-logits)
        else:
            log_decay = _log_sigmoid(logits)
    return log_decay / temperature


@triton.jit
def _log_sigmoid(x):
    # log(1 + y) for y from 0 to 1: 2 artanh(y / (2 + y)) by its series; the argument is at most 1/3.
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    series = z * 0.0
    for term in tl.static_range(8):
        series = 1.0 / (15 - 2 * term) + series * z * z
    return tl.minimum(x, 0.0) - 2.0 * z * series


@triton.jit
def _one_less_gate(log_decay):
    """Return `1 - exp(log_decay)`, by its series where log_decay is near 0."""
    series = log_decay * 0.0 + 1.0
    for term in tl.static_range(8):
        series = 1.0 + series * log_decay / (9 - term)
    return tl.where(log_decay > -0.5, -log_decay * series, 1.0 - tl.exp(log_decay))
