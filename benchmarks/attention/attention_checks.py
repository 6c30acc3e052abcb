"""Check attention kernels against float64 before they are timed: relative error in the 2-norm, for each tensor.

Up to a few thousand tokens the reference is `forgetting_attention_reference` and autograd. For longer inputs it is
computed here in chunks of query rows with gradients by formula, which allows 128k tokens:

    P = softmax(q k^T / sqrt(D) + c_i - c_j),  o = P v,  dS = P * (do v^T - rowsum(do * o)),
    dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D),  dv = P^T do,
    dc = rowsum(dS) - colsum(dS),  dlog_forget_t = sum_{i >= t} dc_i.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.attention_peers import IMPLEMENTATIONS, Problem, largest_logits, ours
from benchmarks.measuring.comparison_run import Errors
from benchmarks.measuring.timing import relative_error
from kernels import forgetting_attention
from kernels.forgetting_attention import forgetting_attention_reference

NAMES = ("out", "dq", "dk", "dv", "dlog_forget")
BOUNDS = {"out": 1e-2, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "dlog_forget": 5e-2}  # bfloat16, up to 2048 tokens
GATE_LOGITS = (0.0, 8.0)  # mean gate logit of the fastest and of the slowest head to forget


@dataclass(frozen=True)
class Check:
    """A case of `forgetting_attention`. length: queries, keys. heads: of q, k and v."""

    name: str
    length: tuple[int, int]
    heads: tuple[int, int, int]
    head_dim: int
    batch: int = 2
    gated: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        heads = str(self.heads[0]) if len(set(self.heads)) == 1 else "/".join(map(str, self.heads))
        queries, keys = self.length
        return f"B{self.batch} H{heads} T{queries}{f' S{keys}' * (keys != queries)} D{self.head_dim}"


CHECKS = (
    Check("plain", (1000, 1000), (4, 4, 4), 64, gated=False),
    Check("plain", (2048, 2048), (4, 4, 4), 128, gated=False),
    Check("gated", (1000, 1000), (4, 4, 4), 64),
    Check("gated", (2048, 2048), (4, 4, 4), 64),
    Check("gated", (2048, 2048), (4, 4, 4), 128),
    Check("gated", (257, 257), (4, 4, 4), 32),
    Check("pruned", (2048, 2048), (4, 4, 4), 64, options={"prune": -10.0}),
    Check("pruned", (1999, 1999), (4, 4, 4), 128, options={"prune": -10.0}),
    Check("window 300", (1000, 1000), (4, 4, 4), 64, options={"window": 300}),
    Check("window 512", (2048, 2048), (4, 4, 4), 128, options={"window": 512}),
    Check("DiffQKV, plain", (1000, 1000), (8, 1, 4), 64, gated=False),
    Check("DiffQKV, gated", (2048, 2048), (8, 1, 4), 64),
    Check("DiffQKV, pruned", (1000, 1000), (8, 1, 4), 128, options={"prune": -10.0}),
    Check("packed", (2048, 2048), (4, 4, 4), 64, batch=1, options={"cu_seqlens": [0, 1, 700, 700, 1291, 2048]}),
    Check("left-padded", (1000, 1000), (4, 4, 4), 64, options={"kv_start": [0, 333]}),
    Check("decoding", (1, 3000), (8, 1, 4), 64, options={"kv_end": [3000, 1777], "cumulative": True}),
    Check("decoding", (1, 3000), (4, 4, 4), 128, gated=False, options={"kv_start": [0, 411]}),
)


def random_gates(batch: int, length: int, logits: Tensor) -> Tensor:
    """Return [B, T, H] float32, logsigmoid of N(mean, 1) with the mean `logits` [H] of each head."""
    return F.logsigmoid(torch.randn(batch, length, len(logits), device=logits.device) + logits)


def random_problem(batch: int, length: int, heads: tuple[int, int, int], head_dim: int, log_forget: Tensor) -> Problem:
    """Draw q, k, v and the gradient of the output from N(0, 1), bfloat16."""

    def normal(num_heads: int) -> Tensor:
        return torch.randn(batch, length, num_heads, head_dim, dtype=torch.bfloat16, device=log_forget.device)

    q, k, v = (normal(num_heads) for num_heads in heads)
    return Problem(q, k, v, log_forget, normal(heads[0]), largest_logits(q, k))


def errors_of_ours(check: Check, device: torch.device) -> Errors:
    """Return the error of the output, and of the gradients if there are as many queries as keys."""
    queries, keys = check.length
    gates = random_gates(check.batch, keys, torch.linspace(*GATE_LOGITS, check.heads[0], device=device))
    problem = random_problem(check.batch, keys, check.heads, check.head_dim, gates)
    options = {
        name: torch.tensor(value, dtype=torch.int32, device=device) if isinstance(value, list) else value
        for name, value in check.options.items()
    }
    if options.get("cumulative"):
        gates = gates.double().cumsum(1).float()
    tensors = [problem.q[:, keys - queries :], problem.k, problem.v, *([gates] if check.gated else [])]
    d_out = problem.d_out[:, keys - queries :]
    backward = queries == keys

    found = _output_and_gradients(forgetting_attention, tensors, options, d_out, backward)
    options.pop("prune", None)
    exact = _output_and_gradients(
        forgetting_attention_reference, [x.double() for x in tensors], options, d_out.double(), backward
    )
    return dict(zip(NAMES, map(relative_error, found, exact), strict=False))


def _output_and_gradients(function, tensors, options, d_out, backward) -> tuple[Tensor, ...]:
    leaves = [x.detach().contiguous().requires_grad_(backward) for x in tensors]
    out = function(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, d_out)) if backward else (out,)


def errors_of(name: str, head_dim: int, device: torch.device) -> Errors:
    """Return the errors of one of `IMPLEMENTATIONS` on 1024 tokens and 4 heads. Passes on the peer's exceptions."""
    gates = random_gates(1, 1024, torch.linspace(*GATE_LOGITS, 4, device=device))
    call = IMPLEMENTATIONS[name](problem := random_problem(1, 1024, (4, 4, 4), head_dim, gates))
    found = [x.transpose(1, 2) if call.heads_first else x for x in call.forward_backward()]
    tensors = (problem.q, problem.k, problem.v, problem.log_forget)[: len(call.leaves)]
    exact = _output_and_gradients(
        forgetting_attention_reference, [x.double() for x in tensors], {}, problem.d_out.double(), True
    )
    return dict(zip(NAMES, map(relative_error, found, exact), strict=False))


