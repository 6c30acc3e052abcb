"""Every kernel of this project as a repeatable call, at sizes that fill a GPU; `benchmarks.soak.run` runs them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.attention.attention_checks import GATE_LOGITS, random_gates
from benchmarks.attention.attention_checks import random_problem as random_attention
from benchmarks.linearization.step_arguments import liger_arguments, step_arguments
from benchmarks.recurrence.recurrence_checks import shorten
from benchmarks.recurrence.recurrence_peers import Case, random_problem
from kernels.cross_entropy import token_losses
from kernels.forgetting_attention import forgetting_attention
from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step, liger_step, windowed_step
from kernels.selective_attention import selective_attention
from kernels.small_batch_linear import small_batch_linear

Results = dict[str, Tensor]
Repeat = Callable[[], Results]

ATOMIC = {"dq": 1e-4, "dlog_forget": 1e-3}
"""Allowed relative difference of results that the Hopper backward pass sums in no fixed order."""


@dataclass(frozen=True)
class Kernel:
    """One case of the soak.

    Attributes:
        build: takes a device and the longest allowed sequence, makes the inputs, and returns a deterministic function
            that computes the results from them.
        bounds: the largest allowed relative difference between two passes, by result name; 0 for the others.
    """

    build: Callable[[torch.device, int], Repeat]
    bounds: dict[str, float] = field(default_factory=dict)


def attention(
    head_dim: int,
    heads: tuple[int, int, int] = (32, 32, 32),
    *,
    batch: int = 2,
    length: int = 8192,
    gated: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    documents: tuple[float, ...] = (),
    padding: tuple[int, ...] = (),
    lse: bool = False,
    **options: object,
) -> Kernel:
    """Return the case of forgetting attention, forward and backward.

    Args:
        heads: of q, k and v.
        deterministic: use PyTorch's deterministic algorithms.
        documents: where packed documents end, as fractions of the length.
        padding: kv_start of each row.
        lse: also return lse, and give it a gradient.
        options: of `forgetting_attention`.
    """

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        tokens = min(length, longest)
        gates = random_gates(batch, tokens, torch.linspace(*GATE_LOGITS, heads[0], device=device))
        problem = random_attention(batch, tokens, heads, head_dim, gates)
        tensors = [x.to(dtype) for x in (problem.q, problem.k, problem.v)] + [gates] * gated
        leaves = [x.requires_grad_() for x in tensors]
        names = ("out", "dq", "dk", "dv", "dlog_forget")
        grads = [problem.d_out.to(dtype)]
        arguments = dict(options)
        if documents:
            bounds = [0, *(int(end * tokens) for end in documents), tokens]
            arguments["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
        if padding:
            arguments["kv_start"] = torch.tensor(padding, dtype=torch.int32, device=device).clamp(max=tokens // 2)
        if lse:
            names, arguments["return_lse"] = ("out", "lse", *names[1:]), True
            grads.append(torch.randn(batch, tokens, heads[0], device=device))

        def repeat() -> Results:
            torch.use_deterministic_algorithms(deterministic)
            try:
                out = forgetting_attention(*leaves, **arguments)
                outs = out if lse else (out,)
                return dict(zip(names, (*outs, *torch.autograd.grad(outs, leaves, grads)), strict=False))
            finally:
                torch.use_deterministic_algorithms(False)

        return repeat

    half = dtype in (torch.float16, torch.bfloat16)
    added_in_any_order = half and head_dim <= 128 and not deterministic and not padding
    return Kernel(build, ATOMIC if added_in_any_order else {})


def decoding(
    head_dim: int, heads: tuple[int, int, int], *, gated: bool, queries: int = 1, top_values: int | None = None
) -> Kernel:
    """Return the case of attention of a few queries to a cache, with cumulative gates if gated.

    top_values: of `selective_attention`; None: `forgetting_attention`.
    """

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        batch, keys = 16, min(16384, longest)
        gates = random_gates(batch, keys, torch.linspace(*GATE_LOGITS, heads[0], device=device)).double().cumsum(1)
        q, k, v = (
            torch.randn(batch, tokens, num_heads, head_dim, dtype=torch.bfloat16, device=device)
            for tokens, num_heads in zip((queries, keys, keys), heads, strict=True)
        )
        held = torch.linspace(keys // 2, keys, batch, device=device).to(torch.int32)
        sums, bounds = (gates, {"kv_end": held}) if gated else (None, {})

        def repeat() -> Results:
            if top_values is not None:
                return {"out": selective_attention(q, k, v, top_values, sums, **bounds)}
            return {"out": forgetting_attention(q, k, v, sums, cumulative=gated, **bounds)}

        return repeat

    return Kernel(build)


def recurrence(case: Case, *, bonus: bool = False, memory_budget: int | None = None) -> Kernel:
    """Return the case of the gated recurrence or slots, forward and backward, from the output and the final states."""

    def build(device: torch.device, longest: int) -> Repeat:
        problem = random_problem(shorten(case, longest), device)
        leaves = [x.requires_grad_() for x in (*problem.inputs.values(), *problem.initial_states)]
        names = [*problem.inputs, *(f"initial_state_{i}" for i in range(len(problem.initial_states)))]
        options: dict[str, object] = {"memory_budget": memory_budget}
        if bonus:
            options["bonus"] = torch.linspace(-1, 1, case.heads * case.key_dim, device=device).view(case.heads, -1)

        def repeat() -> Results:
            out, finals = problem.call_ours(*leaves, **options)
            grads = torch.autograd.grad((out, *finals), leaves, (problem.d_out, *problem.d_finals))
            states = {f"final_state_{i}": x for i, x in enumerate(finals)}
            return {"out": out, **states, **{f"d{name}": x for name, x in zip(names, grads, strict=True)}}

        return repeat

    return Kernel(build)


def few_tokens(case: Case, *, in_place: bool) -> Kernel:
    """Return the case of a few tokens, no gradients: `gated_recurrence_step` if in_place, else `gated_recurrence`."""

    def build(device: torch.device, longest: int) -> Repeat:
        problem = random_problem(case, device)
        inputs, (state,) = tuple(problem.inputs.values()), problem.initial_states
        options = {"decay_axis": "value" if case.gate == "value" else "key", "scale": problem.scale}

        @torch.no_grad()
        def repeat() -> Results:
            if not in_place:
                out, final = gated_recurrence(*inputs, initial_state=state, **options)
                return {"out": out, "state": final}
            after = state.clone()
            return {"out": gated_recurrence_step(*inputs, after, **options), "state": after}

        return repeat

    return Kernel(build)


RING = {"batch": 32, "heads": 8, "groups": 4, "dim": 128, "window": 256, "sinks": 4, "dtype": torch.bfloat16}
CHANGED = ("state", "ring_keys", "ring_values", "late_keys")
"""Arguments that the steps with a window modify."""


def _after_tokens(arguments: dict[str, object]) -> dict[str, object]:
    """Fill the state and the ring, as after many tokens; the first half of the rows have padding."""
    for name in CHANGED[:3]:
        arguments[name].normal_()
    arguments["tokens"].fill_(3 * RING["window"] + 5)
    device, weights = arguments["tokens"].device, RING["heads"] * RING["groups"]
    arguments["kv_start"] = torch.tensor([7, 0], dtype=torch.int32, device=device).repeat_interleave(RING["batch"] // 2)
    arguments["state_weight"] = torch.linspace(0.2, 0.8, weights, device=device)
    arguments["window_weight"] = torch.linspace(1.0, 0.5, weights, device=device)
    return arguments


def _with_copies(step: Callable[..., Tensor], arguments: dict[str, object]) -> Results:
    changed = {name: arguments[name].clone() for name in CHANGED if arguments.get(name) is not None}
    return {"out": step(**arguments | changed), **changed}


def state_and_window(*, per_head: bool) -> Kernel:
    """Return the case of `windowed_step`."""

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        arguments = _after_tokens(step_arguments(**RING, device=device))
        if per_head:
            arguments["log_decay"] = arguments["log_decay"][..., 0].contiguous()
        return lambda: _with_copies(windowed_step, arguments)

    return Kernel(build)


def liger(gate: str, *, late: bool = False) -> Kernel:
    """Return the case of `liger_step`. late: the state takes in the token that leaves the window."""

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        arguments = _after_tokens(liger_arguments(**RING, device=device, late=late))
        shift = torch.ones(RING["heads"], device=device)
        return lambda: _with_copies(liger_step, arguments | {"gate": gate, "gate_shift": shift})

    return Kernel(build)


def losses(*, teacher: bool, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    """Return the case of `token_losses` with the gradient; teacher: with the divergence."""

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        tokens, vocab = min(4096, longest), 32000
        logits = 3 * torch.randn(tokens, vocab, device=device, dtype=dtype)
        targets = torch.randint(vocab, (tokens,), device=device)
        of_teacher = torch.randn_like(logits) if teacher else None

        def repeat() -> Results:
            grad = logits.clone()
            return {"losses": token_losses(grad, targets, of_teacher, temperature=2.0), "dlogits": grad}

        return repeat

    return Kernel(build)


def few_rows(rows: int, *, gated: bool) -> Kernel:
    """Return the case of `small_batch_linear` after a norm; gated: with SwiGLU, else with a bias and the residual."""

    def build(device: torch.device, longest: int) -> Repeat:
        torch.manual_seed(0)
        width, wide = 4096, 14336
        inner, outer = (width, wide) if gated else (wide, width)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

        x, weight, norm = normal(rows, inner), normal(outer * (2 if gated else 1), inner) / inner**0.5, normal(inner)
        after = {} if gated else {"bias": normal(outer), "residual": normal(rows, outer)}
        return lambda: {"out": small_batch_linear(x, weight, norm_weight=norm, gated=gated, **after)}

    return Kernel(build)


def _channels(key_dim: int = 128, value_dim: int = 128, gate: str = "key", strength: float = 1 / 16, **sizes) -> Case:
    return Case(4, 16, 4096, key_dim, value_dim, gate, strength, **{"initial_state": True, **sizes})


def _step(gate: str, length: int = 1) -> Case:
    return Case(64, 32, length, 128, 128, gate, 1.0, key_heads=8, initial_state=True)


DOCUMENTS = (0, 1, 300, 300, 1557, 4096)
PACKED = {"documents": (0.0001, 0.1, 0.1, 0.63), "batch": 1, "length": 16384}

CASES: dict[str, Kernel] = {
    "attention D64": attention(64),
    "attention D96": attention(96),
    "attention D128": attention(128),
    "attention D64, no gates": attention(64, gated=False),
    "attention D128, no gates": attention(128, gated=False),
    "attention D128, float16": attention(128, dtype=torch.float16),
    "attention D64, pruned": attention(64, prune=-10.0),
    "attention D128, pruned": attention(128, prune=-10.0),
    "attention D64, packed": attention(64, **PACKED),
    "attention D96, packed": attention(96, **PACKED),
    "attention D128, packed": attention(128, **PACKED),
    "attention D128, window": attention(128, window=1000),
    "attention D128, grouped heads": attention(128, (32, 4, 8)),
    "attention D128, lse": attention(128, lse=True),
    "attention D64, deterministic": attention(64, deterministic=True),
    "attention D96, deterministic": attention(96, deterministic=True),
    "attention D128, deterministic": attention(128, deterministic=True),
    "attention D64, Triton": attention(64, length=4096, padding=(0, 1000)),
    "attention D128, Triton": attention(128, length=4096, padding=(0, 1000)),
    "attention D256, Triton": attention(256, (16, 16, 16), length=4096),
    "attention D64, float32": attention(64, (8, 8, 8), length=2048, dtype=torch.float32),
    "decoding D64": decoding(64, (32, 32, 32), gated=False),
    "decoding D128, gated": decoding(128, (32, 4, 8), gated=True),
    "decoding D128, gated, 8 queries": decoding(128, (32, 8, 8), gated=True, queries=8),
    "selective decoding D64": decoding(64, (32, 4, 16), gated=False, top_values=100),
    "selective decoding D128, gated": decoding(128, (32, 8, 8), gated=True, top_values=1000),
    "recurrence per channel": recurrence(_channels()),
    "recurrence per channel, K64 V64": recurrence(_channels(64, 64)),
    "recurrence per channel, strong gates": recurrence(_channels(strength=30.0)),
    "recurrence per channel, recomputed": recurrence(_channels(), memory_budget=0),
    "recurrence per channel, packed": recurrence(replace(_channels(), batch=1, documents=DOCUMENTS)),
    "recurrence per channel, grouped heads": recurrence(_channels(key_heads=4)),
    "recurrence per channel, bonus": recurrence(_channels(64, 64), bonus=True),
    "recurrence per value channel": recurrence(_channels(gate="value")),
    "recurrence per head": recurrence(_channels(gate="head")),
    "recurrence per head, K64 V64": recurrence(_channels(64, 64, "head")),
    "recurrence per head, packed": recurrence(replace(_channels(gate="head"), batch=1, documents=DOCUMENTS)),
    "recurrence per head, grouped heads": recurrence(_channels(64, 64, "head", key_heads=4)),
    "recurrence per head, K96 V96": recurrence(_channels(96, 96, "head")),
    "slots": recurrence(_channels(gate="slots")),
    "step per channel": few_tokens(_step("key"), in_place=True),
    "step per value channel": few_tokens(_step("value"), in_place=True),
    "step per head": few_tokens(_step("head"), in_place=True),
    "a few tokens per channel": few_tokens(_step("key", 8), in_place=False),
    "windowed step": state_and_window(per_head=False),
    "windowed step per head": state_and_window(per_head=True),
    "liger step, gla": liger("gla"),
    "liger step, hgrn2, late": liger("hgrn2", late=True),
    "liger step, mamba2": liger("mamba2"),
    "cross-entropy": losses(teacher=False),
    "cross-entropy and divergence": losses(teacher=True),
    "linear of a few rows": few_rows(8, gated=False),
    "linear of a few rows, gated": few_rows(8, gated=True),
}


def repeated(name: str, device: torch.device) -> Repeat:
    """Build the case of that name, with short sequences if there is no GPU."""
    return CASES[name].build(device, 10**9 if device.type == "cuda" else 128)
