"""Cross-entropy and KL divergence of logits with their gradient, in Triton.

A program owns one token. It reads the token's logits z, and its teacher's t, in blocks: once for

    m = max z, s = sum_i e^{z_i - m}, s' = sum_i e^{(z_i - m) / c}        of t: n, r' = sum_i e^{(t_i - n) / c},
    x = sum_i e^{(t_i - n) / c} (t_i - z_i)

with the sums rescaled when a block raises a maximum, and once more for the gradient, which overwrites z. The second
pass mostly hits the cache. With a = m / c + log s' and b = n / c + log r' the divergence is
c^2 (x / (r' c) - b + a), exactly 0 where t = z.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cross_entropy.reference import IGNORE_INDEX
from kernels.rounding import next_power_of_2

BLOCK = 4096
NUM_WARPS = 8


# custom_op's checks at every call are affordable here: one call serves a chunk of tokens. The namespace is separate
# because the planner counts every operation in palimpsest:: as mixing over time.
@torch.library.custom_op("palimpsest_losses::token_losses", mutates_args=("logits",))
def fused_token_losses(
    logits: Tensor,
    targets: Tensor | None,
    teacher_logits: Tensor | None,
    mask: Tensor | None,
    weights: Tensor,
    vocab_size: int,
    temperature: float,
    gradient: bool,
) -> Tensor:
    tokens, width = logits.shape
    losses = logits.new_zeros(2, tokens, dtype=torch.float32)
    teacher = None if teacher_logits is None else teacher_logits.contiguous()
    if tokens == 0:
        return losses
    with torch.cuda.device_of(logits):
        _row[(tokens,)](
            logits, None if targets is None else targets.contiguous(), teacher,
            None if mask is None else mask.contiguous().view(torch.uint8), weights.float(), losses, logits.stride(0),
            0 if teacher is None else teacher.stride(0), tokens, vocab_size, width, float(temperature),
            1 / float(temperature),
            GRADIENT=gradient, IGNORE=IGNORE_INDEX, BLOCK=min(BLOCK, next_power_of_2(width)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return losses


@fused_token_losses.register_fake
def _(logits, targets, teacher_logits, mask, weights, vocab_size, temperature, gradient):
    return logits.new_empty(2, logits.shape[0], dtype=torch.float32)


@triton.jit(do_not_specialize=["tokens", "vocab_size"])
def _row(
    logits, targets, teacher_logits, mask, weights, losses, stride, teacher_stride, tokens, vocab_size, width,
    temperature, coldness,
    GRADIENT: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token; targets, teacher_logits and mask may be None."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    weight, teacher_weight = 0.0, 0.0
    target = tl.full((), IGNORE, tl.int64)
    if targets is not None:
        target = tl.load(targets + row)
        weight = tl.where(target == IGNORE, 0.0, tl.load(weights))
    compared = False
    if teacher_logits is not None:
        teacher_logits += row * teacher_stride
        compared = True
        if mask is not None:
            compared = tl.load(mask + row) != 0
        teacher_weight = tl.where(compared, tl.load(weights + 1) * temperature, 0.0)
    counted = (target != IGNORE) | compared
    if counted:
        highest, total, warm_total = -float("inf"), 0.0, 0.0
        teacher_highest, teacher_total, difference = -float("inf"), 0.0, 0.0
        for start in range(0, width, BLOCK):
            used, z = _load(logits, start + columns, vocab_size, width)
            higher = tl.maximum(highest, tl.max(z))
            if targets is not None:
                total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher))
            if teacher_logits is not None:
                warm = tl.sum(tl.exp((z - higher) * coldness))
                warm_total = warm_total * tl.exp((highest - higher) * coldness) + warm
                _, t = _load(teacher_logits, start + columns, vocab_size, width)
                teacher_higher = tl.maximum(teacher_highest, tl.max(t))
                rescale = tl.exp((teacher_highest - teacher_higher) * coldness)
                likely = tl.exp((t - teacher_higher) * coldness)
                teacher_total = teacher_total * rescale + tl.sum(likely)
                difference = difference * rescale + tl.sum(tl.where(used, likely * (t - z), 0.0))
                teacher_highest = teacher_higher
            highest = higher
        if targets is not None:
            normalizer = highest + tl.log(total)
            known = (target >= 0) & (target < vocab_size)
            chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
            tl.store(losses + row, tl.where(target == IGNORE, 0.0, normalizer - chosen))
        if teacher_logits is not None:
            warm_normalizer = highest * coldness + tl.log(warm_total)
            teacher_normalizer = teacher_highest * coldness + tl.log(teacher_total)
            divergence = difference / teacher_total * coldness - teacher_normalizer + warm_normalizer
            tl.store(losses + tokens + row, tl.where(compared, divergence * temperature * temperature, 0.0))
        if GRADIENT:
            # All threads must have read the chosen logit before any thread overwrites it.
            tl.debug_barrier()
            for start in range(0, width, BLOCK):
                place = start + columns
                _, z = _load(logits, place, vocab_size, width)
                slope = tl.zeros([BLOCK], tl.float32)
                if targets is not None:
                    slope += weight * (tl.exp(z - normalizer) - tl.where(place == target, 1.0, 0.0))
                if teacher_logits is not None:
                    _, t = _load(teacher_logits, place, vocab_size, width)
                    q, p = tl.exp(z * coldness - warm_normalizer), tl.exp(t * coldness - teacher_normalizer)
                    slope += teacher_weight * (q - p)
                tl.store(logits + place, slope.to(logits.dtype.element_ty), mask=place < width)
    elif GRADIENT:
        for start in range(0, width, BLOCK):
            nothing = tl.zeros([BLOCK], logits.dtype.element_ty)
            tl.store(logits + start + columns, nothing, mask=start + columns < width)


@triton.jit
def _load(logits, columns, vocab_size, width):
    """Which columns are of the vocabulary, and their logits, -inf elsewhere.

    The load's mask ends at the width, not at the vocabulary: what it ends at decides how many a thread may load at a
    time.
    """
    used = columns < vocab_size
    z = tl.load(logits + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    return used, tl.where(used, z, -float("inf"))
