"""What is measured: policies, treatments, bits, equal bytes, and the order of importance.

A cache has `reserved` slots in 16 bits by its policy, and 128 more for tokens that wait for a full block. `log_sparse`
of W = reserved / 3 fills 2W to 3W - 1 of them, in the long run 5/6. So three matches:

| match | what is equal |
|---|---|
| `slots` | the memory that is allocated: the same `reserved` for every policy, with the same treatment and bits |
| `tokens` | the tokens that keep 16 bits on average: 5/6 of the slots for the others |
| `bytes` | the bytes at the end of a text, of another cache: the one that `against` names |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lit_modules.networks.caches import CacheSettings, TensorSettings
from lit_modules.networks.caches.settings import BLOCK, BY_CONTENT

FIRST = 4
"""First tokens that `first_and_recent` keeps."""

RESERVED = (192, 128, 256)
"""Slots in 16 bits, most important first."""

FULL = "full"
SPARSE, PARTIAL, RECENT, FIRST_AND_RECENT, PROMPT, GATE, HEAVY = (
    "log_sparse", "partial_log_sparse", "recent", "first_and_recent", "prompt_attention", "forget_gate",
    "heavy_hitters",
)  # fmt: skip
QUANTIZED = (SPARSE, RECENT, FIRST_AND_RECENT, PROMPT, GATE, PARTIAL)
EVICTING = (SPARSE, FIRST_AND_RECENT, HEAVY, PROMPT, GATE)
EVICTED = "evicted"

PLAIN: dict[str, Any] = {"groups_along": "tokens"}
KEYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "hadamard": {"transform": "hadamard"},
    "oscar": {"transform": "rotation", "clip": 0.96},
    "balanced": {"transform": "balanced", "clip": 0.96},
    "balanced, keys' clip 0.92": {"transform": "balanced", "clip": 0.92},
    "balanced, keys' clip 1": {"transform": "balanced"},
    "balanced, keys along tokens": {"transform": "balanced", "groups_along": "tokens"},
    "ordered": {"transform": "ordered", "groups_along": "tokens", "high_channels": 16},
    "ordered, 8 channels": {"transform": "ordered", "groups_along": "tokens", "high_channels": 8},
}
KEYS |= {
    f"{name}, debiased": KEYS[name] | {"debias": True}
    for name in ("plain", "balanced", "ordered", "ordered, 8 channels")
}
VALUES: dict[str, dict[str, Any]] = {
    "plain": {}, "hadamard": {"transform": "hadamard"}, "oscar": {"transform": "rotation", "clip": 0.92},
}  # fmt: skip
BALANCED_VALUES = {"transform": "balanced", "clip": 0.92}
MAIN = ("plain", "balanced")
"""Treatments that are measured for all policies and reserved lengths; the others for some."""

KIVI_AT_BALANCED = "as balanced"
"""The match of KiVi with as many bytes as first_and_recent has with balanced maps and the same reserved length."""

KIVI_AT_BEST = "as best"
"""The match of KiVi with as many bytes as BEST."""

SPARSE_AT_EVICTED = "as quantized"
"""The match of an eviction with as many bytes as log_sparse has with 2 bits and the same reserved length."""


@dataclass(frozen=True)
class Sizes:
    """What equal bytes depend on: tokens of a text, at whose end they are equal, and the heads that are cached."""

    length: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def share_of_keys(self) -> float:
        """The part of a token's numbers that keys are."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return keys / (keys + values)


