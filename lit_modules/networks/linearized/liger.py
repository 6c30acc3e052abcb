"""Liger attention (arXiv 2503.01496): a gated recurrence and a sliding window from one set of projections."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kernels.gated_recurrence import (
    gated_recurrence,
    gated_recurrence_step,
    gated_slot_attention,
    liger_step,
    windowed_step,
)
from kernels.gated_recurrence.forms import Recurrence, SlotRecurrence
from lit_modules.networks.caches.linearized import LinearizedCacheLayer, delay_tokens
from lit_modules.networks.linearized.base import Rotary, StockAttention, SubstitutedAttention
from lit_modules.networks.linearized.feature_maps import make_feature_map
from lit_modules.networks.linearized.gates import (
    BranchWeights,
    GateProjection,
    GateShift,
    OutputNorm,
    gate_width,
    gated,
    pool,
)
from lit_modules.networks.linearized.ring_attention import cached_window_attention
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.linearized.windows import window_attention
from lit_modules.networks.mixers.recurrent import takes_steps
from lit_modules.networks.positions import Positions

Inputs = Recurrence | SlotRecurrence


class LigerAttention(SubstitutedAttention):
    """`o = alpha GRM + beta SWA`, both on the layer's q, k and v (eq. 5 to 8).

    The recurrence GRM reads unrotated keys and gates pooled from them. Query heads that share a key head share its
    state, keys, values and gates: repeating them would give the same numbers. If the family normalizes queries and
    keys, both branches use the normalized ones, as its pretrained attention does (the paper's code for Qwen3 omits that
    norm).
    """

    def __init__(self, attention: StockAttention, config: PreTrainedConfig, settings: Linearization):
        super().__init__(attention, config, settings)
        width = gate_width(settings, self.heads.dim) if settings.has_state else 0
        maps_queries = settings.has_state and settings.gate != "slots"
        maps_keys = maps_queries and settings.gate != "hgrn2"
        self.q_feature_map = self._feature_map(self.heads.query) if maps_queries else None
        self.k_feature_map = self._feature_map(self.heads.key) if maps_keys else None
        self.gate_width, random = width, settings.gate_source == "random"
        self.gate_proj = GateProjection(config.hidden_size, self.heads.key, width) if width and random else None
        self.gate_shift = GateShift(self.heads.key) if width and settings.learned_gate_shift else None
        count = {None: 0, "layer": 1, "head": self.heads.query}[settings.learned_weights]
        beta = settings.window_weight if settings.window else None
        self.weights = BranchWeights(count, settings.state_weight, beta) if count else None
        self._constant_weights: tuple[Tensor, Tensor] | None = None
        self.output_norm = OutputNorm(self.heads.query, self.heads.dim) if settings.output_norm else None

    def _feature_map(self, heads: int) -> nn.Module | None:
        return make_feature_map(self.settings.feature_map, heads, self.heads.dim)

    def student(  # type: ignore[override]  # a cache of its own, which `takes` has checked
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer | None,
    ) -> Tensor:
        """Compute the weighted sum of both branches; see `SubstitutedAttention.student`."""
        if cache is not None:
            cache.start(k)
        if not self.settings.has_state:
            out = self._window(q, k, v, positions, position_embeddings, cache)
            if cache is not None:
                cache.update((), q.shape[1])
            return (self.settings.window_weight * out).to(out.dtype)
        if cache is not None and self._is_whole_step(q, k, v, positions, cache):
            return self._whole_step(q, k, v, positions, position_embeddings, cache)
        if self.settings.delayed:
            inputs = self._delayed_inputs(hidden, q, k, v, positions, position_embeddings, cache)
        else:
            inputs = self._inputs(hidden, q, k, v, position_embeddings)
            if cache is not None and isinstance(inputs, Recurrence) and self._is_one_step(inputs, positions, cache):
                rotated = self.rotate(q, k, position_embeddings)
                return self._step(inputs, *rotated, positions, cache)
            inputs = _written(inputs, self._is_written(positions, cache, v.shape[1]))
        window = self._window(q, k, v, positions, position_embeddings, cache) if self.settings.window else None
        state = self._recur(inputs, positions, cache)
        if self.output_norm is not None:
            state = self.output_norm(state)
        return self._weighted(state, window)

    def _inputs(self, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, position_embeddings: Rotary) -> Inputs:
        """Return the inputs of the recurrence for every token, in its form."""
        logits = self._gate_logits(hidden, k)
        mapped_q = q if self.q_feature_map is None else self.q_feature_map(q)
        mapped_k = k if self.k_feature_map is None else self.k_feature_map(k)
        inputs = gated(self.settings, mapped_q, mapped_k, v, logits)
        if self.settings.rotate_state:
            turned = self._rotate_features(inputs.q, inputs.k, position_embeddings)
            inputs = inputs._replace(q=turned[0], k=turned[1])
        return inputs

    def _gate_logits(self, hidden: Tensor, k: Tensor) -> Tensor | None:
        """Return gate logits `[B, T, Hk, gate_width]` float32, None for constant gates."""
        if not self.gate_width:
            return None
        logits = pool(k, self.gate_width) if self.gate_proj is None else self.gate_proj(hidden)
        return logits if self.gate_shift is None else self.gate_shift(logits)

    def _rotate_features(self, q: Tensor, k: Tensor, position_embeddings: Rotary) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys after their map, as SUPRA does; each part of a wider map separately."""
        copies = q.shape[-1] // self.heads.dim
        q, k = (x.unflatten(-1, (copies, -1)).flatten(2, 3) for x in (q, k))
        return tuple(x.unflatten(2, (-1, copies)).flatten(3) for x in self.rotate(q, k, position_embeddings))

    def _is_written(self, positions: Positions, cache: LinearizedCacheLayer | None, tokens: int) -> Tensor | None:
        """Return the mask of written tokens `[B, T]` bool, None for all: not padding, nor sinks with `delayed`."""
        real = None
        if positions.kv_start is not None:
            time = torch.arange(tokens, device=positions.index.device) if cache is None else cache.time(tokens)
            real = time >= positions.kv_start[:, None]
        if self.settings.delayed and self.settings.sinks:
            no_sink = positions.index >= self.settings.sinks
            real = no_sink if real is None else real & no_sink
        return real

    def _delayed_inputs(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer | None,
    ) -> Inputs:
        """Return queries undelayed, and keys, values and gates delayed by the window.

        As in `liger_step`, projected keys wait in the cache, and are mapped and gated when they leave; the ring holds
        their values. With rotated features, or gates from the hidden states, the finished inputs wait instead.
        """
        window, sinks = self.settings.window, self.settings.sinks
        of_keys_alone = self.settings.gate_source == "keys" and not self.settings.rotate_state
        if cache is not None and of_keys_alone:
            # Read before the window overwrites them.
            late_k, late_v = *cache.delay((k,)), cache.leaving("ring_values", v)
            inputs = self._inputs(hidden, q, late_k, late_v, position_embeddings)
            return _written(inputs, positions.index >= window + sinks)
        inputs = self._inputs(hidden, q, k, v, position_embeddings)
        inputs = _written(inputs, self._is_written(positions, cache, v.shape[1]))
        if cache is not None:
            return type(inputs)(inputs.q, *cache.delay(inputs[1:]))
        early = positions.index < window  # no such token in its document
        late = (
            delay_tokens(x, window).masked_fill(early.view(*early.shape, *(1,) * (x.ndim - 2)), 0) for x in inputs[1:]
        )
        return type(inputs)(inputs.q, *late)

    def _window(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer | None,
    ) -> Tensor:
        """Compute softmax attention in the window, from the ring's content and updating the ring."""
        q, k = self.rotate(q, k, position_embeddings)
        if cache is not None:
            return cached_window_attention(q, k, v, cache, positions=positions, scale=self.scale)
        window, sinks = self.settings.window, self.settings.sinks
        return window_attention(q, k, v, window=window, sinks=sinks, positions=positions, scale=self.scale)

    def _is_whole_step(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, cache: LinearizedCacheLayer
    ) -> bool:
        """Return whether one kernel can run the whole step: one token, no new parameters but weights and shifts."""
        settings = self.settings
        more = settings.rotate_state or settings.output_norm or settings.gate_source == "random"
        others = settings.gate == "slots" or settings.feature_map not in ("softmax", "none")
        if more or others or not settings.window or q.shape[1] != 1:
            return False
        return not _has_gradients(self.gate_shift, self.weights) and takes_steps((q, k, v), cache, positions)

    def _is_one_step(self, inputs: Recurrence, positions: Positions, cache: LinearizedCacheLayer) -> bool:
        """Return whether one kernel can run both branches: one token, of a recurrence that `windowed_step` supports."""
        if self.settings.output_norm or not self.settings.window or inputs.q.shape[1] != 1:
            return False
        return not _has_gradients(self.weights) and takes_steps(inputs, cache, positions)

    def _whole_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer,
    ) -> Tensor:
        """Run one token, from its projections. Padding is not written here either."""
        settings, held = self.settings, self._held(positions, cache)
        out = liger_step(
            q,
            k,
            v,
            *position_embeddings,
            gate=settings.gate,
            temperature=settings.gate_temperature,
            feature_map=settings.feature_map,
            gate_shift=None if self.gate_shift is None else self.gate_shift.shift,
            late_keys=cache.late[0] if settings.delayed else None,
            **held,
        )
        cache.update((held["state"],), 1)
        return out

    def _step(
        self, inputs: Recurrence, q: Tensor, k: Tensor, positions: Positions, cache: LinearizedCacheLayer
    ) -> Tensor:
        """Run both branches of one token; q and k are rotated, for the window. Padding is not written here either."""
        held = self._held(positions, cache)
        out = windowed_step(*inputs, q_window=q, k_window=k, **held)
        cache.update((held["state"],), 1)
        return out

    def _held(self, positions: Positions, cache: LinearizedCacheLayer) -> dict[str, Any]:
        """Return the step arguments that do not depend on the token: tensors to update, and branch weights."""
        assert cache.states is not None
        (state,), (ring_keys, ring_values) = cache.states, cache.rings()
        alpha, beta = self._weights_of_heads(state)
        return {
            "state": state,
            "ring_keys": ring_keys,
            "ring_values": ring_values,
            "tokens": cache.counter,
            "kv_start": positions.kv_start,
            "state_weight": alpha,
            "window_weight": beta,
            "sinks": self.settings.sinks,
            "window_scale": self.scale,
        }

    def _weights_of_heads(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and beta `[Hq]` in the state's device and dtype; constant ones are created once."""
        heads = self.heads.query
        if self.weights is not None:
            alpha, beta = (weight.to(state.dtype).contiguous() for weight in self.weights(heads))
            return alpha, beta
        held = self._constant_weights
        if held is None or held[0].device != state.device or held[0].dtype != state.dtype:
            alpha, beta = self.settings.state_weight, self.settings.window_weight
            self._constant_weights = held = state.new_full((heads,), alpha), state.new_full((heads,), beta)
        return held

    def _recur(self, inputs: Inputs, positions: Positions, cache: LinearizedCacheLayer | None) -> Tensor:
        """Run the recurrence from the cached states and update them: `[B, T, Hq, D]`."""
        if cache is None:
            return _scan(inputs, None, positions.cu_seqlens)[0]
        if takes_steps(inputs, cache, positions) and cache.states is not None:
            out, states = _steps(inputs, cache.states), cache.states
        else:
            out, states = _scan(inputs, cache.states, None)
        cache.update(states, inputs.q.shape[1])
        return out

    def _weighted(self, state: Tensor, window: Tensor | None) -> Tensor:
        """Return `alpha state + beta window`, each `[B, T, Hq, D]`."""
        alpha: Tensor | float = self.settings.state_weight
        beta: Tensor | float = self.settings.window_weight
        if self.weights is not None:
            of_state, of_window = self.weights(self.heads.query)
            alpha, beta = of_state[:, None], beta if of_window is None else of_window[:, None]
        out = alpha * state
        return (out if window is None else out + beta * window).to(state.dtype)


def _has_gradients(*modules: nn.Module | None) -> bool:
    """Return whether any parameter is being trained; steps have no backward pass."""
    parameters = (parameter for module in modules if module is not None for parameter in module.parameters())
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)


