"""What quantizing or evicting tokens does to keys, values, scores, the attention distribution and the output."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.settings import SettingError
from evaluation.cache_analysis import selections
from evaluation.cache_analysis.heads import KeyHead
from lit_modules.networks.caches.calibration import CLIPS, rounding_error
from lit_modules.networks.caches.rotations import Rotations, Transform, hadamard
from lit_modules.networks.caches.settings import TensorSettings

SELECTIONS: dict[str, Callable[[int], selections.Selection]] = {
    "log_sparse": selections.log_sparse,
    "recent": selections.recent,
    "two_and_recent": selections.two_and_recent,
    "two_and_fewer": selections.two_and_fewer,
}
EVICTED = "evicted"
"""In place of a rounding's name."""

PARTS = ("keys", "values", "scores", "outputs")

Change = Callable[[Tensor], Tensor]
Case = tuple[str, int]  # a selection's name and the reserved length


@dataclass(frozen=True)
class Rounding:
    """How tokens that do not keep 16 bits are rounded.

    Args:
        bits: 2 or 4.
        groups_along: of keys, "tokens" or "channels"; the groups of values are along channels.
        transform: "plain", "hadamard", "rotation", "clipped": the rotation with OSCAR's clipping, or "balanced": the
            balanced map with the same clipping.
        group: numbers in a group; a narrower head has one group.
        rotations: calibrated ones, for the last three transforms.
    """

    bits: int
    groups_along: str
    transform: str
    group: int
    rotations: Rotations | None = None

    @property
    def name(self) -> str:
        """The name in reports: `2 bits, tokens, plain`."""
        return f"{self.bits} bits, {self.groups_along}, {self.transform}"

    def of_keys(self, order: Tensor, layer: int, heads: slice) -> Change:
        """Return the function that rounds the tokens `order` `[n]` of the keys `[1, H, S, D]` of these heads."""
        transform = partial(self._transform, "key", layer, heads)
        return partial(self._rounded, order=order, what="key", along=self.groups_along, transform=transform)

    def of_values(self, order: Tensor, layer: int, heads: slice) -> Change:
        """Return the function that rounds the tokens `order` `[n]` of the values `[1, H, S, D]` of these heads."""
        transform = partial(self._transform, "value", layer, heads)
        return partial(self._rounded, order=order, what="value", along="channels", transform=transform)

    def _rounded(
        self, x: Tensor, *, order: Tensor, what: str, along: str, transform: Callable[[int], Transform | None]
    ) -> Tensor:
        """Return `x` with the tokens `order`, grouped in this order, quantized and dequantized, float32 at least."""
        width, rows = x.shape[-1], x[:, :, order]
        format = self._settings(what, along, width).format_of(width)
        rows = rows.to(torch.promote_types(x.dtype, torch.float32))
        result = x.to(rows.dtype, copy=True)
        result[:, :, order] = rows + rounding_error(rows, transform(width), format)
        return result

    def _transform(self, what: str, layer: int, heads: slice, head_dim: int) -> Transform | None:
        if self.transform == "plain":
            return None
        if self.transform == "hadamard":
            return Transform.rotation(hadamard(head_dim))
        assert self.rotations is not None
        way = "balanced" if self.transform == "balanced" else "rotation"
        return self.rotations.of_layer(layer).transform(what, way).of_heads(heads)

    def _settings(self, what: str, along: str, head_dim: int) -> TensorSettings:
        clip = CLIPS[what] if self.transform in ("clipped", "balanced") else 1.0
        group = self.group if along == "tokens" else min(self.group, head_dim)
        try:
            found = TensorSettings(bits=self.bits, groups_along=along, group=group, clip=clip)
            found.format_of(head_dim).check_head_dim(head_dim)
        except ValueError as error:
            raise SettingError("benchmark.group", self.group, "give another", f"does not fit ({error})") from error
        return found


