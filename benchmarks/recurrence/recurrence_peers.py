"""Implementations that gated_recurrence.py compares, behind one interface, and their problems.

Each takes a `Problem` and returns a `Call`. All are called at one scale, 1 / sqrt(K), in the one layout that all
accept. A peer that is not installed raises ImportError; one that does not support the problem raises its own exception.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.timing import BOTH, Call
from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step, gated_slot_attention

STRENGTHS = {1 / 16: "g / 16", 1.0: "g", 3.0: "3 g", 30.0: "30 g"}  # g = logsigmoid(N(0, 1))
GATES = {"key": "gate per channel", "value": "gate per value channel", "head": "gate per head", "slots": "slots"}


@dataclass(frozen=True)
class Case:
    """Sizes of a problem, and its gates.

    heads: of queries; key_heads of k, v and the gates, as many where None. gate: one of `GATES`. strength: what g is
    multiplied by. slots: where the gate is theirs. closed: the fraction of gates that is -inf. documents: bounds of
    those packed into the row. initial_state: whether there is one, zeros otherwise.
    """

    batch: int
    heads: int
    length: int
    key_dim: int
    value_dim: int
    gate: str = "key"
    strength: float = 1 / 16
    key_heads: int | None = None
    slots: int = 64
    closed: float = 0.0
    documents: tuple[int, ...] | None = None
    initial_state: bool = False

    def __str__(self) -> str:
        groups = "" if self.key_heads is None else f"/{self.key_heads}"
        slots = f" M{self.slots}" if self.gate == "slots" else ""
        return f"B{self.batch} H{self.heads}{groups} T{self.length} K{self.key_dim} V{self.value_dim}{slots}"

    @property
    def gates(self) -> str:
        """Describe the gates."""
        words = [GATES[self.gate], STRENGTHS[self.strength]]
        words += [f"{self.closed:.0%} closed"] * bool(self.closed)
        words += [f"{len(self.documents or ()) - 1} documents"] * bool(self.documents)
        return ", ".join(words)


@dataclass
class Problem:
    """Inputs of one call: the arguments in order, and the gradients of the results.

    inputs: q [B, T, H, K], k [B, T, Hk, K], v [B, T, Hk, V] and, where there are any, slots [B, T, Hk, M], bfloat16;
    log_decay [B, T, Hk, K, V or M] or [B, T, Hk], float32. initial_states: one, two for slots, or none. d_out: of the
    output. d_finals: of the final states, one or two.
    """

    case: Case
    inputs: dict[str, Tensor]
    initial_states: tuple[Tensor, ...]
    d_out: Tensor
    d_finals: tuple[Tensor, ...]
    cu_seqlens: Tensor | None

    @property
    def scale(self) -> float:
        return self.case.key_dim**-0.5

    def call_ours(self, *tensors: Tensor, **options: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call our public function on these inputs and then these initial states; return out and all final states."""
        inputs, states = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
        options |= {"scale": self.scale, "cu_seqlens": self.cu_seqlens}
        if self.case.gate == "slots":
            return gated_slot_attention(*inputs, initial_state=states or None, **options)
        options["decay_axis"] = "value" if self.case.gate == "value" else "key"
        out, final = gated_recurrence(*inputs, initial_state=states[0] if states else None, **options)
        return out, (final,)

    def bytes_moved(self, which: str, read_again: bool = False) -> int:
        """Return bytes of inputs, outputs and, backward, gradients; read_again: the inputs are read in both passes."""
        inputs = sum(x.nbytes for x in self.inputs.values())
        if which != BOTH:
            return inputs + self.d_out.nbytes
        return (3 if read_again else 2) * inputs + 2 * self.d_out.nbytes