def _written(inputs: Inputs, real: Tensor | None) -> Inputs:
    """Zero the inputs of tokens that are not `real` `[B, T]` (None: all), so that they leave nothing in the states."""
    if real is None:
        return inputs
    # Decay of an empty state has no effect.
    name = "slots" if isinstance(inputs, SlotRecurrence) else "v"
    return inputs._replace(**{name: getattr(inputs, name).masked_fill(~real[..., None, None], 0)})


States = tuple[Tensor, ...]


def _scan(inputs: Inputs, states: States | None, cu_seqlens: Tensor | None) -> tuple[Tensor, States]:
    """Process all tokens at once, starting from `states`; return the output and the final states."""
    if isinstance(inputs, SlotRecurrence):
        pair = None if states is None else (states[0], states[1])
        return gated_slot_attention(*inputs, initial_state=pair, cu_seqlens=cu_seqlens)
    (initial,) = states or (None,)
    out, final = gated_recurrence(*inputs, initial_state=initial, cu_seqlens=cu_seqlens)
    return out, (final,)


def _steps(inputs: Inputs, states: States) -> Tensor:
    """Process a few tokens one by one, updating `states` in place."""
    if isinstance(inputs, Recurrence):
        return gated_recurrence_step(*inputs, *states)
    q, k, v, slots, log_decay = inputs
    keys, values = states
    scores = gated_recurrence_step(q, k, slots, log_decay, keys, decay_axis="value")
    return gated_recurrence_step(scores.to(log_decay.dtype).softmax(-1).to(q.dtype), slots, v, log_decay, values)
