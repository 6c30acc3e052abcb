"""LoLCATs (arXiv 2410.10254): softmax attention in a window and linear attention before it, normalized as one.

With s_ij = scale q_i . k_j, m_i its largest in the window of w tokens, f and g the learned maps of queries and keys:

    y_i = (a sum_{i-w < j <= i} exp(s_ij - m_i) v_j + sum_{j <= i-w} f(q_i) . g(k_j) v_j)
        / (a sum_{i-w < j <= i} exp(s_ij - m_i)     + sum_{j <= i-w} f(q_i) . g(k_j))

Queries and keys are rotated in both sums. The linear one is a recurrence without decay over keys and values that come w
tokens late, and its denominator is one more column of the values. All of it is linear in the length.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step
from lit_modules.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.linearized.base import Rotary, SubstitutedAttention
from lit_modules.networks.linearized.feature_maps import make_feature_map
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.linearized.windows import Blocks
from lit_modules.networks.mixers.recurrent import takes_steps
from lit_modules.networks.positions import Positions

INITIAL_WINDOW_WEIGHT = 0.1
"""What a begins as in the authors' code."""

EXTRA_COLUMNS = 16
"""By which the values are widened, for the denominator: as many as leave their rows aligned for the kernels."""


class WindowWeight(nn.Module):
    """a, how much the window counts beside the linear part, between 0 and 1 and learned for each query head."""

    def __init__(self, heads: int):
        super().__init__()
        self.logit = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        with torch.no_grad():
            self.logit.copy_(self.initial_values()["logit"])

    def initial_values(self) -> dict[str, Tensor]:
        """What the parameters begin as, by name."""
        odds = INITIAL_WINDOW_WEIGHT / (1 - INITIAL_WINDOW_WEIGHT)
        return {"logit": torch.full_like(self.logit, math.log(odds))}

    def forward(self) -> Tensor:
        """`[heads]`, float32 at least."""
        return self.logit.to(torch.promote_types(self.logit.dtype, torch.float32)).sigmoid()


class LolcatsAttention(SubstitutedAttention):
    """The window and what came before it, as the authors' sliding-window form has it.

    Keys have as many maps as there are key heads, so that the query heads of a group share their state. (The authors
    repeat the keys for each query head, and map each repetition by itself.)
    """

    def __init__(self, attention: nn.Module, config: PreTrainedConfig, settings: Linearization):
        super().__init__(attention, config, settings)
        if settings.feature_map == "none":
            raise ValueError("linearization.feature_map=none with linearization.mixer=lolcats: give learned or softmax")
        self.q_feature_map = make_feature_map(settings.feature_map, self.heads.query, self.heads.dim)
        self.k_feature_map = make_feature_map(settings.feature_map, self.heads.key, self.heads.dim)
        self.window_weight = WindowWeight(self.heads.query)

    def new_cache(self) -> LinearizedCacheLayer:
        """An empty cache of the state and the ring."""
        return LinearizedCacheLayer(self.settings.window)

    def student(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        position_embeddings: Rotary,
        cache: LinearizedCacheLayer | None,
    ) -> Tensor:
        """Both sums over one denominator; as `SubstitutedAttention.student`."""
        q, k = self.rotate(q, k, position_embeddings)
        mapped_q = self.q_feature_map(q)
        steps = cache is not None and takes_steps((q, k, v, mapped_q), cache, positions)
        ring = cache if cache is not None and cache.ring_keys is not None else None
        place = _places(positions, ring, q.shape[1])
        index = place.clamp(min=0)
        # What leaves the ring is read before the window's sums write into it; the counter moves last.
        late_k, late_v = (_late(*pair, self.settings.window, ring) for pair in ((k, "ring_keys"), (v, "ring_values")))
        gone = (index >= self.settings.window)[..., None, None]
        late_k = self.k_feature_map(late_k).masked_fill(~gone, 0)
        near, near_total = self._window(q, k, v, index, positions, cache, steps and q.shape[1] == 1)
        far, far_total = self._linear(mapped_q, late_k, late_v, positions, cache, steps)
        weight = self.window_weight()[:, None]
        out = (weight * near + far) / (weight * near_total + far_total)
        # A padded query has itself in its window; the teacher's has nothing.
        return out.masked_fill((place < 0)[..., None, None], 0).to(q.dtype)

    def _window(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        positions: Positions,
        cache: LinearizedCacheLayer | None,
        one_step: bool,
    ) -> tuple[Tensor, Tensor]:
        """The window's sums of values and of weights, after what the ring holds and into it."""
        window = self.settings.window
        if one_step:
            cache.append(k, v, positions.kv_start)
            return _sums_in_ring(q, cache, positions.kv_start, self.scale)
        if cache is None:
            return window_sums(q, k, v, window=window, index=index, scale=self.scale)
        past, keys, values = 0, k, v
        if cache.ring_keys is not None:
            past, oldest_first = window, cache.time(window) % window
            keys, values = (
                torch.cat((ring.index_select(1, oldest_first), x), dim=1)
                for ring, x in ((cache.ring_keys, k), (cache.ring_values, v))
            )
            q, index = F.pad(q, (0, 0, 0, 0, past, 0)), F.pad(index, (past, 0))
        cache.append(k, v, positions.kv_start)
        sums = window_sums(q, keys, values, window=window, index=index, scale=self.scale)
        return tuple(x[:, past:] for x in sums)

    def _linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        cache: LinearizedCacheLayer | None,
        steps: bool,
    ) -> tuple[Tensor, Tensor]:
        """The linear part's sums of values and of weights, after what the state holds and into it."""
        width = v.shape[-1]
        v = F.pad(F.pad(v, (0, 1), value=1.0), (0, EXTRA_COLUMNS - 1))
        inputs = (q, k, v, torch.zeros(k.shape[:3], dtype=torch.float32, device=k.device))
        if steps:
            out = gated_recurrence_step(*inputs, *cache.states)
            cache.update(cache.states, q.shape[1])
        elif cache is None:
            out = gated_recurrence(*inputs, cu_seqlens=positions.cu_seqlens)[0]
        else:
            (state,) = cache.states or (None,)
            out, state = gated_recurrence(*inputs, initial_state=state)
            cache.update((state,), q.shape[1])
        return out[..., :width], out[..., width : width + 1]


