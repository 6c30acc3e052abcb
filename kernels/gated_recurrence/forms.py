"""Seven architectures as one recurrence: maps from their tensors to q, k, v and log_decay.

    out, state = gated_recurrence(*forms.gla(q, k, v, g))
    out, state = gated_recurrence(*forms.hgrn2(q, f, v, lower_bound=0.5))
    out, state = gated_recurrence(*forms.rwkv6(r, k, v, w), bonus=u)
    out, state = gated_recurrence(*forms.mamba2(x, dt, A_log, B, C)), then forms.mamba2_output(out, x, D)
    inputs, m = forms.mlstm(q, k, v, i, f); out, state = gated_recurrence(*inputs), then forms.mlstm_output(out, m)
    out, state = gated_recurrence(*forms.gated_retention(q, k, v, p))
    out, states = gated_slot_attention(*forms.slots(q, k, v, p))

`liger` selects by name the forms whose gates can be computed from a pretrained layer's keys.

q is [B, T, Hq, Dk], k [B, T, Hk, Dk], v [B, T, Hk, Dv]; gates are passed as logits, before sigmoid or exp (mamba2's
dt after softplus). Gates are computed in float32 (float64 for float64 logits) for any dtype of the logits: in bfloat16
a gate of 0.999 would be 1. A k or v scaled by a gate keeps its dtype. Only mlstm divides by sqrt(Dk), as its equations
do; the others leave that to the scale of `gated_recurrence`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PER_CHANNEL = ("gla", "hgrn2", "rwkv6")
PER_HEAD = ("mamba2", "mlstm", "gated_retention")
CONSTANT = ("fixed", "none")
"""Gates that `liger` and `liger_step` compute: one per key channel, one per head, and constant without logits."""

# exp of much more overflows float32, and the gradient of such a closed gate would be 0 times infinity.
_LARGEST_EXPONENT = 80.0


class Recurrence(NamedTuple):
    """First arguments of `gated_recurrence`, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor


