"""Inputs of selective attention."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def make() -> Callable[..., dict[str, Tensor]]:
    """make(...) -> q, k, v and, with gates, decay, as a dict.

    whole: q and k are small whole numbers, whose scores are exact and often equal.
    """

    def inputs(
        batch: int = 1,
        keys: int = 40,
        heads: tuple[int, int, int] = (4, 2, 1),
        dims: tuple[int, int] = (16, 20),
        *,
        dtype: torch.dtype = torch.float64,
        gates: bool = False,
        whole: bool = False,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        q, k = normal(batch, 1, heads[0], dims[0]), normal(batch, keys, heads[1], dims[0])
        if whole:
            q, k = q.round(), k.round()
        found = {"q": q.to(dtype), "k": k.to(dtype), "v": normal(batch, keys, heads[2], dims[1]).to(dtype)}
        if gates:
            sums = -torch.rand(batch, keys, heads[0], generator=generator, dtype=torch.float64).cumsum(1)
            found["decay"] = sums.to(torch.promote_types(dtype, torch.float32))
        return found

    return inputs