def errors_at_length(length: int, head_dim: int, gated: bool, device: torch.device) -> Errors:
    """Return our errors in one row of `length` tokens with 4 heads, against `chunked_reference`."""
    gates = random_gates(1, length, torch.linspace(*GATE_LOGITS, 4, device=device))
    problem = random_problem(1, length, (4, 4, 4), head_dim, gates)
    found = ours(problem, gated=gated).forward_backward()
    heads = [
        chunked_reference(*(x[0, :, head].double() for x in (problem.q, problem.k, problem.v)), gate, d_out.double())
        for head, (gate, d_out) in enumerate(
            zip(gates[0].T.double() * gated, problem.d_out[0].transpose(0, 1), strict=True)
        )
    ]
    exact = [torch.stack(parts, dim=1)[None] for parts in zip(*heads, strict=True)]
    return dict(zip(NAMES, map(relative_error, found, exact), strict=False))


def chunked_reference(
    q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, d_out: Tensor, rows: int = 1024
) -> tuple[Tensor, ...]:
    """Return out, dq, dk, dv, dlog_forget of one head in O(rows T) memory.

    Args:
        q, k, v, d_out: [T, D] float64.
        log_forget: [T] float64.
    """
    scale, decay = q.shape[-1] ** -0.5, log_forget.cumsum(0)
    out, dq, dk, dv, d_decay = (torch.zeros_like(x) for x in (v, q, k, v, decay))
    for first in range(0, len(q), rows):
        last = min(first + rows, len(q))
        chunk, past = slice(first, last), slice(0, last)
        scores = scale * q[chunk] @ k[past].T + decay[chunk, None] - decay[None, past]
        future = torch.arange(last, device=q.device) > torch.arange(first, last, device=q.device)[:, None]
        weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
        out[chunk] = weights @ v[past]
        d_scores = d_out[chunk] @ v[past].T
        d_scores.sub_((d_out[chunk] * out[chunk]).sum(-1, keepdim=True)).mul_(weights)
        dq[chunk] = scale * d_scores @ k[past]
        dk[past] += scale * d_scores.T @ q[chunk]
        dv[past] += weights.T @ d_out[chunk]
        d_decay[chunk] += d_scores.sum(1)
        d_decay[past] -= d_scores.sum(0)
    return out, dq, dk, dv, d_decay.flip(0).cumsum(0).flip(0)


def check_chunked_reference(device: torch.device) -> None:
    """Check `chunked_reference` against autograd on the definition.

    Raises:
        RuntimeError: they differ.
    """
    gates = random_gates(1, 300, torch.tensor([2.0], device=device))
    problem = random_problem(1, 300, (1, 1, 1), 32, gates)
    tensors = [x.double() for x in (problem.q, problem.k, problem.v, gates)]
    exact = _output_and_gradients(forgetting_attention_reference, tensors, {}, problem.d_out.double(), True)
    flat = [x[0, :, 0] for x in (*tensors, problem.d_out.double())]
    found = chunked_reference(*flat, rows=128)
    worst = max(relative_error(a, b[0, :, 0]) for a, b in zip(found, exact, strict=True))
    if not worst < 1e-10:
        raise RuntimeError(f"the chunked reference is off by {worst:.1e}")