class SlotRecurrence(NamedTuple):
    """First arguments of `gated_slot_attention`, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    log_decay: Tensor


def gla(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, temperature: float = 16.0) -> Recurrence:
    """Map to gated linear attention (arXiv 2312.06635): `G_t = sigmoid(gate_t)^(1 / temperature)` per key channel.

    Args:
        gate: [B, T, Hk, Dk].
        temperature: 16 in the paper: gates start near 1.
    """
    return Recurrence(q, k, v, F.logsigmoid(_wide(gate)) / temperature)


def hgrn2(q: Tensor, forget: Tensor, v: Tensor, *, lower_bound: Tensor | float = 0.0) -> Recurrence:
    """Map to HGRN2 (arXiv 2404.07904).

    `f = b + (1 - b) sigmoid(forget)`, `S_t = diag(f_t) S_{t-1} + (1 - f_t)^T v_t`.

    Args:
        q: the output gate of the paper.
        forget: [B, T, Hk, Dk]. Infinity makes a token change nothing: f is 1 and k is 0.
        v: the input of the paper.
        lower_bound: b, 0 to 1, a number or [Hk, Dk]. In the paper it grows with the layer, from 0 in the first.
    """
    forget = _wide(forget)
    if isinstance(lower_bound, Tensor):
        lower_bound = lower_bound.to(forget.dtype)
    kept = forget.sigmoid()
    # Of sigmoid(x) and sigmoid(-x), and of f and 1 - f, the smaller keeps full precision, and so does its gradient.
    # The clamps prevent an infinite gradient through the unselected log, and through the log of an f rounded to 0.
    k = (1 - lower_bound) * torch.where(forget < 0, 1 - kept, (-forget).sigmoid())
    f = lower_bound + (1 - lower_bound) * kept
    nearly_open = torch.log1p(-k.clamp(max=0.5))
    log_decay = torch.where(k < 0.5, nearly_open, f.clamp(min=torch.finfo(f.dtype).tiny).log())
    return Recurrence(q, k.to(q.dtype), v, log_decay)


def rwkv6(receptance: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Recurrence:
    """Map to RWKV6, Finch (arXiv 2404.05892, section 4.2): `w_t = exp(-exp(decay_t))` per key channel.

    `wkv_t = diag(u) k_t^T v_t + sum_{i<t} diag(w_{i+1} ... w_{t-1}) k_i^T v_i`: a token reads the previous state, and
    itself only through u: call `gated_recurrence(..., bonus=u)`. Without a bonus it reads the state after its update.

    Args:
        receptance: the paper's r, which becomes q.
        decay: [B, T, Hk, Dk], the paper's d.
    """
    return Recurrence(receptance, k, v, -_wide(decay).clamp(max=_LARGEST_EXPONENT).exp())


def mamba2(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor) -> Recurrence:
    """Map to Mamba-2 (arXiv 2405.21060), with one gate per head.

    `h_t = exp(-dt_t exp(A_log)) h_{t-1} + B_t^T dt_t x_t`, `y_t = C_t h_t`. `mamba2_output` adds `D x_t`.

    Args:
        x: [B, T, H, Dv].
        dt: [B, T, H], positive: after softplus.
        A_log: [H].
        B: [B, T, G, Dk]; G divides H: head h uses group h // (H / G). With one group, k and q are views of B and C.
        C: [B, T, G, Dk].

    Raises:
        ValueError: if the number of groups does not divide the number of heads.
    """
    heads, groups = x.shape[2], B.shape[2]
    if heads % groups:
        raise ValueError(f"B and C have {groups} groups, which must divide the {heads} heads of x")
    k, q = (y.unsqueeze(3).expand(-1, -1, -1, heads // groups, -1).flatten(2, 3) for y in (B, C))
    dt = _wide(dt)
    v = (dt.unsqueeze(-1) * x).to(x.dtype)
    return Recurrence(q, k, v, -dt * _wide(A_log).exp())


def mamba2_output(out: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """Return `y_t = C_t h_t + D x_t` in out's dtype, from the recurrence's out [B, T, H, Dv]; D is [H]."""
    return (_wide(out) + D[:, None] * _wide(x)).to(out.dtype)


def mamba2_decay(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Recurrence:
    """Apply only Mamba-2's gate to any q, k, v: `exp(-softplus(gate_t))` per head (arXiv 2503.01496, table 1).

    Args:
        gate: [B, T, Hk].
    """
    return Recurrence(q, k, v, -F.softplus(_wide(gate)))


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    stabilizer: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Recurrence, Tensor]:
    """Map to the mLSTM of xLSTM (arXiv 2405.04517, eq. 19-26, with the stabilizer of eq. 15-17).

    With `log i_t = input_gate_t` and `log f_t = log sigmoid(forget_gate_t)`:

        m_t = max(log f_t + m_{t-1}, log i_t),   i'_t = exp(log i_t - m_t),   f'_t = exp(log f_t + m_{t-1} - m_t)
        C_t = f'_t C_{t-1} + i'_t k_t^T v_t / sqrt(Dk),   n_t = f'_t n_{t-1} + i'_t k_t^T / sqrt(Dk)
        h_t = q_t C_t / max(|q_t n_t|, exp(-m_t))

    k is scaled by the input gate and 1 / sqrt(Dk). n is an extra column of the state, [C n]: v gets a column of ones.
    `mlstm_output(out, m)` returns h_t. It does not depend on m, so m has no gradient.

    Args:
        input_gate, forget_gate: [B, T, Hk]. A token with -infinity and infinity changes nothing in the state.
        stabilizer: m before the first token, [B, Hk], or [N, Hk] with cu_seqlens; zeros when None. It is part of
            the state: to continue from a final state, pass m of its last token.
        cu_seqlens: as in `gated_recurrence`; each document has a separate m.

    Returns:
        Inputs of the recurrence, with v [B, T, Hk, Dv + 1], and m [B, T, Hk] float64.
    """
    # float64, because m_{t-1} - m_t is summed over all tokens.
    log_input, log_forget = _wide(input_gate).double(), F.logsigmoid(_wide(forget_gate)).double()
    before, m = _stabilizers(log_input, log_forget, stabilizer, cu_seqlens)
    dtype = torch.promote_types(k.dtype, torch.float32)
    weight = ((log_input - m).exp() * k.shape[-1] ** -0.5).to(dtype)
    # At most 0 by the choice of m; the minimum corrects rounding without changing the gradient of log_forget.
    log_decay = log_forget + torch.minimum(before - m, -log_forget.detach())
    k = (k * weight.unsqueeze(-1)).to(k.dtype)
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    return Recurrence(q, k, v, log_decay.to(dtype)), m


def mlstm_output(out: Tensor, m: Tensor) -> Tensor:
    """Return `h = out / max(|q n|, exp(-m))` (arXiv 2405.04517, eq. 21, numerator and denominator times exp(-m)).

    Args:
        out: [B, T, Hq, Dv + 1] of the recurrence: q C, with q n in the last column.
        m: [B, T, Hk] of `mlstm`.

    Returns:
        [B, T, Hq, Dv] in out's dtype.
    """
    read = _wide(out)
    smallest = (-m).exp().to(read.dtype).repeat_interleave(out.shape[2] // m.shape[2], dim=2).unsqueeze(-1)
    return (read[..., :-1] / torch.maximum(read[..., -1:].abs(), smallest)).to(out.dtype)


def gated_retention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, temperature: float = 16.0) -> Recurrence:
    """Map to gated retention (YOCO, arXiv 2405.05254): `gamma_t = sigmoid(gate_t)^(1 / temperature)` per head.

    With temperature 1 this is also the mLSTM without input gate and normalizer (arXiv 2503.01496, table 1).

    Args:
        gate: [B, T, Hk].
        temperature: 16 in YOCO.
    """
    return Recurrence(q, k, v, F.logsigmoid(_wide(gate)) / temperature)


def slots(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, temperature: float = 8.0) -> SlotRecurrence:
    """Map to gated slot attention (arXiv 2409.07146): `a_t = sigmoid(gate_t)^(1 / temperature)`, slots `1 - a_t`.

    Args:
        gate: [B, T, Hk, M], one per slot.
        temperature: 8 in the paper; 16 in arXiv 2503.01496.
    """
    log_decay = F.logsigmoid(_wide(gate)) / temperature
    return SlotRecurrence(q, k, v, -log_decay.expm1().to(q.dtype), log_decay)


def liger(gate: str, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, *, temperature: float = 1.0) -> Recurrence:
    """Apply the named gate to q and k after their feature map (Liger, arXiv 2503.01496, eq. 5 to 7 and table 1).

    Args:
        gate: from PER_CHANNEL, PER_HEAD or CONSTANT. "fixed": `exp(-2^(-8 h / H))` for key head h of H, counted from 1:
            SUPRA's choice (arXiv 2405.06640, section 2.3) after Qin et al. 2024. The formula is inferred from their
            largest gate, which keeps 3.35e-4 over 2048 tokens. "none": no decay.
        k: not used by "hgrn2".
        logits: [B, T, Hk, Dk] or [B, T, Hk], None for a constant gate.
        temperature: divisor of the log gates.
    """
    if gate in CONSTANT:
        heads, dtype = k.shape[2], torch.promote_types(k.dtype, torch.float32)
        head = torch.arange(1, heads + 1, device=k.device, dtype=dtype)
        log_decay = torch.zeros_like(head) if gate == "none" else -torch.exp2(-8 * head / heads) / temperature
        return Recurrence(q, k, v, log_decay.expand(k.shape[:3]))
    if gate in ("gla", "mlstm", "gated_retention"):
        return gla(q, k, v, logits, temperature=temperature)
    if gate != "hgrn2":
        inputs = rwkv6(q, k, v, logits) if gate == "rwkv6" else mamba2_decay(q, k, v, logits)
        return inputs._replace(log_decay=inputs.log_decay / temperature)
    inputs = hgrn2(q, logits, v)
    if temperature == 1:
        return inputs
    log_decay = inputs.log_decay / temperature
    return inputs._replace(k=-log_decay.expm1().to(q.dtype), log_decay=log_decay)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def _stabilizers(
    log_input: Tensor, log_forget: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return m_{t-1} and m_t, [B, T, H] each, of `m_t = max(log_forget_t + m_{t-1}, log_input_t)` in every document.

    Computed by doubling, not as a cumulative maximum of log_input minus a cumulative sum of log_forget: one closed
    forget gate would destroy the precision of all later sums, and a document would inherit m from the previous one.
    """
    position = torch.arange(log_input.shape[1], device=log_input.device)
    if cu_seqlens is None:
        first = position == 0
        start = log_input.new_zeros(1, 1, 1) if initial is None else initial.double()[:, None]
    else:
        # The last document that starts at or before the token; earlier ones with the same start are empty.
        document = torch.searchsorted(cu_seqlens, position.to(cu_seqlens.dtype), right=True) - 1
        first = position == cu_seqlens[document]
        start = log_input.new_zeros(1, 1, 1) if initial is None else initial.double()[None, document]
    first = first[:, None]
    m = torch.where(first, torch.maximum(log_forget + start, log_input), log_input)
    carry = log_forget.masked_fill(first, -torch.inf)
    step = 1
    while step < log_input.shape[1]:
        # Both cover `step` tokens before this iteration, and twice as many after it.
        m = torch.cat([m[:, :step], torch.maximum(m[:, step:], carry[:, step:] + m[:, :-step])], 1)
        carry = torch.cat([carry[:, :step], carry[:, step:] + carry[:, :-step]], 1)
        step *= 2
    return torch.where(first, start, m.roll(1, dims=1)), m