@dataclass(frozen=True)
class Case:
    """One cache.

    Attributes:
        policy: which tokens keep 16 bits.
        treatment: of the others: a key of KEYS, or EVICTED.
        bits: of the others; 0 where they are evicted, 16 of the full cache.
        reserved: slots in 16 bits by which the case is listed.
        match: what it has in common with the others of its `reserved`, see the module.
        tier: its importance; 0 is measured first.
        asked: whether it is asked for facts, too.
    """

    policy: str
    treatment: str
    bits: int
    reserved: int
    match: str = "slots"
    tier: int = 0
    asked: bool = False

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """What a result is found by."""
        return self.policy, self.treatment, self.bits, self.reserved, self.match

    @property
    def name(self) -> str:
        """A line for the log."""
        return f"{self.policy}, {self.treatment}, {self.bits} bits, {self.reserved} ({self.match})"

    @property
    def is_fitted(self) -> bool:
        """Whether it needs the file of job=calibrate."""
        return self.treatment.startswith(("oscar", "balanced", "ordered"))

    def slots(self, sizes: Sizes) -> int:
        """Return the tokens that keep 16 bits by the policy, at most."""
        if self.match == "tokens":
            return 5 * self.reserved // 6
        if self.match == KIVI_AT_BALANCED:
            return self._slots_for(Case(FIRST_AND_RECENT, "balanced", self.bits, self.reserved), sizes)
        if self.match == KIVI_AT_BEST:
            return self._slots_for(BEST, sizes)
        if self.match == SPARSE_AT_EVICTED:
            return self._slots_for(Case(SPARSE, "plain", 2, self.reserved), sizes)
        return self.reserved

    def bits_per_number(self, slots: int, sizes: Sizes) -> float:
        """Return the bits for each number of a text's keys and values, with all slots counted."""
        if self.bits == 0:
            waiting = BLOCK if self.policy in BY_CONTENT else 1
            return 16 * (slots + waiting) / sizes.length
        keys, values = (
            TensorSettings(bits=self.bits, **plain).format_of(width).bits_per_number(width)
            for plain, width in ((self._keys(), sizes.key_dim), (self._values(), sizes.value_dim))
        )
        packed = keys * sizes.share_of_keys + values * (1 - sizes.share_of_keys)
        blocks = (sizes.length - slots) // BLOCK
        return (16 * (slots + BLOCK) + packed * blocks * BLOCK) / sizes.length

    def _slots_for(self, other: "Case", sizes: Sizes) -> int:
        """Return the most slots with no more bits than another case."""
        bits, low, high = other.bits_per_number(other.reserved, sizes), 1, sizes.length
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bits_per_number(middle, sizes) <= bits else (low, middle)
        return low

    def settings(self, sizes: Sizes, rotations: str | None) -> CacheSettings:
        """Return the settings of the cache; `rotations` is the file of job=calibrate."""
        if self.bits == 16:
            return CacheSettings.of({"keys": {"bits": 16}, "values": {"bits": 16}})
        slots = self.slots(sizes)
        window = {SPARSE: slots // 3, PARTIAL: slots // 3, FIRST_AND_RECENT: slots - FIRST}.get(self.policy, slots)
        keep = SPARSE if self.policy == PARTIAL else self.policy
        keys = {"keep": keep, "bits": self.bits, **self._keys()}
        values = {"keep": keep, "bits": self.bits, **self._values()}
        if self.policy == PARTIAL:
            values |= {"keep": RECENT, "window": slots}
        plain: dict[str, Any] = {"keys": keys, "values": values, "window": window}
        if self.policy == FIRST_AND_RECENT:
            plain["first"] = FIRST
        if self.is_fitted:
            plain["rotations"] = rotations
        return CacheSettings.of(plain)

    def _keys(self) -> dict[str, Any]:
        return KEYS.get(self.treatment, {})

    def _values(self) -> dict[str, Any]:
        is_balanced = self.treatment.startswith(("balanced", "ordered"))
        return BALANCED_VALUES if is_balanced else VALUES.get(self.treatment, {})


FULL_CASE = Case(FULL, "none", 16, 0, "full", asked=True)
BEST = Case(PROMPT, "balanced, debiased", 2, 192, asked=True)
"""conf/cache/best.yaml."""
KIVI_OF_BEST = Case(RECENT, "plain", 2, BEST.reserved, KIVI_AT_BEST, asked=True)


def cases(has_gates: bool) -> list[Case]:
    """Return all cases of a model, most important first.

    Args:
        has_gates: whether the model has forget gates, which a policy reads.
    """
    found = dict.fromkeys(_in_order())
    kept = [case for case in found if has_gates or case.policy != GATE]
    first: dict[tuple, Case] = {}
    for case in kept:  # what is in two lists has the tier of the first
        first.setdefault(case.key, case)
    return sorted(first.values(), key=lambda case: case.tier)


def _in_order() -> Iterator[Case]:
    yield from (FULL_CASE, BEST, KIVI_OF_BEST)
    main = RESERVED[0]
    for treatment in MAIN:
        for policy in QUANTIZED[:5]:
            yield Case(policy, treatment, 2, main, asked=True)
    yield Case(RECENT, "plain", 2, main, KIVI_AT_BALANCED, asked=True)
    yield Case(RECENT, "plain, debiased", 2, main, asked=True)
    yield Case(FIRST_AND_RECENT, "ordered", 2, main, asked=True)
    for treatment in ("ordered, 8 channels", "ordered"):
        yield Case(PROMPT, f"{treatment}, debiased", 2, main, asked=True)
    yield Case(PROMPT, "ordered, 8 channels", 2, main, asked=True)
    # As many bits as BEST where heads have 128 channels.
    yield Case(PROMPT, "ordered, 8 channels, debiased", 2, 64, asked=True)
    for policy in EVICTING:
        yield Case(policy, EVICTED, 0, main, "slots", 0, asked=True)
        yield Case(policy, EVICTED, 0, main, SPARSE_AT_EVICTED, 0, asked=policy != GATE)
    for treatment in MAIN:
        for policy in (RECENT, FIRST_AND_RECENT, GATE):
            yield Case(policy, treatment, 2, main, "tokens", 1)
    yield Case(FIRST_AND_RECENT, "hadamard", 2, main, tier=1, asked=True)
    yield Case(FIRST_AND_RECENT, "oscar", 2, main, tier=1, asked=True)
    for treatment in KEYS:
        yield Case(FIRST_AND_RECENT, treatment, 2, main, tier=1)
    for reserved in RESERVED[1:]:
        for treatment in MAIN:
            for policy in QUANTIZED[:5]:
                yield Case(policy, treatment, 2, reserved, tier=2)
        yield Case(RECENT, "plain", 2, reserved, KIVI_AT_BALANCED, tier=2)
        for policy in EVICTING[:4]:
            yield Case(policy, EVICTED, 0, reserved, tier=2)
    for treatment in MAIN:
        yield Case(PARTIAL, treatment, 2, main, tier=3)
        for policy in QUANTIZED[:5]:
            yield Case(policy, treatment, 4, main, tier=3, asked=treatment == "plain" and policy != GATE)
    for treatment in ("hadamard", "oscar"):
        for policy in QUANTIZED[:5]:
            yield Case(policy, treatment, 2, main, tier=4)
    for reserved in RESERVED:
        for bits in (2, 4):
            for treatment in ("plain", "hadamard", "oscar", "balanced"):
                for policy in QUANTIZED:
                    yield Case(policy, treatment, bits, reserved, tier=5)
