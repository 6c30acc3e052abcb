"""Every kernel at sizes that fill a GPU: alone, next to matrix products, and next to seven processes of its kind.

What `python -m benchmarks.soak.run` does, in a minute in all; --soak-seconds=60 gives each kernel a minute beside each.
"""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.soak.cases import CASES, repeated
from benchmarks.soak.processes import difference, out_of_bounds
from benchmarks.soak.run import IN_ALL, KIND, PRODUCTS, Soak

pytestmark = pytest.mark.gpu(needs="CUDA")
NEIGHBOURS = (PRODUCTS, KIND)


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    started = Soak(torch.device("cuda"))
    started.compile(list(CASES))
    yield started
    started.close()


@pytest.mark.parametrize("name", CASES)
def test_a_second_pass_gives_the_results_of_the_first(name):
    """Compiles for the soak, in the processes that compile for all tests."""
    run = repeated(name, torch.device("cuda"))
    first = {result: x.detach().clone() for result, x in run().items()}
    assert all(x.isfinite().all() for x in first.values())
    second = {result: difference(x, first[result]) for result, x in run().items()}
    assert not out_of_bounds(second, CASES[name].bounds)


@pytest.mark.soak
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("name", CASES)
def test_results_stay_what_they_were_beside(soak, name, neighbours, pytestconfig):
    seconds = pytestconfig.getoption("soak_seconds") or IN_ALL / (len(CASES) * len(NEIGHBOURS))
    assert not soak.beside(neighbours, name, seconds).faults