def window_sums(q: Tensor, k: Tensor, v: Tensor, *, window: int, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`sum exp(s_ij - m_i) v_j` `[B, T, Hq, D]` and `sum exp(s_ij - m_i)` `[B, T, Hq, 1]` over each token's window.

    Args:
        q: `[B, T, Hq, D]`.
        k, v: `[B, T, Hk, D]`.
        window: tokens, the token itself included.
        index: `[B, T]`, each token's place in its document.
        scale: of the scores s.

    Returns:
        In float32 at least.
    """
    blocks = Blocks(k.shape[2], window, index)
    scores = blocks.scores(q, k, scale)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    totals = blocks.join(weights.sum(-1)).flatten(2, 3)
    return blocks.weighted_sum(weights, v).flatten(2, 3), totals[..., None]


def _sums_in_ring(
    q: Tensor, cache: LinearizedCacheLayer, kv_start: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`window_sums` of one token, `[B, 1, Hq, D]`, which is in the ring already; the ring's order does not matter."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    slots = torch.arange(cache.window, device=q.device)
    held = cache.counter - (cache.counter - slots) % cache.window
    first = 0 if kv_start is None else kv_start[:, None]
    visible = (held >= first).view(-1, 1, 1, cache.window)
    with torch.autocast(q.device.type, enabled=False):
        queries = q[:, 0].to(dtype).unflatten(1, (cache.ring_keys.shape[2], -1))
        scores = torch.einsum("bhgd,bjhd->bhgj", queries, cache.ring_keys.to(dtype)) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = torch.einsum("bhgj,bjhd->bhgd", weights, cache.ring_values.to(dtype))
    return sums.flatten(1, 2)[:, None], weights.sum(-1).flatten(1)[:, None, :, None]


def _places(positions: Positions, ring: LinearizedCacheLayer | None, tokens: int) -> Tensor:
    """`[B, T]`: how many tokens of its document came before each new token; negative in the padding."""
    if ring is None and positions.kv_start is None:
        return positions.index
    time = torch.arange(tokens, device=positions.index.device) if ring is None else ring.time(tokens)
    first = 0 if positions.kv_start is None else positions.kv_start[:, None]
    return (time - first).expand(len(positions.index), tokens)


def _late(x: Tensor, name: str, window: int, ring: LinearizedCacheLayer | None) -> Tensor:
    """`x` `[B, T, ...]` so many tokens late, beginning with what the ring of this name holds, or else with zeros."""
    tokens = x.shape[1]
    if ring is None:
        return F.pad(x, (0, 0, 0, 0, window, 0))[:, :tokens]
    slots = ring.time(min(tokens, window)) % window
    leaving = getattr(ring, name).index_select(1, slots)
    return leaving if tokens <= window else torch.cat((leaving, x[:, :-window]), dim=1)
