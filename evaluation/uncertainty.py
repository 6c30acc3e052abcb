"""Means with their standard errors, and paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict


class JsonEstimate(TypedDict):
    """An estimate in a report."""

    value: float
    standard_error: float | None


class Estimate(NamedTuple):
    """A mean and its standard error, which is None for a single value."""

    value: float
    standard_error: float | None

    def as_json(self) -> JsonEstimate:
        """Return the estimate for a report."""
        return {"value": self.value, "standard_error": self.standard_error}


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values and its standard error."""
    number = len(values)
    center = math.fsum(values) / number
    if number == 1:
        return Estimate(center, None)
    return Estimate(center, math.sqrt(math.fsum((value - center) ** 2 for value in values) / (number - 1) / number))


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Return the mean of `values[i] - base[i]`; what both have in common, such as a hard text, leaves no trace."""
    return mean([value - other for value, other in zip(values, base, strict=True)])


def differences_to_first(values: Mapping[str, Sequence[float]]) -> dict[str, JsonEstimate]:
    """Return the paired difference of each list of values but the first to the first."""
    first, *others = values
    return {other: paired_difference(values[other], values[first]).as_json() for other in others}


def mean_of_means(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent estimates."""
    center = math.fsum(each.value for each in estimates) / len(estimates)
    return Estimate(center, pooled([each.standard_error for each in estimates]))


def pooled(errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a mean of independent values, or None if one is unknown (a single document)."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(errors) if len(known) == len(errors) else None


def is_decided(difference: Estimate) -> bool:
    """Return whether a difference is at least two standard errors from nothing."""
    return difference.standard_error is not None and abs(difference.value) >= 2 * difference.standard_error > 0
