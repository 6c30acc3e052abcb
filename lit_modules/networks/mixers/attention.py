"""Softmax attention with every switch of FoX's ablation (arXiv 2503.02130, sections 3.1 and 3.2)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernels import forgetting_attention
from lit_modules.caches import AttentionCacheLayer
from lit_modules.networks.forget_gate import ForgetGate
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions
from lit_modules.networks.rotary import rotate

if TYPE_CHECKING:
    from lit_modules.networks.config import PalimpsestConfig


class Attention(nn.Module):
    """Causal attention: `o = softmax(q k^T / sqrt(d) + c_i - c_j) v`, with `c` the sum of the log forget gates.

    In order: projections, KV-shift, QK-norm, rotation, attention, output norm, output gate, output projection.
    """

    def __init__(self, config: "PalimpsestConfig"):
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.num_heads, self.head_dim, self.prune = heads, config.head_dim, config.prune
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.forget_gate = ForgetGate(config) if config.forget_gate != "none" else None
        self.k_shift_proj = nn.Linear(width, heads, bias=False) if config.kv_shift else None
        self.v_shift_proj = nn.Linear(width, heads, bias=False) if config.kv_shift else None
        self.q_norm = RMSNorm(heads, config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(heads, config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.o_norm = RMSNorm(heads, config.head_dim, eps=config.norm_eps) if config.output_norm else None
        self.g_proj = nn.Linear(width, width, bias=False) if config.output_gate else None

    def new_cache(self) -> AttentionCacheLayer:
        """An empty cache for this layer."""
        return AttentionCacheLayer()

    def forward(self, hidden: Tensor, positions: Positions, cache: AttentionCacheLayer | None = None) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; with a cache, after what it holds, and into it."""
        q, k, v, log_forget = self.project(hidden, positions, cache)
        cumulative = False
        if cache is not None:
            # Into an empty cache the new tokens attend to themselves alone, by the gates and not by their sum:
            # the kernel sums them with more care than a float32 of thousands of tokens can keep.
            cumulative = cache.get_seq_length() > 0
            cached = cache.update(k, v, log_forget)
            if cumulative:
                k, v, log_forget = cached
        out = forgetting_attention(
            q,
            k,
            v,
            log_forget,
            cu_seqlens=positions.cu_seqlens,
            kv_start=positions.kv_start,
            cumulative=cumulative and log_forget is not None,
            prune=self.prune,
            logit_bound=self._logit_bound() if self.prune is not None else None,
        )
        if self.o_norm is not None:
            out = self.o_norm(out)
        out = out.flatten(2)
        if self.g_proj is not None:
            out = self.g_proj(hidden).sigmoid() * out
        return self.o_proj(out)

    def project(
        self, hidden: Tensor, positions: Positions, cache: AttentionCacheLayer | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What attention is computed from, of the new tokens only.

        Returns:
            `q, k, v` `[B, T, H, D]` (shifted, normalized, rotated), and `log_forget` `[B, T, H]`, float32 at least,
            or None without a gate. A cache gives the shift its predecessor, and is told the next one's.
        """
        q, k, v = (proj(hidden).unflatten(-1, (self.num_heads, self.head_dim)) for proj in self._projections())
        if self.k_shift_proj is not None:
            last_k, last_v = (None, None) if cache is None else cache.update_unshifted(k, v)
            k = shift(k, last_k, self.k_shift_proj(hidden).sigmoid(), positions.index)
            v = shift(v, last_v, self.v_shift_proj(hidden).sigmoid(), positions.index)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if positions.rotary is not None:
            q, k = rotate(q, positions.rotary), rotate(k, positions.rotary)
        return q, k, v, None if self.forget_gate is None else self.forget_gate(hidden)

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def _logit_bound(self) -> Tensor | None:
        """The largest |q.k| / sqrt(D) of each head `[H]` float32 that the QK-norm weights allow; None without."""
        if self.q_norm is None:
            return None
        # A normalized vector has length sqrt(D) at most. The factor covers bf16, to which q and k are each rounded up
        # to five times (norm, weight, and three times in the rotation): (1 + 2^-8)^10 = 1.0398.
        largest = self.q_norm.weight.abs().amax(-1) * self.k_norm.weight.abs().amax(-1)
        return (1.04 * self.head_dim**0.5) * largest.detach().float()


def shift(x: Tensor, last: Tensor | None, share: Tensor, index: Tensor) -> Tensor:
    """Mix each `x_t` with its predecessor: `a_t x_{t-1} + (1 - a_t) x_t` (section 3.2).

    Args:
        x: `[B, T, H, D]`.
        last: `[B, H, D]`, the x before the first of these, or None for zeros.
        share: `a`, `[B, T, H]`.
        index: `[B, T]`, position in the document; nothing (zeros) comes before position 0.
    """
    first = torch.zeros_like(x[:, :1]) if last is None else last[:, None]
    previous = torch.cat((first, x[:, :-1]), dim=1)
    previous = previous.masked_fill((index == 0)[..., None, None], 0)
    return x + share[..., None] * (previous - x)