def random_problem(case: Case, device: torch.device) -> Problem:
    """Draw normal q, k, v, states and gradients; gates logsigmoid(N(0, 1)) times the strength.

    Slots are 1 - gate, with the strength capped at 1. Beyond, nearly all would be 1, and the gradients through the
    softmax would be small differences of weights that bfloat16 rounds.
    """
    heads = case.key_heads or case.heads
    dims = {"key": (case.key_dim,), "value": (case.value_dim,), "head": (), "slots": (case.slots,)}[case.gate]

    # A separate generator: a peer whose graph capture fails breaks the device's default one.
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device, generator=generator)

    tokens = (case.batch, case.length)
    gates = F.logsigmoid(normal(*tokens, heads, *dims, dtype=torch.float32))
    log_decay = case.strength * gates
    inputs = {
        "q": normal(*tokens, case.heads, case.key_dim),
        "k": normal(*tokens, heads, case.key_dim),
        "v": normal(*tokens, heads, case.value_dim),
    }
    if case.gate == "slots":
        inputs["slots"] = -torch.expm1(min(case.strength, 1.0) * gates).to(torch.bfloat16)
    if case.closed:
        chance = torch.rand(log_decay.shape, device=device, generator=generator)
        log_decay = log_decay.masked_fill(chance < case.closed, -math.inf)
    inputs["log_decay"] = log_decay

    rows = case.batch if case.documents is None else len(case.documents) - 1
    sides = ((case.key_dim, case.slots), (case.slots, case.value_dim))
    sides = sides if case.gate == "slots" else ((case.key_dim, case.value_dim),)
    states, d_finals = (tuple(normal(rows, heads, *side, dtype=torch.float32) for side in sides) for _ in range(2))
    bounds = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32, device=device)
    d_out = normal(*tokens, case.heads, case.value_dim)
    return Problem(case, inputs, states if case.initial_state else (), d_out, d_finals, bounds)


def _leaves(problem: Problem) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in problem.inputs.values())


def ours(problem: Problem, memory_budget: int | None = None) -> Call:
    """Call `kernels.gated_recurrence`. memory_budget: for what the backward pass needs."""
    leaves = _leaves(problem)
    return Call(lambda: problem.call_ours(*leaves, memory_budget=memory_budget)[0], leaves, problem.d_out)


def fla(problem: Problem, module: str, name: str, leaves: tuple[Tensor, ...] | None = None) -> Call:
    """Call one of flash-linear-attention's functions."""
    leaves = leaves or _leaves(problem)
    kernel = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    bounds = {} if problem.cu_seqlens is None else {"cu_seqlens": problem.cu_seqlens.long()}
    names = {"slots": "s", "log_decay": "g"}
    arguments = {names.get(key, key): leaf for key, leaf in zip(problem.inputs, leaves, strict=True)} | bounds
    return Call(lambda: kernel(**arguments, scale=problem.scale)[0], leaves, problem.d_out)


def chunk_gla(problem: Problem) -> Call:
    """Call flash-linear-attention's gated linear attention.

    A gate per head is expanded to each channel, untimed; its gradient stays per channel.
    """
    *others, log_decay = problem.inputs.values()
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None].expand(*log_decay.shape, problem.case.key_dim).contiguous()
    leaves = tuple(x.detach().requires_grad_() for x in (*others, log_decay))
    return fla(problem, "gla", "chunk_gla", leaves)


# In the order of the table columns.
IMPLEMENTATIONS: dict[str, Callable[[Problem], Call]] = {
    "ours": ours,
    "ours, recomputed": partial(ours, memory_budget=0),
    "fla chunk_gla": chunk_gla,
    "fla fused_chunk_gla": partial(fla, module="gla.fused_chunk", name="fused_chunk_gla"),
    "fla chunk_simple_gla": partial(fla, module="simple_gla", name="chunk_simple_gla"),  # for a gate per head
    "fla chunk_gsa": partial(fla, module="gsa", name="chunk_gsa"),  # gated slot attention
}
# By form of gate; the first is the one that ours is compared with.
PEERS = {
    "key": ("fla chunk_gla", "fla fused_chunk_gla"),
    "value": (),
    "head": ("fla chunk_simple_gla", "fla chunk_gla"),
    "slots": ("fla chunk_gsa",),
}


def step_ours(problem: Problem) -> Callable[[], Tensor]:
    """Return a call of `gated_recurrence_step`, which updates the problem's initial state in place."""
    (state,) = problem.initial_states
    axis = "value" if problem.case.gate == "value" else "key"
    return lambda: gated_recurrence_step(*problem.inputs.values(), state, decay_axis=axis, scale=problem.scale)


def step_fla(problem: Problem) -> Callable[[], Tensor]:
    """Return a call of flash-linear-attention's recurrent form, which writes a new state."""
    module, name, gate = {
        "key": ("gla", "fused_recurrent_gla", "gk"),
        "head": ("simple_gla", "fused_recurrent_simple_gla", "g"),
    }[problem.case.gate]
    kernel = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    arguments = dict(zip(("q", "k", "v", gate), problem.inputs.values(), strict=True))
    arguments |= {"initial_state": problem.initial_states[0], "output_final_state": True}
    return lambda: kernel(**arguments, scale=problem.scale)[0]
