"""Times over whole outputs, from the times of steps at some lengths.

A step's time depends on the number of cached tokens alone and is nearly linear in it, so steps are measured at lengths
half an octave apart, and times between them interpolated linearly (the trapezoid rule).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evaluation.efficiency.bytes_model import MODULES

SHORTEST, BETWEEN = 256, 64  # the first measured length above 1, and what lengths are rounded to


@dataclass(frozen=True)
class DecodedCell:
    """A cell that was really decoded, to check the interpolation: seconds of a layer over the output.

    Attributes:
        prefix, output: tokens before, and decoded.
        decoded: by replays of one captured step, every token after the other.
        interpolated: from the steps at the measured lengths.
    """

    prefix: int
    output: int
    decoded: float
    interpolated: float


@dataclass(frozen=True)
class Steps:
    """Seconds of one layer's step at one batch size.

    Attributes:
        lengths: cached tokens, the new one included; ascending.
        attention: the attention kernels, at each length.
        layer: the whole attention layer's step as decoding runs it, at each length.
        queries: all query projections, as decoding runs them.
        cache: storing keys and values.
        ways: the query projections in other ways, by name.
        decoded: the check, if one was made.
    """

    lengths: Sequence[int]
    attention: Sequence[float]
    layer: Sequence[float]
    queries: float
    cache: float
    ways: Mapping[str, float] = field(default_factory=dict)
    decoded: DecodedCell | None = None

    def of_output(self, prefix: int, output: int) -> dict[str, float]:
        """Return the seconds by module, and `total` and `layer`, of decoding `output` tokens after `prefix`."""
        found = {
            "queries": output * self.queries,
            "cache": output * self.cache,
            "attention": self._sum(self.attention, prefix, output),
        }
        found["total"] = sum(found[module] for module in MODULES)
        return found | {"layer": self._sum(self.layer, prefix, output)}

    def _sum(self, seconds: Sequence[float], prefix: int, output: int) -> float:
        tokens = np.arange(prefix + 1, prefix + output + 1)
        return float(np.interp(tokens, self.lengths, seconds).sum())


def measured_lengths(longest: int) -> list[int]:
    """Return lengths from 1 to `longest`, about half an octave apart."""
    steps = range(2 * max(0, math.ceil(math.log2(longest / SHORTEST))) + 1)
    between = (BETWEEN * round(SHORTEST * 2 ** (step / 2) / BETWEEN) for step in steps)
    return sorted({1, *(length for length in between if length < longest), longest})
