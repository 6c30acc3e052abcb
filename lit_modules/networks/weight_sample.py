"""A cheap fingerprint of a model's weights: some rows of each, rounded to bfloat16."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

SAMPLED_ROWS = 4
SMALLEST = int(torch.tensor(torch.finfo(torch.float16).smallest_normal).bfloat16().view(torch.int16))


def sampled_fingerprint(weights: Iterable[Tensor]) -> str:
    """Return a hash of `SAMPLED_ROWS` rows of each weight, in the order given.

    It is the same in float32 and bfloat16, and in float16 if the weights are stored in 16 bits.
    """
    found = hashlib.sha256()
    for weight in weights:
        matrix = weight.detach() if weight.ndim > 1 else weight.detach()[None]
        found.update(rounded(matrix[:: -(-len(matrix) // SAMPLED_ROWS)]).data)
    return found.hexdigest()


def rounded(numbers: Tensor) -> np.ndarray:
    """Return the bits of `numbers` in bfloat16 as int16; 0 for subnormals of float16, which it stores less exactly."""
    bits = numbers.bfloat16().contiguous().view(torch.int16).cpu().numpy()
    return bits * ((bits & 0x7FFF) >= SMALLEST)
