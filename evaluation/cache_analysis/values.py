"""What was measured in each head of each layer and sequence, and its means."""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


class Values:
    """What was measured: for each sequence and layer a dictionary of arrays `[heads, ...]`."""

    def __init__(self) -> None:
        self.sequences: list[dict[int, dict[Hashable, Array]]] = []

    def begin_sequence(self) -> None:
        """Begin the next sequence."""
        self.sequences.append({})

    def add(self, layer: int, found: Mapping[Hashable, Tensor]) -> None:
        """Add what was found in a layer of the current sequence: tensors `[heads, ...]`."""
        self.sequences[-1][layer] = {key: value.double().cpu().numpy() for key, value in found.items()}

    @property
    def layers(self) -> list[int]:
        """The measured layers."""
        return sorted(self.sequences[0])

    @property
    def keys(self) -> list[Any]:
        """What was measured, in the order of measuring."""
        return list(self.sequences[0][self.layers[0]])

    def by_layer(self, key: Hashable, of_heads: Callable[[Array], Array | float]) -> Array:
        """Return `[sequences, layers, ...]`: a layer's heads `[heads, ...]` reduced by a function."""
        return np.array([[of_heads(found[layer][key]) for layer in self.layers] for found in self.sequences])


def mean_of_heads(values: Array) -> Array | float:
    """Return the mean over heads of `[heads, ...]`."""
    return values.mean(0)


def relative_error(values: Array) -> float:
    """Return the root of the ratio of two sums over heads: `[heads, 2]` has squared errors and squared values."""
    error, whole = values.sum(0)
    return math.sqrt(error / whole) if whole else 0.0
