"""Check the gated recurrence against float64 before it is timed: relative error in the 2-norm, of each tensor.

The reference is the operation itself in float64, where it uses its chunked form in PyTorch; that form is first checked
against the definition, token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.comparison_run import Errors
from benchmarks.measuring.timing import relative_error
from benchmarks.recurrence.recurrence_peers import IMPLEMENTATIONS, PEERS, Case, Problem, random_problem, step_ours
from kernels.gated_recurrence import gated_recurrence_reference, gated_slot_attention_reference

NAMES = ("out", "final_state", "dq", "dk", "dv", "dslots", "dlog_decay", "dinitial_state")
BOUNDS = dict.fromkeys(NAMES, 5e-3) | {"dlog_decay": 1.5e-2}  # bfloat16, at every gate and size
LONG = 65536


def _small(length: int, key_dim: int, value_dim: int, gate: str = "key", strength: float = 1.0, **options) -> Case:
    return Case(2, 4, length, key_dim, value_dim, gate, strength, initial_state=True, **options)


def _packed(gate: str, strength: float = 1 / 16) -> Case:
    bounds = (0, 1, 300, 300, 557, 1000)
    return Case(1, 8, 1000, 64, 64, gate, strength, key_heads=2, documents=bounds, initial_state=True)


QUICK_CHECKS = (
    *(_small(1000, 64, 64, "key", strength) for strength in (1 / 16, 30.0)),
    *(_small(1024, 128, 128, "key", strength) for strength in (1 / 16, 30.0)),
    _small(1000, 64, 64, "head", 1 / 16),
    _small(1000, 64, 64, "slots", 1 / 16),
    _packed("key"),
)
CHECKS = (
    *QUICK_CHECKS,
    *(_small(1000, 64, 64, "key", strength) for strength in (1.0, 3.0)),
    *(_small(1024, 128, 128, "key", strength) for strength in (1.0, 3.0)),
    _small(1000, 64, 64, closed=0.02),
    _small(1000, 64, 64, key_heads=1),
    _small(1, 64, 64),
    _small(257, 256, 256),
    _small(1000, 96, 96),
    *(_small(1000, 128, 64, "value", strength) for strength in (1 / 16, 30.0)),
    *(_small(1024, 128, 128, "head", strength) for strength in (1 / 16, 1.0, 30.0)),
    _small(1000, 64, 64, "head", closed=0.02),
    *(_small(1000, 128, 128, "slots", strength) for strength in (1 / 16, 1.0, 30.0)),
    _packed("key", 30.0),
    _packed("head"),
    _packed("slots"),
)
LONG_CHECKS = (
    *(Case(1, 2, LONG, 64, 64, "key", strength, initial_state=True) for strength in (1 / 16, 1.0, 30.0)),
    Case(1, 2, LONG, 128, 128, "key", 1 / 16, initial_state=True),
    Case(1, 2, LONG, 64, 64, "head", 1 / 16, initial_state=True),
    Case(1, 2, LONG, 64, 64, "slots", 1 / 16, initial_state=True),
)
STEP_CHECKS = tuple(
    Case(2, 8, length, 128, 128, gate, 1.0, key_heads=4, initial_state=True)
    for gate in ("key", "value", "head")
    for length in (1, 7)
)


def shorten(case: Case, longest: int) -> Case:
    """Return the case with at most `longest` tokens per row."""
    bounds = None if case.documents is None else tuple(min(bound, longest) for bound in case.documents)
    return replace(case, length=min(case.length, longest), documents=bounds)


def _results(
    problem: Problem, call: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], dtype: torch.dtype | None = None
) -> dict[str, tuple[Tensor, ...]]:
    """Return by name out, the final states, and the gradients of all inputs and initial states."""
    tensors = (*problem.inputs.values(), *problem.initial_states)
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    out, finals = call(*leaves)
    given = [d.to(x.dtype) for d, x in zip((problem.d_out, *problem.d_finals), (out, *finals), strict=True)]
    gradients = torch.autograd.grad((out, *finals), leaves, given)
    number = len(problem.inputs)
    found = {f"d{name}": (gradient,) for name, gradient in zip(problem.inputs, gradients[:number], strict=True)}
    found["dinitial_state"] = gradients[number:]
    return {"out": (out.detach(),), "final_state": tuple(x.detach() for x in finals), **found}


def _compare(found: dict[str, tuple[Tensor, ...]], exact: dict[str, tuple[Tensor, ...]]) -> Errors:
    """Return the largest error among the tensors of each name."""
    pairs = {name: zip(found[name], exact[name], strict=True) for name in NAMES if found.get(name)}
    return {name: max(relative_error(a, b) for a, b in pair) for name, pair in pairs.items()}


def errors_of_ours(case: Case, device: torch.device, budgets: Sequence[int | None] = (None,)) -> list[Errors]:
    """Return the errors of out, the final states and every gradient, for each memory budget."""
    problem = random_problem(case, device)
    exact = _results(problem, problem.call_ours, torch.float64)
    calls = [partial(problem.call_ours, memory_budget=budget) for budget in budgets]
    return [_compare(_results(problem, call), exact) for call in calls]


@torch.no_grad()
def errors_of_step(case: Case, device: torch.device) -> Errors:
    """Return the errors of the output and of the state updated in place."""
    problem = random_problem(case, device)
    tensors = (*problem.inputs.values(), *problem.initial_states)
    out, (final,) = problem.call_ours(*(x.double() for x in tensors))
    (state,) = problem.initial_states
    found = step_ours(problem)()
    return {"out": relative_error(found, out), "final_state": relative_error(state, final)}


def errors_of(name: str, case: Case, device: torch.device) -> Errors:
    """Return the errors of one of `IMPLEMENTATIONS`, without states. Passes on the peer's exceptions."""
    problem = random_problem(replace(case, initial_state=False), device)
    out, *gradients = IMPLEMENTATIONS[name](problem).forward_backward()
    leaves = [x.detach().double().requires_grad_() for x in problem.inputs.values()]
    exact_out, _ = problem.call_ours(*leaves)
    exact = torch.autograd.grad(exact_out, leaves, problem.d_out.double())
    names = ("out", *(f"d{name}" for name in problem.inputs))
    errors = {}
    for tensor, found, right in zip(names, (out, *gradients), (exact_out.detach(), *exact), strict=True):
        # If the gate was expanded to each channel, sum the gradient over channels.
        errors[tensor] = relative_error(found if found.ndim == right.ndim else found.sum(-1), right)
    return errors


