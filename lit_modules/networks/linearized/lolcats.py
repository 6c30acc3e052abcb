"""Softmax attention in a window and a linear recurrence before it, with one normalization (LoLCATs, arXiv 2410.10254).

With s_ij = scale q_i . k_j, N_i the last w tokens and the first ones of the document ("sinks"), m_i the largest s_ij
among them, f and g the maps of queries and keys, and G_ij the product of the gates of the tokens after j up to i - w:

    y_i = (a sum_{j in N_i} exp(s_ij - m_i) v_j + b sum_{j <= i-w, no sink} f(q_i) . G_ij g(k_j) v_j)
        / (a sum_{j in N_i} exp(s_ij - m_i)     + b sum_{j <= i-w, no sink} f(q_i) . G_ij g(k_j))

The second sum is a recurrence over keys, values and gates delayed by w tokens. Its denominator is an extra column of
the values, so that it decays with the state. The published form has no sinks and no gates, b = 1, and rotated queries
and keys in both sums. Its f . g must follow m_i, which depends on the window. With `mixer=joint` m_i is 0, and f . g
approximates exp(s_ij) itself. The cost is linear in the length.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step
from kernels.gated_recurrence.forms import Recurrence
from lit_modules.networks.caches.linearized import LinearizedCacheLayer, delay_tokens
from lit_modules.networks.linearized.base import Rotary, StockAttention, SubstitutedAttention
from lit_modules.networks.linearized.clusters import ClusterKeys, ClusterQueries
from lit_modules.networks.linearized.feature_maps import make_feature_map
from lit_modules.networks.linearized.gates import GateProjection, GateShift, gate_width, gated, pool
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.linearized.windows import WindowBlocks, first_tokens, sink_scores, weighted_sinks
from lit_modules.networks.mixers.recurrent import takes_steps
from lit_modules.networks.positions import Positions

LARGEST_EXPONENT = 40.0
"""Cap on the log-ratio of state to window weight; its square must fit float32."""

EXTRA_COLUMNS = 16
"""Columns added to the values for the denominator; the number keeps rows aligned for the kernels."""


class JointWeights(nn.Module):
    """a and b: the window's weight, between 0 and 1, learned per query head, and the state's weight.

    Args:
        heads: number of query heads.
        settings: initial values; b is learned with `learned_weights`.
    """

    def __init__(self, heads: int, settings: Linearization):
        super().__init__()
        self.settings = settings
        self.logit = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        count = {None: 0, "layer": 1, "head": heads}[settings.learned_weights]
        self.log_state = nn.Parameter(torch.empty(count, dtype=torch.float32)) if count else None
        with torch.no_grad():
            for name, value in self.initial_values().items():
                getattr(self, name).copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        window, state = self.settings.window_weight, self.settings.state_weight
        values = {"logit": torch.full_like(self.logit, math.log(window / (1 - window)))}
        if self.log_state is not None:
            values["log_state"] = torch.full_like(self.log_state, math.log(state))
        return values

    def forward(self) -> tuple[Tensor, Tensor | float]:
        """Return a `[heads]`, and b as `[heads]`, `[1]` or a number; float32 at least."""
        wide = torch.promote_types(self.logit.dtype, torch.float32)
        state = self.settings.state_weight if self.log_state is None else self.log_state.to(wide).exp()
        return self.logit.to(wide).sigmoid(), state


class Sums(NamedTuple):
    """Sums over some tokens for each query.

    Attributes:
        values: weighted values `[B, T, Hq, D]`.
        total: weights `[B, T, Hq, 1]`.
        largest: m `[B, T, Hq, 1]`, if the weights are `exp(s - m)`.
    """

    values: Tensor
    total: Tensor
    largest: Tensor | None = None


class LolcatsAttention(SubstitutedAttention):
    """A window and a linear state before it, as in the authors' sliding-window form; optionally with gates and sinks.

    Keys have one map and gate per key head, so that the query heads of a group share their state. (The authors repeat
    the keys per query head and map each repetition separately.)
    """

    def __init__(self, attention: StockAttention, config: PreTrainedConfig, settings: Linearization):
        super().__init__(attention, config, settings)
        self.q_feature_map: nn.Module | None
        self.k_feature_map: nn.Module | None
        if settings.feature_map == "clusters":
            self.q_feature_map = ClusterQueries(self.heads.query, self.heads.dim, settings.num_slots, self.scale)
            self.k_feature_map = ClusterKeys(self.heads.key, self.heads.dim, settings.num_slots)
        else:
            self.q_feature_map = make_feature_map(settings.feature_map, self.heads.query, self.heads.dim)
            # HGRN2 uses 1 - gate as the key.
            mapped = settings.gate != "hgrn2"
            self.k_feature_map = (
                make_feature_map(settings.feature_map, self.heads.key, self.heads.dim) if mapped else None
            )
        self.gate_width, random = gate_width(settings, self.heads.dim), settings.gate_source == "random"
        projected = bool(self.gate_width) and random
        self.gate_proj = GateProjection(config.hidden_size, self.heads.key, self.gate_width) if projected else None
        self.gate_shift = GateShift(self.heads.key) if settings.learned_gate_shift else None
        self.window_weight = JointWeights(self.heads.query, settings)

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
        """Compute both sums over one denominator; see `SubstitutedAttention.student`."""
        near, far, place = self._sums(hidden, q, k, v, positions, position_embeddings, cache)
        window, state = self._weights(near)
        out = (window * near.values + state * far.values) / (window * near.total + state * far.total)
        # A padded query sees itself in its window; the teacher's output is 0 there.
        return out.masked_fill((place < 0)[..., None, None], 0).to(q.dtype)

    def keys_of_state(self, hidden: Tensor, position_embeddings: Rotary) -> Tensor:
        """Return the teacher's keys `[B, T, Hk, D]` as the state's feature map receives them."""
        q, k, _ = self.project(hidden, adapted=False)
        return self.rotate(q, k, position_embeddings)[1] if self.settings.rotate_state else k

    def errors(self, hidden: Tensor, positions: Positions, position_embeddings: Rotary, shifts: Tensor) -> Tensor:
        """Return the error against the teacher if the state's weight were multiplied by exp(shift).

        Args:
            shifts: `[N]` float32.

        Returns:
            Sums of squared differences, `[N, Hq]`.
        """
        taught = self.teacher(hidden, positions, position_embeddings)
        near, far, place = self._sums(
            hidden, *self.project(hidden, adapted=False), positions, position_embeddings, None
        )
        window, state = self._weights(near)
        real = (place >= 0)[..., None, None]
        errors = []
        for factor in shifts.exp():
            values = window * near.values + factor * state * far.values
            out = values / (window * near.total + factor * state * far.total)
            errors.append(((out - taught) * real).square().sum((0, 1, 3)))
        return torch.stack(errors)

    def _weights(self, near: Sums) -> tuple[Tensor, Tensor | float]:
        """Return the weights of the two sums, up to a common factor: a and b, or for "joint" `exp(m) a` and b."""
        window, state = self.window_weight()
        window, state = window[:, None], state[:, None] if isinstance(state, Tensor) else state
        if self.settings.mixer == "lolcats":
            return window, state
        assert near.largest is not None
        # The common factor keeps the larger weight above 0 and both finite.
        beside = (-near.largest).clamp(max=LARGEST_EXPONENT)
        shift = beside.clamp(min=0)
        return window * (-shift).exp(), state * (beside - shift).exp()

    def _sums(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer | None,
    ) -> tuple[Sums, Sums, Tensor]:
        """Return the window's sums, the state's sums and each token's place in its row; arguments as in `student`."""
        if cache is not None:
            cache.start(k)
        turned_q, turned_k = self.rotate(q, k, position_embeddings)
        ring = cache if cache is not None and cache.ring_keys is not None else None
        place = _places(positions, ring, q.shape[1])
        index = place.clamp(min=0)
        # Read what leaves the ring before the window's sums overwrite it; the counter moves last.
        inputs = self._inputs(hidden, turned_q if self.settings.rotate_state else q, k, turned_k, v, cache, ring)
        # Do not write padding, the previous document or sinks into the state. Decay of an empty state has no effect.
        gone = (index >= self.settings.window + self.settings.sinks)[..., None, None]
        inputs = inputs._replace(k=inputs.k.masked_fill(~gone, 0))
        steps = cache is not None and takes_steps(inputs, cache, positions)
        near = self._window(turned_q, turned_k, v, index, positions, cache, steps and q.shape[1] == 1)
        return near, self._linear(inputs, positions, cache, steps), place

    def _inputs(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        turned_k: Tensor,
        v: Tensor,
        cache: LinearizedCacheLayer | None,
        ring: LinearizedCacheLayer | None,
    ) -> Recurrence:
        """Return the inputs of the recurrence: queries, and delayed keys, values and gates."""
        window, turned = self.settings.window, self.settings.rotate_state
        pooled = self.gate_width and self.gate_proj is None
        # The ring has values and rotated keys; other inputs wait in `cache.late`.
        waiting: tuple[Tensor, ...] = (k,) if pooled or not turned else ()
        if self.gate_proj is not None:
            waiting = (*waiting, self.gate_proj(hidden))
        late = (
            cache.delay(waiting) if cache is not None and waiting else tuple(delay_tokens(x, window) for x in waiting)
        )
        late_v = _delay_by_window(v, "ring_values", window, ring)
        late_k = _delay_by_window(turned_k, "ring_keys", window, ring) if turned else late[0]
        logits = None
        if self.gate_width:
            logits = pool(late[0], self.gate_width) if pooled else late[-1]
            logits = logits if self.gate_shift is None else self.gate_shift(logits)
        mapped_q = q if self.q_feature_map is None else self.q_feature_map(q)
        mapped_k = late_k if self.k_feature_map is None else self.k_feature_map(late_k)
        mapped_k, late_v = mapped_k.to(mapped_q.dtype), late_v.to(mapped_q.dtype)  # cluster maps widen float16
        # A column of ones for the denominator.
        late_v = F.pad(F.pad(late_v, (0, 1), value=1.0), (0, EXTRA_COLUMNS - 1))
        inputs = gated(self.settings, mapped_q, mapped_k, late_v, logits)
        assert isinstance(inputs, Recurrence)  # the settings refuse slots
        return inputs

    def _window(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        positions: Positions,
        cache: LinearizedCacheLayer | None,
        one_step: bool,
    ) -> Sums:
        """Compute the window's sums, from the ring's content and updating the ring."""
        window, sinks = self.settings.window, self.settings.sinks
        if cache is not None and one_step:
            cache.append(k, v, positions.kv_start)
            return _sums_in_ring(q, cache, positions.kv_start, self.scale)
        past, keys, values = 0, k, v
        held = None
        if cache is not None and cache.ring_keys is not None:
            held = cache.rings()
            past, oldest_first = window, sinks + cache.time(window) % window
            keys, values = (
                torch.cat((ring.index_select(1, oldest_first), x), dim=1) for ring, x in zip(held, (k, v), strict=True)
            )
            q, index = F.pad(q, (0, 0, 0, 0, past, 0)), F.pad(index, (past, 0))
        if cache is not None:
            cache.append(k, v, positions.kv_start)
        first = None
        if sinks and held is not None:  # all visible sinks are in the ring by now; copy, as later calls write to it
            first = held[0][:, None, :sinks].clone(), held[1][:, None, :sinks].clone()
        elif sinks:
            first = first_tokens(k, sinks, positions), first_tokens(v, sinks, positions)
        sums = window_sums(q, keys, values, window=window, index=index, scale=self.scale, sinks=first)
        return Sums(*(x[:, past:] for x in sums if x is not None))

    def _linear(
        self, inputs: Recurrence, positions: Positions, cache: LinearizedCacheLayer | None, steps: bool
    ) -> Sums:
        """Compute the linear part's sums, from the cached state and updating it."""
        if steps and cache is not None and cache.states is not None:
            out = gated_recurrence_step(*inputs, *cache.states)
            cache.update(cache.states, inputs.q.shape[1])
        elif cache is None:
            out = gated_recurrence(*inputs, cu_seqlens=positions.cu_seqlens)[0]
        else:
            (state,) = cache.states or (None,)
            out, state = gated_recurrence(*inputs, initial_state=state)
            cache.update((state,), inputs.q.shape[1])
        width = out.shape[-1] - EXTRA_COLUMNS
        return Sums(out[..., :width], out[..., width : width + 1])


