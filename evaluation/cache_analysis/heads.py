"""The attention of one key head and of the query heads that read it: what is in memory at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.cache_analysis import selections
from lit_modules.networks.attention_inputs import AttentionInputs
from lit_modules.networks.caches.choosing import VOTERS, prompt_votes

HEAVY, PROMPT, GATE = "heavy_hitters", "prompt_attention", "forget_gate"
"""Policies that read content, by their names in the settings of caches."""


@dataclass(frozen=True)
class KeyHead:
    """One key head of a layer, its query heads, and the measured queries; everything is float32 at least.

    Args:
        inputs: of one sequence, `[1, H, S, D]`.
        head: number of the key head.
        queries: how many of the last queries are measured.
        by_gate: the tokens that the gate's choice keeps, bool `[Q, S]`, by reserved length; empty without gates.
    """

    inputs: AttentionInputs
    head: int
    queries: int
    by_gate: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of tokens, S."""
        return self.inputs.keys.shape[2]

    @property
    def query_heads(self) -> range:
        """The g query heads that read this key head."""
        shared = self.inputs.queries.shape[1] // self.inputs.keys.shape[1]
        return range(self.head * shared, (self.head + 1) * shared)

    @property
    def key_heads(self) -> slice:
        """This head among the key heads."""
        return slice(self.head, self.head + 1)

    @property
    def value_heads(self) -> slice:
        """The n value heads that the query heads read."""
        shared = self.inputs.queries.shape[1] // self.inputs.values.shape[1]
        return slice(self.query_heads.start // shared, (self.query_heads.stop - 1) // shared + 1)

    @cached_property
    def rows(self) -> Tensor:
        """The positions of the measured queries `[Q]`."""
        return torch.arange(self.length - self.queries, self.length, device=self.inputs.keys.device)

    @cached_property
    def logits(self) -> Tensor:
        """The logits of the measured queries `[g, Q, S]`; -inf for later tokens."""
        return self._causal(self.logits_of(self.inputs.keys[0, self.head], self.rows), self.rows)

    @cached_property
    def weights(self) -> Tensor:
        """The attention distributions of the measured queries `[g, Q, S]`."""
        return self.logits.softmax(-1)

    def logits_of(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the logits `[g, n, S]` of the queries at `rows` `[n]` with keys `[S, D]`, those of later tokens too.

        A forget gate adds `c_i - c_j`, with c the sum of its logs (FoX, arXiv 2503.02130, eq. 4).
        """
        inputs = self.inputs
        dtype = torch.promote_types(inputs.queries.dtype, torch.float32)
        queries = inputs.queries[0, self.query_heads.start : self.query_heads.stop][:, rows].to(dtype)
        scale = queries.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
        logits = (scale * queries) @ keys.to(dtype).mT
        if inputs.softcap is not None:
            logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
        if self._decay is not None:
            logits += (self._decay[:, rows, None] - self._decay[:, None]).to(dtype)
        return logits

    def _causal(self, logits: Tensor, rows: Tensor) -> Tensor:
        later = torch.arange(logits.shape[-1], device=rows.device) > rows[:, None]
        return logits.masked_fill_(later, -torch.inf)

    @property
    def cached_keys(self) -> Tensor:
        """The keys of this head as a cache holds them, `[1, 1, S, Dc]`."""
        return self.inputs.cached_keys[:, self.key_heads]

    @property
    def values(self) -> Tensor:
        """The values that the query heads read, `[1, n, S, Dv]`: each of n value heads once."""
        return self.inputs.values[:, self.value_heads]

    def changed_keys(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the keys `[S, D]` that scores read where those in the cache, `[1, 1, S, Dc]`, are changed."""
        if self.inputs.finish is None:
            return change(self.cached_keys)[0, 0]
        cached = self.inputs.cached_keys.clone()
        cached[:, self.key_heads] = change(self.cached_keys).to(cached.dtype)
        return self.inputs.finish(cached)[0, self.head]

    def outputs(self, weights: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return `weights` `[g, Q, S]` times the query heads' values, `[g, Q, Dv]`; the values may be changed."""
        values = (self.values if change is None else change(self.values))[0].to(weights.dtype)
        shared = self.inputs.queries.shape[1] // self.inputs.values.shape[1]
        first = self.value_heads.start
        return weights @ values[[head // shared - first for head in self.query_heads]]

    @cached_property
    def accumulated(self) -> Tensor:
        """The attention `[Q, S]` that each token had from all queries before each measured one, of all query heads."""
        before = torch.zeros(self.length, dtype=self.weights.dtype, device=self.rows.device)
        for start in range(0, self.length - self.queries, self.queries):
            rows = torch.arange(start, min(start + self.queries, self.length - self.queries), device=before.device)
            logits = self.logits_of(self.inputs.keys[0, self.head], rows)
            before += self._causal(logits, rows).softmax(-1).sum((0, 1))
        measured = self.weights.sum(0)
        return before + measured.cumsum(0) - measured

    @cached_property
    def votes(self) -> Tensor:
        """The attention `[S]` that each token had from the last queries before the measured ones, the prompt's end."""
        prompt = self.length - self.queries
        if prompt == 0:
            return torch.zeros(self.length, device=self.rows.device)
        inputs, heads = self.inputs, slice(self.query_heads.start, self.query_heads.stop)
        votes = prompt_votes(
            inputs.queries[:, heads, max(0, prompt - VOTERS) : prompt],
            inputs.keys[:, self.key_heads, :prompt],
            torch.tensor([prompt], dtype=torch.int32, device=self.rows.device),
            groups=1,
            scale=inputs.queries.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale,
            softcap=inputs.softcap,
            decay=None if self._decay is None else self._decay[None, :, :prompt].float(),
        )
        return F.pad(votes[0, 0], (0, self.queries))

    def kept_by_content(self, reserved: int) -> dict[str, Tensor]:
        """Return the tokens that policies which read content keep, bool `[Q, S]`, by policy."""
        kept = {
            HEAVY: selections.most_attended(self.accumulated, self.rows, reserved),
            PROMPT: selections.most_attended(self.votes, self.rows, reserved),
        }
        return kept | ({GATE: self.by_gate[reserved]} if reserved in self.by_gate else {})

    @cached_property
    def _decay(self) -> Tensor | None:
        """The sums of the log forget gates `[g, S]` float64, None without gates."""
        gates = self.inputs.log_forget
        if gates is None:
            return None
        return gates[0, self.query_heads.start : self.query_heads.stop].double().cumsum(-1)


def key_heads(inputs: AttentionInputs, queries: int, reserved: Sequence[int]) -> Iterator[KeyHead]:
    """Yield the key heads of a layer; the gate's choice is made once for all of them, by reserved length."""
    groups, length = inputs.keys.shape[1:3]
    masks: dict[int, Tensor] = {}
    if inputs.log_forget is not None:
        sums = inputs.log_forget.double().cumsum(-1).unflatten(1, (groups, -1)).mean(2).float()
        masks = {each: selections.by_gate(sums, range(length - queries, length), each) for each in reserved}
    for head in range(groups):
        yield KeyHead(inputs, head, queries, {each: mask[head] for each, mask in masks.items()})
