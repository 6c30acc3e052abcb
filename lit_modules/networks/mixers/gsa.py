"""Gated slot attention (arXiv 2409.07146): softmax attention over slots that store keys and values."""

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gated_recurrence import forms, gated_recurrence_step, gated_slot_attention
from kernels.gated_recurrence.forms import SlotRecurrence
from lit_modules.networks.caches import RecurrentCacheLayer
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.recurrent import RecurrentMixer, takes_steps, without_padding
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions

TEMPERATURE = 8
"""Divisor of the log gates."""


class GSA(RecurrentMixer):
    """`K_t = K_{t-1} G_t + k_t^T (1 - g_t)`, `V_t` alike, `o_t = softmax(q_t K_t) V_t`, `g = sigmoid(W x)^(1/8)`.

    Queries, keys and values pass through a `silu`. The output passes through a `silu`, then a norm over all heads.
    """

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        width, (heads, key_dim, value_dim) = config.hidden_size, self.shape
        self.num_slots, self.temperature = config.num_slots, config.gate_temperature or TEMPERATURE
        self.q_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.f_proj = nn.Linear(width, heads * self.num_slots, bias=False)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)
        self.o_norm = RMSNorm(heads * value_dim, eps=config.norm_eps)
        self.convolutions = self.new_convolutions(config, q=heads * key_dim, k=heads * key_dim, v=heads * value_dim)

    def mixing_flops(self, length: int) -> int:
        """Count as `RecurrentMixer.mixing_flops`, over the states of both passes."""
        return 5 * self.shape.heads * self.num_slots * (self.shape.key_dim + self.shape.value_dim)

    def forward(self, hidden: Tensor, positions: Positions, cache: RecurrentCacheLayer | None = None) -> Tensor:
        """Mix `hidden` `[B, T, hidden_size]` over time; a cache provides the earlier tokens and is updated."""
        x = {"q": self.q_proj(hidden), "k": self.k_proj(hidden), "v": self.v_proj(hidden)}
        mixed = [F.silu(y) for y in self.convolve(x, positions, cache).values()]
        q, k, v, logits = (y.unflatten(-1, (self.shape.heads, -1)) for y in (*mixed, self.f_proj(hidden)))
        inputs = forms.slots(q, k, v, logits, temperature=self.temperature)
        out = self.operation(inputs, positions, cache)
        return self.o_proj(self.o_norm(F.silu(out).flatten(2)))

    def operation(  # type: ignore[override]  # each mixer has inputs of its own
        self, inputs: SlotRecurrence, positions: Positions, cache: RecurrentCacheLayer | None = None
    ) -> Tensor:
        """Run `gated_slot_attention` on new tokens, from the cached states and updating them: `[B, T, H, Dv]`."""
        inputs = inputs._replace(slots=without_padding(inputs.slots, positions, cache))
        if cache is None:
            return gated_slot_attention(*inputs, cu_seqlens=positions.cu_seqlens)[0]
        q, k, v, slots, log_decay = inputs
        if takes_steps(inputs, cache, positions) and cache.states is not None:
            keys, values = cache.states
            scores = gated_recurrence_step(q, k, slots, log_decay, keys, decay_axis="value")
            weights = scores.to(log_decay.dtype).softmax(-1).to(q.dtype)
            out = gated_recurrence_step(weights, slots, v, log_decay, values)
            cache.update(cache.states, q.shape[1])
            return out
        initial = None if cache.states is None else (cache.states[0], cache.states[1])
        out, states = gated_slot_attention(*inputs, initial_state=initial)
        cache.update(states, q.shape[1])
        return out
