"""How much attention falls on the tokens that a cache would keep in 16 bits, and at what distance it falls."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from evaluation.cache_analysis import selections
from evaluation.cache_analysis.heads import GATE, HEAVY, PROMPT, KeyHead

SINKS = 2
"""The first tokens that coverage and distances leave out, as the LogQuant paper does (figures 3 and 4)."""

NEWEST = 128
"""The newest tokens whose attention is set beside that of the first ones (figure 3)."""

BY_POSITION = {
    "log_sparse": selections.log_sparse,
    "recent": selections.recent,
    "four_and_recent": selections.four_and_recent,
}
"""The selections whose coverage is measured, besides those that depend on content."""

POLICIES = ("log_sparse", "recent_as_many", "recent", "four_and_recent", HEAVY, PROMPT, GATE, "largest")
"""All of them, in the order of tables; GATE where there are gates."""


class Coverage:
    """Attention mass on reserved tokens, by policy and reserved length (arXiv 2503.19950, figure 4).

    Args:
        reserved: the reserved lengths.
        rows: the positions of the measured queries.
        device: of the attention.
    """

    def __init__(self, reserved: Sequence[int], rows: range, device: torch.device):
        self.reserved = tuple(reserved)
        self.masks: dict[tuple[str, int], Tensor] = {}
        for length in self.reserved:
            for name, select in BY_POSITION.items():
                self.masks[name, length] = select(length).kept(rows)
            self.masks["recent_as_many", length] = selections.recent_as_many(self.masks["log_sparse", length], rows)
        self.masks = {key: mask.to(device) for key, mask in self.masks.items()}

    def of_head(self, head: KeyHead) -> dict[Hashable, Tensor]:
        """Return for each policy and reserved length `[g, 3]`, means over the queries.

        They are the attention on reserved tokens, the same as a share of all attention, both without the first two
        tokens, and the number of reserved tokens. A share of no attention is 0.
        """
        outside = 1 - head.weights[..., :SINKS].sum(-1)
        found: dict[Hashable, Tensor] = {}
        for length in self.reserved:
            masks = {policy: mask for (policy, each), mask in self.masks.items() if each == length}
            masks |= head.kept_by_content(length)
            # What differs between query heads, too: [g, Q, S].
            masks["largest"] = torch.stack([selections.largest(weights, length) for weights in head.weights])
            for policy, mask in masks.items():
                mass = (head.weights * mask)[..., SINKS:].sum(-1)
                share = torch.where(outside > 0, mass / outside, 0.0)
                kept = mask.sum(-1).to(mass.dtype).expand_as(mass)
                found["coverage", policy, length] = torch.stack((mass, share, kept), -1).mean(1)
        return found


class Distances:
    """Attention by distance from the newest token, and on the first and the newest ones (arXiv 2503.19950, figure 3).

    Args:
        rows: the positions of the measured queries.
        device: of the attention.

    Attributes:
        edges: the first distance of each bin, and the end: bins double in width every second one.
        tokens: the number of tokens of all queries in each bin.
    """

    def __init__(self, rows: range, device: torch.device):
        self.edges = bin_edges(rows.stop)
        distance = torch.tensor(rows)[:, None] - torch.arange(rows.stop)
        bins = torch.bucketize(distance, torch.tensor(self.edges), right=True) - 1
        shown = (distance >= 0) & (torch.arange(rows.stop) >= SINKS)
        self.bins = torch.where(shown, bins, len(self.edges) - 1).flatten().to(device)  # the last one is dropped
        self.tokens = torch.bincount(self.bins, minlength=len(self.edges))[:-1]
        self.newest = ((distance >= 0) & (distance < NEWEST)).to(device)

    def of_head(self, head: KeyHead) -> dict[Hashable, Tensor]:
        """Return the mean attention of one token in each bin `[g, bins]`, and the sums in both parts `[g, 2]`."""
        weights = head.weights.flatten(1)
        sums = weights.new_zeros(len(weights), len(self.edges))
        sums.index_add_(1, self.bins, weights)
        first = head.weights[..., :SINKS].sum(-1).mean(-1)
        newest = (head.weights * self.newest)[..., SINKS:].sum(-1).mean(-1)
        return {
            ("distance",): sums[:, :-1] / self.tokens.clamp(min=1),
            ("first_and_newest",): torch.stack((first, newest), -1),
        }


def bin_edges(length: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 8, 11, 16, ... up to `length`: half powers of two."""
    edges = {0, 1}
    edges |= {round(2 ** (step / 2)) for step in range(2, 2 * length.bit_length())}
    return [*sorted(edge for edge in edges if edge < length), length]
