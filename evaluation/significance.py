"""Test whether two variants of a training differ by more than their seeds."""

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
    "its degrees of freedom, or the larger one of the two themselves. A difference within the noise is undecided, and "
    "so is one whose noise is not known. Each pair is judged alone."
)


@dataclass(frozen=True)
class Sample:
    """A variant's results: a value for each seed. exact: the result does not depend on the seed."""

    values: Mapping[int, float]
    exact: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; 0 if exact, None for a single seed."""
        if self.exact:
            return 0.0
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Noise:
    """The pooled standard deviation over seeds of all variants; None if no variant has two seeds."""

    deviation: float | None
    freedom: int


@dataclass(frozen=True)
class Comparison:
    """Difference of the second sample's mean and the first's.

    margin: the difference is significant above it; None if the noise is unknown. seeds: number of common seeds if
    compared seed by seed, else 0.
    """

    difference: float
    margin: float | None
    seeds: int

    @property
    def decided(self) -> bool:
        return self.margin is not None and abs(self.difference) > self.margin


def pooled(samples: Iterable[Sample]) -> Noise:
    """Return the pooled noise of all samples with two seeds or more that are not exact."""
    several = [sample for sample in samples if not sample.exact and len(sample.values) > 1]
    freedom = sum(len(sample.values) - 1 for sample in several)
    if not freedom:
        return Noise(None, 0)
    squares = sum(statistics.variance(sample.values.values()) * (len(sample.values) - 1) for sample in several)
    return Noise(math.sqrt(squares / freedom), freedom)


def compare(first: Sample, second: Sample, noise: Noise) -> Comparison:
    """Compare `second` with `first`, by `RULE`."""
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
    """Return the differences at common seeds; an exact sample has every seed."""
    seeds = [set(each.values) for each in (first, second) if not each.exact]
    common = sorted(set.intersection(*seeds))
    a, b = (each.values if not each.exact else dict.fromkeys(common, each.mean) for each in (first, second))
    return [b[seed] - a[seed] for seed in common]


def _quantile(freedom: int) -> float:
    return float(student.ppf((1 + CONFIDENCE) / 2, freedom))
