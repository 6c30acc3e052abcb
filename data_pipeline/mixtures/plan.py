"""Plan of a mixture: turn phase lengths, weights and epoch caps into whole numbers of sequences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from common.settings import NO_VALUE, SettingError, check_number, is_number

PHASE_KEYS = ("name", "tokens", "share", "weights")


@dataclass(frozen=True)
class Phase:
    """A phase as requested: `tokens` of the run, or a `share` of it; with neither, the rest.

    weights: by component (unnamed ones get none); None: by bytes.
    """

    name: str
    tokens: int | None
    share: Fraction | None
    weights: dict[str, Fraction] | None


@dataclass(frozen=True)
class Available:
    """A component, and the most sequences a run may read of it, repeats included (None: no limit)."""

    name: str
    limit: int | None


@dataclass(frozen=True)
class PlannedPhase:
    """A phase as planned: positions `first` to `end` - 1 of the run.

    For each component: the requested `shares`, the `counts` of sequences, and how many come `before` the phase.
    """

    name: str
    first: int
    end: int
    shares: tuple[Fraction, ...]
    counts: tuple[int, ...]
    before: tuple[int, ...]


def read_phases(given: Sequence[Mapping] | None) -> list[Phase]:
    """Return the phases of `data.phases`; None gives one for the whole run. Raise ValueError if invalid."""
    if given is None:
        given = [{}]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise SettingError("data.phases", given, "give a list such as [{tokens: 1e9, weights: {web: 8, code: 2}}]")
    phases = [_read_phase(index, phase) for index, phase in enumerate(given)]
    names = [phase.name for phase in phases]
    for name in names:
        if names.count(name) > 1:
            raise SettingError("data.phases", NO_VALUE, "give each a name of its own", f"has two phases named {name}")
    if any(phase.share for phase in phases):
        for index, phase in enumerate(phases):
            if phase.share is None:
                fix = "give all a share of the run, or all tokens"
                raise SettingError(f"data.phases[{index}]", NO_VALUE, fix, "has no share, and others have")
    for index, phase in enumerate(phases[:-1]):
        if phase.tokens is None and phase.share is None:
            problem = "has no length, and only the last can do without"
            raise SettingError(f"data.phases[{index}]", NO_VALUE, "give its tokens", problem)
    return phases


def _read_phase(index: int, given: Mapping) -> Phase:
    key = f"data.phases[{index}]"
    if not isinstance(given, Mapping):
        raise SettingError(key, given, "give {name: ..., tokens: ..., weights: {...}}")
    for name in given:
        if name not in PHASE_KEYS:
            raise SettingError(f"{key}.{name}", NO_VALUE, f"a phase has {', '.join(PHASE_KEYS)}", "is unknown")
    tokens, share, weights = (given.get(name) for name in ("tokens", "share", "weights"))
    if tokens is not None and share is not None:
        raise SettingError(key, NO_VALUE, "give one of them", f"has tokens={tokens} and share={share}")
    if tokens is not None and (not is_number(tokens) or tokens < 1 or tokens != int(tokens)):
        raise SettingError(f"{key}.tokens", tokens, "give a whole number above 0, or null for the rest of the run")
    check_number(f"{key}.share", share, above=0, null=True)
    if weights is not None:
        if not isinstance(weights, Mapping) or not weights:
            raise SettingError(f"{key}.weights", weights, "give {component: weight, ...}, or null for its bytes")
        for name, weight in weights.items():
            check_number(f"{key}.weights.{name}", weight, least=0)
        if not any(weights.values()):
            raise SettingError(f"{key}.weights", NO_VALUE, "give one component a weight above 0", "are all 0")
        weights = {str(name): Fraction(weight) for name, weight in weights.items()}
    return Phase(
        str(given.get("name") or f"phase_{index + 1}"),
        None if tokens is None else int(tokens),
        None if share is None else Fraction(share),
        weights,
    )


def phase_ends(phases: Sequence[Phase], max_tokens: int, positions: int, sequence_length: int) -> list[int]:
    """Return the position at which each phase ends; the last ends at `positions`, the end of the run.

    Phases that start after it are dropped.

    Raises:
        ValueError: the phases together are shorter than the run, or one is shorter than a sequence.
    """
    total = sum(phase.share or 0 for phase in phases)
    ends: list[int] = []
    reached = Fraction(0)  # in sequences
    for index, phase in enumerate(phases):
        if phase.share is not None:
            reached += phase.share / total * positions
        elif phase.tokens is not None:
            reached += Fraction(phase.tokens, sequence_length)
        else:
            reached = max(Fraction(positions), reached)
        end = min(positions, round(reached))
        if end == (ends[-1] if ends else 0):
            problem = f"({phase.name}) is shorter than a sequence of {sequence_length} tokens"
            raise SettingError(f"data.phases[{index}]", NO_VALUE, "lengthen it, or leave it out", problem)
        ends.append(end)
        if end == positions:
            return ends
    if reached * sequence_length < max_tokens:
        problem = f"have {int(reached * sequence_length)} tokens together, fewer than max_tokens={max_tokens}"
        fix = "lengthen one, give the last one no tokens (it then lasts to the end), or lower max_tokens"
        raise SettingError("data.phases", NO_VALUE, fix, problem)
    return [*ends[:-1], positions]  # the run ends with a whole optimizer step, a few sequences after its last token


def plan(
    phases: Sequence[Phase],
    ends: Sequence[int],
    weights: Sequence[Sequence[Fraction]],
    components: Sequence[Available],
    sequence_length: int,
) -> list[PlannedPhase]:
    """Return what each phase reads: shares rounded by largest remainder, every component within its limit.

    A component above its limit is scaled down by one factor in all phases. The other components of each phase fill the
    gap in proportion to their weights.

    Raises:
        ValueError: a phase has no component left with a weight.
    """
    firsts = [0, *ends[:-1]]
    lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
    shares = [[weight / sum(row) for weight in row] for row in weights]
    limits = [component.limit for component in components]
    try:
        counts = _whole(lengths, _spread(lengths, shares, limits), limits)
    except _Lacking as lacking:
        raise ValueError(_lacks(phases[lacking.phase], lacking, weights, components, sequence_length)) from None
    before = [0] * len(components)
    planned = []
    for phase, first, end, row, count in zip(phases, firsts, ends, shares, counts, strict=False):
        planned.append(PlannedPhase(phase.name, first, end, tuple(row), tuple(count), tuple(before)))
        before = [a + b for a, b in zip(before, count, strict=True)]
    return planned


class _Lacking(Exception):
    def __init__(self, phase: int, sequences: int) -> None:
        super().__init__()
        self.phase, self.sequences = phase, sequences


def _spread(
    lengths: Sequence[int], shares: Sequence[Sequence[Fraction]], limits: Sequence[int | None]
) -> list[list[Fraction]]:
    """Return the fractional number of sequences of each phase and component."""
    limited: dict[int, list[Fraction]] = {}  # component at its limit -> its sequences in each phase
    while True:
        amounts = []
        for phase, (length, row) in enumerate(zip(lengths, shares, strict=True)):
            left = length - sum(fixed[phase] for fixed in limited.values())
            free = sum(share for component, share in enumerate(row) if component not in limited)
            if left and not free:
                raise _Lacking(phase, math.ceil(left))
            amounts.append([limited[c][phase] if c in limited else share and left * share / free
                            for c, share in enumerate(row)])  # fmt: skip
        totals = [sum(column) for column in zip(*amounts, strict=True)]
        over = [
            (c, limit) for c, limit in enumerate(limits) if c not in limited and limit is not None and totals[c] > limit
        ]
        if not over:
            return amounts
        for c, limit in over:
            limited[c] = [row[c] * limit / totals[c] for row in amounts]


def _whole(
    lengths: Sequence[int], amounts: Sequence[Sequence[Fraction]], limits: Sequence[int | None]
) -> list[list[int]]:
    """Round each phase's amounts to whole numbers by largest remainder, every component within its total limit."""
    counts = [[math.floor(amount) for amount in row] for row in amounts]
    used = [sum(column) for column in zip(*counts, strict=True)]
    for phase, (length, row) in enumerate(zip(lengths, amounts, strict=True)):
        by_remainder = sorted(range(len(row)), key=lambda c: (counts[phase][c] - row[c], c))
        missing = length - sum(counts[phase])
        while missing:
            takers = [c for c in by_remainder if row[c] and (limits[c] is None or used[c] < limits[c])][:missing]
            if not takers:
                raise _Lacking(phase, missing)
            for c in takers:
                counts[phase][c] += 1
                used[c] += 1
            missing -= len(takers)
    return counts


def _lacks(
    phase: Phase,
    lacking: _Lacking,
    weights: Sequence[Sequence[Fraction]],
    components: Sequence[Available],
    sequence_length: int,
) -> str:
    there = ", ".join(
        f"{component.name} {component.limit * sequence_length:,}"
        for component, weight in zip(components, weights[lacking.phase], strict=True)
        if weight and component.limit is not None  # one without a limit never lacks
    )
    return (
        f"max_tokens is more than data.max_epochs allow: phase {phase.name} lacks "
        f"{lacking.sequences * sequence_length:,} tokens; of its components the whole run may read {there}: raise "
        "data.max_epochs (or a component's own), give more components a weight in it, or lower max_tokens"
    )
