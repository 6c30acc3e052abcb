"""Policies that read content: which tokens of a layer keep 16 bits, chosen per row and group of heads on the device.

The counts are the same for all rows and heads of a schedule, so only the slots differ. Whenever `window + block` tokens
have 16 bits, `block` of them are released: those of lowest priority among the older ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_modules.networks.caches.in_parts import bias, products
from lit_modules.networks.caches.moves import Turn

NEWEST = {"attention": 2, "forget_gate": 3}
"""One in so many tokens of the window are the newest, which stay."""

VOTERS = 32
"""The last queries of a prompt chunk that vote for what they attend to."""

VOTED_BEFORE, VOTED_AFTER = 7, 3
"""A token has the most votes of so many before and after it: an answer goes on behind the token that is found."""

MAX_VOTES = 1 << 25
"""Attention weights held at a time."""

ROUNDS = 4
"""Rounds in which the gate's choice releases a block: after each, the gaps are measured again."""


def prompt_votes(
    q: Tensor,
    keys: Tensor,
    end: Tensor,
    groups: int,
    *,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """Return the attention that the last queries of a prompt chunk give to each token (SnapKV, arXiv 2404.14469).

    Weights are those among tokens with 16 bits, because only these can be chosen.

    Args:
        q: `[B, Hq, T, D]`.
        keys: `[B, Hk, slots, D]`, with those of the queries last before `end`.
        end: int32 `[B]`.
        groups: groups of heads, G, whose votes are added up.
        scale: factor on the logits.
        start: int32 `[B]`, the first slot that is no padding, or None.
        softcap: logits become `softcap * tanh(logit / softcap)`; None leaves them.
        decay: sums of log gates `[B, Hq, slots]`, or None.

    Returns:
        float32 `[B, G, slots]`, 0 for slots without a token.
    """
    q = q[:, :, -VOTERS:]
    batch, heads, time, _ = q.shape
    slot = torch.arange(keys.shape[2], device=q.device)
    votes = torch.zeros(batch, groups, len(slot), device=q.device)
    step, keys = max(1, MAX_VOTES // (batch * heads * len(slot))), keys.float()
    for first in range(0, time, step):
        part = q[:, :, first : first + step].float()
        own = (end.long()[:, None] - time + first) + torch.arange(part.shape[2], device=q.device)  # [B, t]
        scores = products(part, keys.mT, part.shape[2]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if decay is not None:
            scores = scores + bias((decay, None), own, heads)
        visible = slot <= own[..., None]
        if start is not None:
            visible = visible & (slot >= start[:, None, None])
        # Padding sees nothing; a NaN in a key is no vote, attention shows it.
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        votes += weights.sum(2).unflatten(1, (groups, -1)).sum(2)
    return F.max_pool1d(F.pad(votes, (VOTED_BEFORE, VOTED_AFTER)), VOTED_BEFORE + 1 + VOTED_AFTER, stride=1)


def choose_by_attention(turns: tuple[Turn, ...], scores: Tensor, window: int, block: int) -> tuple[Tensor, Tensor]:
    """Choose by the attention that tokens have received: from all (H2O, arXiv 2306.14048), or from the prompt's last.

    Args:
        turns: the new tokens of the rows.
        scores: float32 `[B, G, slots]`, the attention that each token in a layout has received.
        window: tokens that keep 16 bits; half are the newest.
        block: tokens that are released at a time.

    Returns:
        Slots released `[B, G, n]` and kept `[B, G, m]`, ascending, filled up with 0 in rows that have fewer.
    """
    parts = []
    for turn in turns:
        if turn.padding or len(turn.rows) < len(scores):
            slots = torch.from_numpy(turn.slots()).to(scores.device)
            own = scores[turn.rows][:, :, slots]
        else:  # the same, without waiting for the host: all rows, and slots from the first one on
            slots = torch.arange(turn.before + turn.real, device=scores.device)
            own = scores[:, :, : len(slots)]
        count = turn.releases * block
        older = own[..., : len(slots) - window // NEWEST["attention"]]
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
        window, block: as in `choose_by_attention`.

    Returns:
        As `choose_by_attention`.
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