def window_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    index: Tensor,
    scale: float,
    sinks: tuple[Tensor, Tensor] | None = None,
) -> Sums:
    """Compute `sum exp(s_ij - m_i) v_j`, `sum exp(s_ij - m_i)` and `m_i` over window and sinks.

    Args:
        q: `[B, T, Hq, D]`.
        k, v: `[B, T, Hk, D]`.
        window: width in tokens, the token itself included.
        index: `[B, T]`, each token's position in its document.
        scale: scale of the scores s.
        sinks: keys and values from `windows.first_tokens`; visible after they leave the window.

    Returns:
        The sums, float32 at least.
    """
    blocks = WindowBlocks(k.shape[2], window, index)
    scores = blocks.scores(q, k, scale)
    largest = scores.amax(-1, keepdim=True)
    if sinks is None:
        weights = (scores - largest).exp()
        totals, sums = blocks.join(weights.sum(-1)), blocks.weighted_sum(weights, v)
        return Sums(*(x.flatten(2, 3) for x in (sums, totals[..., None], blocks.join(largest))))
    at_sinks = blocks.cut(sink_scores(q, sinks[0], index, window, scale))
    largest = torch.maximum(largest, at_sinks.amax(-1, keepdim=True))
    weights, at_sinks = (scores - largest).exp(), blocks.join((at_sinks - largest).exp())
    totals = blocks.join(weights.sum(-1)) + at_sinks.sum(-1)
    sums = blocks.weighted_sum(weights, v) + weighted_sinks(at_sinks, sinks[1])
    return Sums(*(x.flatten(2, 3) for x in (sums, totals[..., None], blocks.join(largest))))


