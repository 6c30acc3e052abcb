"""The soak's processes, with stand-ins for kernels that are right, differ, die or hang."""

import itertools
import os
import time

import pytest
import torch

from benchmarks.soak import processes
from benchmarks.soak import run as soak_module
from benchmarks.soak.cases import CASES, repeated
from benchmarks.soak.processes import Repeated, difference
from benchmarks.soak.run import ALONE, KIND, PRODUCTS, Outcome, Soak, chosen, report

CPU = torch.device("cpu")


def stand_in(name, device):
    """Return a kernel that counts its passes from 1; the first is the reference."""
    count = itertools.count(1)

    def run():
        number = next(count)
        found = {"out": torch.ones(8), "dq": torch.ones(8)}
        if name == "differs" and number == 4:
            found["out"][3] = 1.5
        elif name == "not a number" and number == 3:
            found["dq"][0] = torch.nan
        elif name == "adds in any order":
            found["dq"] += 1e-6 * number
        elif name == "faults" and number == 6:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might")
        elif name == "is killed" and number == 2:
            os._exit(9)
        elif name == "hangs" and number == 2:
            time.sleep(60)
        elif name == "is wrong from the first":
            found["out"][0] = torch.inf
        return found

    return run


@pytest.fixture(scope="module")
def soak():
    """Return a soak of two forked processes; forking is safe, as they have computed nothing yet."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(soak_module, "GRACE", 0.3)
        monkeypatch.setattr(soak_module, "Products", lambda context, device: processes.Products(context, device, 16))
        started = Soak(CPU, stand_in, lambda name: {"dq": 1e-3}, processes=2, start="fork")
        yield started
        started.close()


def test_what_is_right_is_right_beside_everything(soak):
    soak.compile(["right", "adds in any order"])
    for neighbours, number in ((ALONE, 1), (PRODUCTS, 1), (KIND, 2)):
        outcome = soak.beside(neighbours, "right", 0.05)
        assert outcome.faults == []
        assert [len(outcome.seen), outcome.worst[1]] == [number, 0.0]
        assert all(one.passes > 1 for one in outcome.seen)
    assert soak.beside(ALONE, "adds in any order", 0.0).faults == []


def test_matrices_are_multiplied_while_a_kernel_runs_and_not_after(soak):
    soak.beside(PRODUCTS, "right", 0.0)
    before = soak._products.count.value
    soak.beside(PRODUCTS, "right", 0.1)
    assert soak._products.count.value > before
    time.sleep(0.1)
    before = soak._products.count.value
    soak.beside(ALONE, "right", 0.1)
    assert soak._products.count.value == before


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("differs", "2 of 2 processes, from pass 3 on: out 1.8e-01 over 0e+00"),
        ("not a number", "2 of 2 processes, from pass 2 on: dq inf over 1e-03"),
        ("faults", "2 of 2 processes, after 4 passes: CUDA error: an illegal memory access was encountered"),
        ("is killed", "2 of 2 processes, after 0 passes: ended with status 9"),
        ("is wrong from the first", "1 of 1 processes, after 0 passes: out not finite in the first pass"),
    ],
)
def test_a_fault_is_named_with_the_passes_until_then_and_the_next_kernel_runs(soak, name, fault):
    outcome = soak.beside(KIND, name, 0.02)
    assert outcome.faults == [fault]
    assert outcome.cells()[-1] == fault
    assert not soak.beside(KIND, "right", 0.0).faults


def test_a_kernel_that_does_not_come_back_is_ended(soak):
    assert soak.beside(ALONE, "hangs", 0.0).faults == ["1 of 1 processes, after 0 passes: did not come back within 0 s"]


def test_several_kernels_at_once_have_an_outcome_each(soak):
    outcomes = soak.together(["right", "faults"], 0.05)
    assert [outcome.kernel for outcome in outcomes] == ["right", "faults"]
    assert not outcomes[0].faults
    assert "after 4 passes: CUDA error" in outcomes[1].faults[0]
    outcomes = soak.together(["is wrong from the first", "right"], 0.0)
    assert [bool(outcome.faults) for outcome in outcomes] == [True, False]


def test_a_fault_while_compiling_does_not_end_the_others(soak):
    soak.compile(["is wrong from the first", "right", "right", "is wrong from the first", "right"])
    assert not soak.beside(KIND, "right", 0.0).faults


def test_the_report_has_a_line_for_each_outcome():
    seen = (Repeated(7, {"dq": 2e-6}), Repeated(8, {"dq": 3e-6}))
    outcomes = [
        Outcome("attention", KIND, 1.0, seen, {"dq": 1e-4}),
        Outcome("attention", PRODUCTS, 1.0, (Repeated(3, fault="an | error"),), {}),
    ]
    text = report(outcomes)
    assert "1 of 2 right" in text
    assert "| attention | its own kind | 15 | 1.0 | dq 3.0e-06 | right |" in text
    assert "| attention | matrix products | 3 | 1.0 | none | 1 of 1 processes, after 3 passes: an / error |" in text


def test_bits_are_compared_and_nan_is_infinitely_far():
    assert difference(torch.tensor([0.0, 2.0]), torch.tensor([-0.0, 2.0])) == 0.0
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])) > 0.0
    assert difference(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == torch.inf


def test_kernels_are_chosen_by_patterns():
    assert chosen(["attention D128, p*", "slots"]) == ["attention D128, pruned", "attention D128, packed", "slots"]
    with pytest.raises(ValueError, match="matches none"):
        chosen(["attention D512"])


@pytest.mark.parametrize("name", ["attention D64, packed", "decoding D128, gated", "slots", "liger step, hgrn2, late"])
def test_a_case_gives_the_same_results_again(name):
    run = repeated(name, CPU)
    first, second = run(), run()
    assert CASES[name].bounds.keys() <= first.keys()
    assert all(x.isfinite().all() and torch.equal(x, second[key]) for key, x in first.items())
