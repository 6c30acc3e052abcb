"""Whether two variants differ by more than their seeds do."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.stats import t as student

CONFIDENCE = 0.95
PAIRED_FROM = 3  # common seeds

RULE = (
    f"Two variants with {PAIRED_FROM} seeds in common or more are compared seed by seed: the mean difference against "
    f"Student's t at {CONFIDENCE:.0%}, two-sided, times its standard error (t = {student.ppf(0.975, 2):.2f} for three "
    "seeds). With fewer, the standard deviation over seeds is that of all variants of two seeds or more together, with "
    "its degrees of freedom, or the larger one of the two themselves. What nothing was drawn for (no tokens of "
    "adaptation) has no noise of its own. A difference within the noise is undecided, and so is one whose noise is not "
    "known. Each pair is judged alone."
)


@dataclass(frozen=True)
class Sample:
    """What a variant gave: a value for each seed. exact: no seed matters."""

    values: Mapping[int, float]
    exact: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; 0 where no seed matters, None for a single seed."""
        if self.exact:
            return 0.0
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Noise:
    """The standard deviation over seeds of all variants together; None where no variant has two seeds."""

    deviation: float | None
    freedom: int


@dataclass(frozen=True)
class Comparison:
    """How far the second sample's mean lies above the first's. margin: what a difference has to exceed to be one; None
    where the noise is not known. seeds: that both have, where they are compared seed by seed, else 0."""

    difference: float
    margin: float | None
    seeds: int

    @property
    def decided(self) -> bool:
        return self.margin is not None and abs(self.difference) > self.margin


def pooled(samples: Iterable[Sample]) -> Noise:
    """The noise of all samples that have two seeds or more and are not exact."""
    several = [sample for sample in samples if not sample.exact and len(sample.values) > 1]
    freedom = sum(len(sample.values) - 1 for sample in several)
    if not freedom:
        return Noise(None, 0)
    squares = sum(sample.deviation**2 * (len(sample.values) - 1) for sample in several)
    return Noise(math.sqrt(squares / freedom), freedom)


def compare(first: Sample, second: Sample, noise: Noise) -> Comparison:
    """`second` against `first`, by `RULE`."""
    if first.exact and second.exact:
        return Comparison(second.mean - first.mean, 0.0, 0)
    differences = _by_seed(first, second)
    if len(differences) >= PAIRED_FROM:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return Comparison(statistics.fmean(differences), _quantile(len(differences) - 1) * error, len(differences))
    difference = second.mean - first.mean
    if noise.deviation is None:
        return Comparison(difference, None, 0)
    own = [each.deviation or 0.0 for each in (first, second)]
    runs = sum(1 / len(each.values) for each in (first, second) if not each.exact)
    error = max(noise.deviation, *own) * math.sqrt(runs)
    return Comparison(difference, _quantile(noise.freedom) * error, 0)


def _by_seed(first: Sample, second: Sample) -> list[float]:
    """The differences of seeds that both have; what is exact has every seed."""
    seeds = [set(each.values) for each in (first, second) if not each.exact]
    common = sorted(set.intersection(*seeds))
    a, b = (each.values if not each.exact else dict.fromkeys(common, each.mean) for each in (first, second))
    return [b[seed] - a[seed] for seed in common]


def _quantile(freedom: int) -> float:
    return float(student.ppf((1 + CONFIDENCE) / 2, freedom))