def _sums_in_ring(q: Tensor, cache: LinearizedCacheLayer, kv_start: Tensor | None, scale: float) -> Sums:
    """Compute `window_sums` of one token that is already in the ring; the order of the ring does not matter."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    first = cache.counter.new_zeros(1, 1) if kv_start is None else kv_start[:, None]
    slots = torch.arange(cache.window, device=q.device)
    visible = cache.counter - (cache.counter - slots) % cache.window >= first
    if cache.sinks:
        sink = first + torch.arange(cache.sinks, device=q.device)
        visible = torch.cat((cache.counter - sink >= cache.window, visible), dim=-1)
    ring_keys, ring_values = cache.rings()
    with torch.autocast(q.device.type, enabled=False):
        queries = q[:, 0].to(dtype).unflatten(1, (ring_keys.shape[2], -1))
        scores = torch.einsum("bhgd,bjhd->bhgj", queries, ring_keys.to(dtype)) * scale
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        sums = torch.einsum("bhgj,bjhd->bhgd", weights, ring_values.to(dtype))
    return Sums(*(x.flatten(1, 2)[:, None] for x in (sums, weights.sum(-1, keepdim=True), largest)))


def _places(positions: Positions, ring: LinearizedCacheLayer | None, tokens: int) -> Tensor:
    """Return `[B, T]`: the number of preceding tokens in each new token's document; negative in the padding."""
    if ring is None and positions.kv_start is None:
        return positions.index
    time = torch.arange(tokens, device=positions.index.device) if ring is None else ring.time(tokens)
    first = 0 if positions.kv_start is None else positions.kv_start[:, None]
    return (time - first).expand(len(positions.index), tokens)


def _delay_by_window(x: Tensor, name: str, window: int, ring: LinearizedCacheLayer | None) -> Tensor:
    """Delay `x` `[B, T, ...]` by `window` tokens, starting with the content of the named ring, or with zeros."""
    return delay_tokens(x, window) if ring is None else ring.leaving(name, x)
