"""Softmax attention with every switch of FoX (arXiv 2503.02130, section 3) and of DiffQKV (arXiv 2501.13629)."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kernels import forgetting_attention
from lit_modules.networks.caches import AttentionCacheLayer, CompressedCacheLayer, StaticAttentionCacheLayer
from lit_modules.networks.caches.shifted import UnshiftedStates
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.forget_gate import ForgetGate
from lit_modules.networks.headwise_linear import HeadwiseLinear
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions
from lit_modules.networks.rotary import rotary_tables, rotate
from lit_modules.networks.swiglu import SwiGLU


class Attention(nn.Module):
    """Causal attention: `o = softmax(q k^T / sqrt(d) + c_i - c_j) v`, with `c` the sum of the log forget gates.

    In order: projections, augmented queries, KV-shift, key map, QK-norm, rotation, attention, output norm, output gate,
    output projection. There are Hq query, Hk key and Hv value heads. Query head h reads key head `h // (Hq / Hk)` and
    value head `h // (Hq / Hv)`. Forget gates, output norm and output gate are per query head.

    Augmented queries are `W_down (silu(W_gate h) * W_up h)` with `h = W_q x`. The key map brings a head from
    `key_head_dim` to the queries' width. Each key head has a separate map: a shared one would confine all heads' keys
    to one subspace before the rotation, and `Hk Dk D` parameters are few compared with the projections. With a map, the
    cache holds keys before map, norm and rotation, which are recomputed at each read. Without a map it holds finished
    keys.
    """

    def __init__(self, config: PalimpsestConfig):
        super().__init__()
        width, head_dim, key_dim = config.hidden_size, config.head_dim, config.cached_key_dim
        heads, key_heads, value_heads = config.head_counts
        self.head_dim, self.key_dim, self.heads_per_key = head_dim, key_dim, heads // key_heads
        self.rope, self.rope_base, self.prune = config.rope, config.rope_base, config.prune
        self.look_back = int(config.kv_shift)  # preceding tokens that a key and value depend on
        augmented = config.augmented_query_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.augmented_q = SwiGLU(width, augmented) if augmented is not None else None
        self.k_proj = nn.Linear(width, key_heads * key_dim, bias=False)
        self.k_map_proj = HeadwiseLinear(key_heads, key_dim, head_dim) if key_dim != head_dim else None
        self.v_proj = nn.Linear(width, value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.forget_gate = ForgetGate(config) if config.forget_gate != "none" else None
        self.k_shift_proj = nn.Linear(width, key_heads, bias=False) if config.kv_shift else None
        self.v_shift_proj = nn.Linear(width, value_heads, bias=False) if config.kv_shift else None
        self.q_norm = RMSNorm(heads, head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(key_heads, head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.o_norm = RMSNorm(heads, head_dim, eps=config.norm_eps) if config.output_norm else None
        self.g_proj = nn.Linear(width, width, bias=False) if config.output_gate else None

    @property
    def caches_keys_and_values_alone(self) -> bool:
        """Whether finished keys and values are all that this layer caches: no gates, no inputs of a shift or a map."""
        return self.forget_gate is None and self.k_shift_proj is None and self.k_map_proj is None

    def new_cache(self) -> AttentionCacheLayer:
        """Return an empty cache for this layer."""
        return AttentionCacheLayer()

    def takes(self, cache: CacheLayerMixin) -> bool:
        """Return whether a cache is of a kind that this layer fills."""
        if type(cache) is StaticAttentionCacheLayer:
            return self.caches_keys_and_values_alone
        return type(cache) in (AttentionCacheLayer, CompressedCacheLayer)

    def mixing_flops(self, length: int) -> int:
        """Return the operations per token of the forward pass, without the projections, for `length` tokens.

        `2 d_model L` (arXiv 2503.02130, table 6): a causal token sees L/2 others on average. Fewer key or value heads
        (arXiv 2501.13629) change only the parameters: every query head still reads every key.
        """
        return 2 * self.q_proj.in_features * length

    def forward(
        self,
        hidden: Tensor,
        positions: Positions,
        cache: AttentionCacheLayer | StaticAttentionCacheLayer | CompressedCacheLayer | None = None,
    ) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; a cache provides the earlier tokens and is updated."""
        if isinstance(cache, CompressedCacheLayer):
            out = self._attend_compressed(hidden, positions, cache)
        elif isinstance(cache, StaticAttentionCacheLayer):
            out = self._attend_static(hidden, positions, cache)
        else:
            out = self._attend(hidden, positions, cache)
        if self.o_norm is not None:
            out = self.o_norm(out)
        out = out.flatten(2)
        if self.g_proj is not None:
            out = self.g_proj(hidden).sigmoid() * out
        return self.o_proj(out)

    def _attend(self, hidden: Tensor, positions: Positions, cache: AttentionCacheLayer | None) -> Tensor:
        """Compute attention without or with a cache of all keys and values, `[B, T, Hq, D]`."""
        q, k, v, log_forget = self._project(hidden, positions, cache)
        rotary, cumulative = positions.rotary, False
        if self.k_map_proj is None:
            k = self.finish_keys(k, rotary)
        if cache is not None:
            # With an empty cache, use the gates and not their cumulative sum: the kernel sums them more precisely than
            # one float32 sum over thousands of tokens.
            cumulative = cache.get_seq_length() > 0
            if self.k_map_proj is not None and rotary is not None and positions.rotary_index is not None:
                held = cache.update_positions(positions.rotary_index)
                rotary = rotary_tables(held, self.head_dim, self.rope_base) if cumulative else rotary
            cached = cache.update(k, v, log_forget)
            if cumulative:
                k, v, log_forget = cached
        if self.k_map_proj is not None:
            k = self.finish_keys(k, rotary)
        bound = self._logit_bound() if self.prune is not None else None
        return self.operation((q, k, v, log_forget), positions, cumulative=cumulative, logit_bound=bound)

    def _attend_static(self, hidden: Tensor, positions: Positions, cache: StaticAttentionCacheLayer) -> Tensor:
        """Compute attention with a cache at a fixed address, `[B, T, Hq, D]`; reads no number from the device."""
        q, k, v, log_forget = self.project(hidden, positions)
        keys, values, held = cache.update(k, v)
        return self.operation((q, keys, values, log_forget), positions, kv_end=held)

    def _attend_compressed(self, hidden: Tensor, positions: Positions, cache: CompressedCacheLayer) -> Tensor:
        """Compute attention over a compressed cache, `[B, T, Hq, D]`."""
        if positions.cu_seqlens is not None:
            raise ValueError("cu_seqlens with a cache: packed documents cannot be cached, set use_cache=False")
        q, k, v, log_forget = self._project(hidden, positions, cache)
        if self.k_map_proj is None:
            k = self.finish_keys(k, positions.rotary)
        index = positions.index if positions.rotary_index is None else positions.rotary_index
        out = cache.attend(
            *(x.transpose(1, 2) for x in (q, k, v)),
            padding=None if positions.kv_start is None else positions.kv_start.tolist,
            log_forget=log_forget,
            finish=None if self.k_map_proj is None else self._finish_cached,
            positions=None if self.k_map_proj is None else index,
        )
        return out.transpose(1, 2)

    def operation(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        positions: Positions,
        *,
        cumulative: bool = False,
        logit_bound: Tensor | None = None,
        kv_end: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of finished q, k, v and log_forget; returns `[B, T, Hq, D]`.

        Args:
            cumulative: log_forget is already summed over time.
            kv_end: number of keys that each row holds, int32 `[B]`; None means all.
            logit_bound: upper bound of q.k / sqrt(D), `[Hq]`, for pruning.
        """
        out = forgetting_attention(
            *inputs,
            cu_seqlens=positions.cu_seqlens,
            kv_start=positions.kv_start,
            kv_end=kv_end,
            cumulative=cumulative and inputs[3] is not None,
            prune=self.prune,
            logit_bound=logit_bound,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    def project(
        self, hidden: Tensor, positions: Positions, cache: UnshiftedStates | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the inputs of attention for the new tokens only.

        Returns:
            `q` `[B, T, Hq, D]`, `k` `[B, T, Hk, D]`, `v` `[B, T, Hv, D]` (shifted, mapped, normalized, rotated), and
            `log_forget` `[B, T, Hq]`, float32 at least, or None without a gate. A cache provides the predecessor for
            the KV-shift and stores the last key and value.
        """
        q, k, v, log_forget = self._project(hidden, positions, cache)
        return q, self.finish_keys(k, positions.rotary), v, log_forget

    def _project(
        self, hidden: Tensor, positions: Positions, cache: UnshiftedStates | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute `project` without finishing the keys: `[B, T, Hk, key_dim]`, only shifted."""
        q = self.q_proj(hidden)
        if self.augmented_q is not None:
            q = self.augmented_q(q)
        q = q.unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(hidden).unflatten(-1, (-1, self.key_dim))
        v = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if self.k_shift_proj is not None and self.v_shift_proj is not None:
            last_k, last_v = (None, None) if cache is None else cache.update_unshifted(k, v)
            k = shift(k, last_k, self.k_shift_proj(hidden).sigmoid(), positions.index)
            v = shift(v, last_v, self.v_shift_proj(hidden).sigmoid(), positions.index)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if positions.rotary is not None:
            q = rotate(q, positions.rotary)
        return q, k, v, None if self.forget_gate is None else self.forget_gate(hidden)

    def finish_keys(self, k: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map, normalize and rotate keys `[B, S, Hk, key_dim]` to `[B, S, Hk, D]`; tables `[B, S, D]` or None."""
        if self.k_map_proj is not None:
            k = self.k_map_proj(k)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return k if rotary is None else rotate(k, rotary)

    def _finish_cached(self, keys: Tensor, index: Tensor) -> Tensor:
        """Finish cached keys `[B, Hk, S, key_dim]` with the rotary positions `[B, S]`: `[B, Hk, S, D]`."""
        rotary = rotary_tables(index, self.head_dim, self.rope_base) if self.rope else None
        assert self.k_map_proj is not None
        # Cached keys are dequantized in float32, which the map's weights need not be.
        keys = keys.transpose(1, 2).to(self.k_map_proj.weight.dtype)
        return self.finish_keys(keys, rotary).transpose(1, 2).to(torch.promote_types(keys.dtype, torch.float32))

    def _logit_bound(self) -> Tensor | None:
        """Return the bound of |q.k| / sqrt(D) per head `[Hq]` float32 from the QK-norm weights; None without norm."""
        if self.q_norm is None or self.k_norm is None:
            return None
        # A normalized vector has length sqrt(D) at most. The factor covers bf16 rounding of q and k, up to five times
        # each (norm, weight, three in the rotation): (1 + 2^-8)^10 = 1.0398.
        largest_q, largest_k = (norm.weight.abs().amax(-1) for norm in (self.q_norm, self.k_norm))
        largest = largest_q * largest_k.repeat_interleave(self.heads_per_key)
        return (1.04 * self.head_dim**0.5) * largest.detach().float()


def shift(x: Tensor, last: Tensor | None, share: Tensor, index: Tensor) -> Tensor:
    """Mix each `x_t` with its predecessor: `a_t x_{t-1} + (1 - a_t) x_t` (section 3.2).

    Args:
        x: `[B, T, H, D]`.
        last: `[B, H, D]`, the token before the first one, or None for zeros.
        share: `a`, `[B, T, H]`.
        index: `[B, T]`, position in the document; position 0 has a zero predecessor.
    """
    first = torch.zeros_like(x[:, :1]) if last is None else last[:, None]
    previous = torch.cat((first, x[:, :-1]), dim=1)
    previous = previous.masked_fill((index == 0)[..., None, None], 0)
    return x + share[..., None] * (previous - x)