PEER_CHECKS = tuple(
    (name, Case(1, 16, 1024, 128, 128, gate, strength))
    for gate, names in PEERS.items()
    for name in names
    for strength in (1 / 16, 30.0)
)


def check_definition(device: torch.device) -> float:
    """Return the largest error of the float64 form against the definition.

    Raises:
        RuntimeError: it is over 1e-9.
    """
    worst = 0.0
    for gate in ("key", "value", "head", "slots"):
        for strength, documents in ((1.0, None), (30.0, (0, 1, 70, 70, 150))):
            case = Case(
                1, 4, 150, 24, 40, gate, strength, key_heads=2, slots=16, documents=documents, initial_state=True
            )
            problem = random_problem(case, device)
            found = _results(problem, problem.call_ours, torch.float64)
            exact = _results(problem, partial(_definition, problem), torch.float64)
            errors = _compare(found, exact)
            if not max(errors.values()) < 1e-9:
                name = max(errors, key=errors.get)
                raise RuntimeError(f"the float64 form, {case.gates}, is off by {errors[name]:.1e} in {name}")
            worst = max(worst, *errors.values())
    return worst


def _definition(problem: Problem, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs, states = tensors[: len(problem.inputs)], tensors[len(problem.inputs) :]
    options = {"scale": problem.scale, "cu_seqlens": problem.cu_seqlens}
    if problem.case.gate == "slots":
        return gated_slot_attention_reference(*inputs, initial_state=states, **options)
    axis = "value" if problem.case.gate == "value" else "key"
    out, final = gated_recurrence_reference(*inputs, decay_axis=axis, initial_state=states[0], **options)
    return out, (final,)
