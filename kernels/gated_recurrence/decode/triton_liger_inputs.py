"""What a Liger layer makes of its projections before the state and the window take them: functions of Triton kernels.

All compute in float32. Gates have all their digits however near to 1 they are: HGRN2's keys are what they lack of it.
"""

import triton
import triton.language as tl


@triton.jit
def state_inputs(
    q, k, used, shift, head, temperature,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    PER_HEAD: tl.constexpr, GATE: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """What the state of one head takes in: its queries, each by itself, the key, and the log gate.

    q [BLOCK, QUERIES], a power of 2 of them, and k [BLOCK] as they are projected, zeros beyond DIM, where `used` ends.
    The log gate is of each channel, or with PER_HEAD one number.
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
    """`x` [channels], computed by one thread for all that want it.

    The compiler would have each of them compute it, from what x is made of, but for a sum in between, of one number.
    """
    return tl.sum(x[:, None], 1)


@triton.jit
def load_pairs(x, cosine, sine, dim, used, ROTATED: tl.constexpr):
    """Vectors whose channels are at `x + dim`, their partners in the rotation of the first ROTATED, and its tables."""
    turned = dim < ROTATED
    here = tl.load(x + dim, mask=used, other=0.0)
    # Not moved here from the thread that has it: it is in the cache.
    partner = tl.load(x + (dim + ROTATED // 2) % ROTATED, mask=used & turned, other=0.0)
    cosine = tl.load(cosine + dim, mask=turned, other=1.0)
    sine = tl.load(sine + dim, mask=turned, other=0.0)
    return here, partner, cosine, tl.where(dim < ROTATED // 2, -sine, sine)


@triton.jit
def rotated(pairs):
    """What `load_pairs` gave, turned, in the vectors' dtype."""
    here, partner, cosine, sine = pairs
    turned = here.to(tl.float32) * cosine.to(tl.float32) + partner.to(tl.float32) * sine.to(tl.float32)
    return turned.to(here.dtype)


@triton.jit
def _mapped(x, used, MAP: tl.constexpr):
    """The feature map of `x` [channels, vectors] in its dtype; `used` [channels, 1]."""
    if MAP == "softmax":
        wide = tl.where(used, x.to(tl.float32), -float("inf"))
        weights = tl.exp(wide - tl.max(wide, 0)[None, :])
        x = (weights / tl.sum(weights, 0)[None, :]).to(x.dtype)
    return x


@triton.jit
def _columns(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The columns of `x` as a tuple. A thread that has one number of a row has all of it, so nothing moves."""
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
    # log(1 + y) of y from 0 to 1 as the artanh of y / (2 + y), 1/3 at most, by its series.
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    series = z * 0.0
    for term in tl.static_range(8):
        series = 1.0 / (15 - 2 * term) + series * z * z
    return tl.minimum(x, 0.0) - 2.0 * z * series


@triton.jit
def _one_less_gate(log_decay):
    """`1 - exp(log_decay)`, by its series where that is near 0."""
    series = log_decay * 0.0 + 1.0
    for term in tl.static_range(8):
        series = 1.0 + series * log_decay / (9 - term)
    return tl.where(log_decay > -0.5, -log_decay * series, 1.0 - tl.exp(log_decay))
