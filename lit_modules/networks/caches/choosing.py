"""Policies that read content: which tokens of a layer keep 16 bits, chosen per row and group of heads on the device.

The counts are the same for all rows and heads of a schedule, so only the slots differ. Whenever `window + block` tokens
have 16 bits, `block` of them are released: those of lowest priority among the older ones.
"""

import torch
from torch import Tensor

from lit_modules.networks.caches.moves import Turn

NEWEST = {"heavy_hitters": 2, "forget_gate": 3}
"""One in so many tokens of the window are the newest, which stay."""

ROUNDS = 4
"""Rounds in which the gate's choice releases a block: after each, the gaps are measured again."""


def choose_heavy_hitters(turns: tuple[Turn, ...], scores: Tensor, window: int, block: int) -> tuple[Tensor, Tensor]:
    """Choose by the attention that tokens have received (H2O, arXiv 2306.14048).

    Args:
        turns: the new tokens of the rows.
        scores: float32 `[B, G, slots]`, the sum of the attention that each token in a layout has received.
        window: tokens that keep 16 bits; half are the newest.
        block: tokens that are released at a time.

    Returns:
        Slots released `[B, G, n]` and kept `[B, G, m]`, ascending, filled up with 0 in rows that have fewer.
    """
    parts = []
    for turn in turns:
        slots = torch.from_numpy(turn.slots()).to(scores.device)
        own = scores[turn.rows][:, :, slots]
        count = turn.releases * block
        older = own[..., : len(slots) - window // NEWEST["heavy_hitters"]]
        lowest = older.topk(count, dim=-1, largest=False).indices if count else slots.new_zeros(*own.shape[:2], 0)
        parts.append(_split(slots, lowest))
    return _assembled(turns, parts, scores)


def choose_by_gate(
    turns: tuple[Turn, ...], decay: Tensor, positions: Tensor, window: int, block: int
) -> tuple[Tensor, Tensor]:
    """Choose so that kept tokens are as dense as the forget gate's weight of them.

    The newest third stays. The priority of another token j is `c_n - c_j + ln(gap)`, with the newest token n, c the sum
    of log gates, and the gap from the token kept before it: a token alone in a long stretch stands for all of it. Each
    choice is made with what was known when the list was full, so chunks of a prompt change nothing. A block goes in
    rounds, between which gaps are measured again.

    Args:
        turns: the new tokens of the rows.
        decay: `[B, G, slots]`, c of each token in a layout.
        positions: int32 `[B, G, slots]`.
        window, block: as in `choose_heavy_hitters`.

    Returns:
        As `choose_heavy_hitters`.
    """
    parts = []
    for turn in turns:
        slots = torch.from_numpy(turn.slots()).to(decay.device)
        sums, places = (x[turn.rows][:, :, slots] for x in (decay, positions))
        # Slots in the order of positions; the first window + block are there when the first block is released.
        order = torch.arange(len(slots), device=decay.device).expand_as(sums)
        full = window + block
        kept, released = order[..., : full if turn.releases else len(slots)], []
        for release in range(turn.releases):
            for _ in range(ROUNDS):
                candidates = kept.shape[-1] - window // NEWEST["forget_gate"]
                lowest = _lowest(kept, sums, places, candidates, block // ROUNDS)
                leaving, kept = _divide(kept, lowest)
                released.append(leaving)
            stop = full + (release + 1) * block
            coming = order[..., stop - block : stop if release + 1 < turn.releases else len(slots)]
            kept = torch.cat((kept, coming), -1)
        gone = torch.cat(released, -1) if released else order[..., :0]
        parts.append((slots[gone], slots[kept]))
    return _assembled(turns, parts, decay)


def _lowest(kept: Tensor, sums: Tensor, places: Tensor, candidates: int, number: int) -> Tensor:
    """Return the indices `[B, G, number]` in `kept` `[B, G, n]` of the lowest priorities of its first candidates.

    Of two neighbors only the second can be chosen, where that leaves enough: else a whole stretch would go at once,
    each of its tokens for the sake of the one before.
    """
    weight = sums.gather(-1, kept[..., -1:]) - sums.gather(-1, kept)
    place = places.gather(-1, kept)
    before = torch.cat((torch.full_like(place[..., :1], -1), place[..., :-1]), -1)
    priority = (weight + (place - before).to(weight.dtype).log())[..., :candidates]
    if candidates // 2 < number:
        return priority.topk(number, dim=-1, largest=False).indices
    return 2 * priority[..., 1::2].topk(number, dim=-1, largest=False).indices + 1


def _divide(slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of `slots` `[B, G, n]` at the indices `chosen` `[B, G, k]`, and the others, both in order."""
    is_chosen = torch.zeros_like(slots, dtype=torch.bool).scatter_(-1, chosen, True)
    # A stable sort brings the others to the front without a count that the host would have to wait for.
    order = is_chosen.sort(dim=-1, stable=True).indices
    order = slots.gather(-1, order)
    stay = slots.shape[-1] - chosen.shape[-1]
    return order[..., stay:], order[..., :stay]


def _split(slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return _divide(slots.expand(*chosen.shape[:2], -1), chosen)


def _assembled(turns: tuple[Turn, ...], parts: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Put the rows of all turns together: released and kept slots, `[B, G, most]`."""
    if len(parts) == 1:
        return parts[0]
    tables = []
    for which in (0, 1):
        most = max(part[which].shape[-1] for part in parts)
        table = torch.zeros(*like.shape[:2], most, dtype=torch.int64, device=like.device)
        for turn, part in zip(turns, parts, strict=True):
            table[turn.rows, :, : part[which].shape[-1]] = part[which]
        tables.append(table)
    return tables[0], tables[1]