class AttentionError:
    """The L1 error of attention distributions, by selection, reserved length and rounding (arXiv 2503.19950, table 2).

    The paper does not say what it sums. Here it is `sum_j |p_j - p'_j|` over all tokens, a number from 0 to 2 for each
    query and head. Evicted tokens have `p'_j = 0`, and the others are normalized anew. Policies that read content are
    measured with eviction alone.

    Args:
        reserved: the reserved lengths.
        roundings: what becomes of the others, besides their eviction.
        rows: the positions of the measured queries.
        device: of the attention.
    """

    def __init__(self, reserved: Sequence[int], roundings: Sequence[Rounding], rows: range, device: torch.device):
        self.roundings, self.reserved = tuple(roundings), tuple(reserved)
        self.evicted: dict[Case, Tensor] = {}
        self.packed: dict[Case, Tensor] = {}
        self.orders: dict[tuple[str, int], Tensor] = {}
        self.cases: dict[tuple[str, int], list[Case]] = {}
        for length in reserved:
            for name, select in SELECTIONS.items():
                selection, case = select(length), (name, length)
                self.evicted[case] = ~selection.kept(rows).to(device)
                order, packed = selection.packed(rows, roundings[0].group)
                self.packed[case] = packed.to(device)
                longest = self.orders.get(selection.order, order[:0])
                self.orders[selection.order] = order.to(device) if len(order) > len(longest) else longest
                self.cases.setdefault(selection.order, []).append(case)

    def of_head(self, head: KeyHead, layer: int) -> dict[Hashable, Tensor]:
        """Return for each selection, reserved length and rounding `[g]`, means over queries; and the tokens kept."""
        found: dict[Hashable, Tensor] = {}
        by_content = {
            (name, length): ~kept for length in self.reserved for name, kept in head.kept_by_content(length).items()
        }
        for (name, length), evicted in (self.evicted | by_content).items():
            kept = (~evicted).sum(-1).to(head.weights.dtype).mean()
            found["kept", name, length] = kept.expand(len(head.weights))
            left = head.logits.masked_fill(evicted, -torch.inf).softmax(-1)
            found["l1", name, length, EVICTED] = l1_error(left, head.weights)
        for rounding in self.roundings:
            for order, cases in self._shared(rounding, head):
                logits = head.logits_of(head.changed_keys(rounding.of_keys(order, layer, head.key_heads)), head.rows)
                for name, length in cases:
                    weights = torch.where(self.packed[name, length], logits, head.logits).softmax(-1)
                    found["l1", name, length, rounding.name] = l1_error(weights, head.weights)
        return found

    def _shared(self, rounding: Rounding, head: KeyHead) -> list[tuple[Tensor, list[Case]]]:
        """Return orders of tokens, and for each the selections whose tokens are rounded alike in it."""
        if rounding.groups_along == "channels":  # each token alone
            return [(torch.arange(head.length, device=head.rows.device), list(self.packed))]
        return [(order, self.cases[key]) for key, order in self.orders.items()]


class Reconstruction:
    """Errors of keys, values, scores and outputs by rounding, where all but the last `window` tokens are quantized.

    Args:
        roundings: how.
        window: tokens that keep 16 bits.
        rows: the positions of the measured queries.
        device: of the attention.
    """

    def __init__(self, roundings: Sequence[Rounding], window: int, rows: range, device: torch.device):
        self.roundings = tuple(roundings)
        order, packed = selections.recent(window).packed(rows, roundings[0].group)
        self.order, self.packed = order.to(device), packed.to(device)

    def of_head(self, head: KeyHead, layer: int) -> dict[Hashable, Tensor]:
        """Return for each rounding and each of `PARTS` `[heads, 2]`: a sum of squared errors, and its whole.

        Keys and values are quantized tokens as the cache holds them, of the key head and of the value heads that its
        query heads read. Scores are logits of quantized tokens, less each query's mean error, which softmax does not
        see; their second number counts them. Outputs have both keys and values rounded.
        """
        exact = head.outputs(head.weights)
        found: dict[Hashable, Tensor] = {}
        for rounding in self.roundings:
            change_keys = rounding.of_keys(self.order, layer, head.key_heads)
            change_values = rounding.of_values(self.order, layer, head.value_heads)
            logits = head.logits_of(head.changed_keys(change_keys), head.rows)
            weights = torch.where(self.packed, logits, head.logits).softmax(-1)
            parts = {
                "keys": squares(head.cached_keys[:, :, self.order], change_keys(head.cached_keys)[:, :, self.order]),
                "values": squares(head.values[:, :, self.order], change_values(head.values)[:, :, self.order]),
                "scores": score_errors(logits, head.logits, self.packed),
                "outputs": squares(exact[None], head.outputs(weights, change_values)[None]),
            }
            found |= {("error", rounding.name, part): parts[part] for part in PARTS}
        return found


def l1_error(weights: Tensor, exact: Tensor) -> Tensor:
    """Return the mean over queries of the L1 distance of distributions `[g, Q, S]`: `[g]`."""
    return (weights - exact).abs().sum(-1).mean(-1)


def squares(exact: Tensor, changed: Tensor) -> Tensor:
    """Return `[H, 2]`: the squared errors of `[1, H, n, D]`, and the squares."""
    exact = exact.to(changed.dtype)
    return torch.stack([(x[0] ** 2).sum((-1, -2)) for x in (changed - exact, exact)], -1)


def score_errors(logits: Tensor, exact: Tensor, packed: Tensor) -> Tensor:
    """Return `[g, 2]`: the squared errors of logits `[g, Q, S]` where packed, less each row's mean; their number."""
    error = torch.where(packed, logits - exact, 0.0)
    count = packed.sum(-1, keepdim=True)
    error = torch.where(packed, error - error.sum(-1, keepdim=True) / count.clamp(min=1), 0.0)
    return torch.stack(((error**2).sum((-1, -2)), count.sum().expand(len(error)).to(error.dtype)), -1)
