"""A run of the attention benchmark: problems, measurements, and gates of trained models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention import attention_checks as checks
from benchmarks.attention.attention_peers import IMPLEMENTATIONS, PRUNE, Problem
from benchmarks.attention.attention_report import Row, Shape
from benchmarks.measuring.comparison_run import Run
from benchmarks.measuring.timing import BOTH, FORWARD

GATE_LOGIT = 3.0  # by default gates are logsigmoid(N(3, 1))
WITH_BACKWARD = 3.5  # FLOPs of forward + backward, in forward passes


@dataclass(frozen=True)
class TrainedGates:
    """Output of trained_gates.py.

    log_forget [heads, tokens] from the fastest head to forget to the slowest, and logit_bound [heads].
    """

    log_forget: Tensor
    logit_bound: Tensor

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "TrainedGates":
        with np.load(path) as stored:
            gates = torch.from_numpy(stored["log_forget"]).to(device).float().movedim(1, -1).flatten(0, 1)
            bound = torch.from_numpy(stored["logit_bound"]).to(device).float().flatten()
        order = gates.mean(1).argsort()
        return cls(gates[order], bound[order])

    def put_into(self, problem: Problem) -> Problem:
        """Return the problem with stored gates and bounds, of heads spread evenly over all stored ones."""
        batch, length, heads = problem.log_forget.shape
        chosen = torch.linspace(0, len(self.log_forget) - 1, heads).round().long().to(self.log_forget.device)
        repeats = math.ceil(batch * length / self.log_forget.shape[1])
        gates = self.log_forget[chosen].repeat(1, repeats)[:, : batch * length]
        problem.log_forget = gates.view(heads, batch, length).permute(1, 2, 0).contiguous()
        problem.logit_bound = self.logit_bound[chosen]
        return problem


def pruned_fraction(log_forget: Tensor, logit_bound: Tensor, tile: int = 128) -> float:
    """Return the fraction of the causal tile x tile blocks whose largest decay bias is under the pruning threshold.

    log_forget: [B, T, H]. logit_bound: [H].
    """
    decay = log_forget.double().cumsum(1)
    first, last = decay[:, ::tile], decay[:, tile - 1 :: tile]
    first = first[:, : last.shape[1]]
    threshold = PRUNE - 2 * logit_bound - math.log(decay.shape[1])
    causal = torch.ones(first.shape[1], first.shape[1], device=decay.device).tril().bool()[None, :, :, None]
    pruned = (first[:, :, None] - last[:, None] < threshold) & causal
    return (pruned.sum() / (causal.sum() * pruned.shape[0] * pruned.shape[3]).clamp(min=1)).item()


def attention_flops(shape: Shape) -> float:
    """Return the FLOPs of causal attention's forward pass: two products for half of the T x T pairs."""
    return 2 * shape.batch * shape.heads[0] * shape.length**2 * shape.head_dim


@dataclass(kw_only=True)
class Benchmark(Run):
    """A run, with the errors found in peers."""

    name = "attention.forgetting_attention"
    title = "Forgetting attention"
    preamble = (
        "bfloat16, causal, random data; medians of CUDA graph replays (`triton.testing.do_bench_cudagraph`): what the "
        "device takes, without the host's launching, which has a table of its own. What cannot be captured is marked "
        f"as launched. TFLOP/s counts 2 B H T^2 D forward and {WITH_BACKWARD} times that forward + backward, pruned "
        "work too. Gates are logsigmoid(N(3, 1)) unless said otherwise; pruning may lose e^-10 of the attention, ours "
        "and the authors' at one threshold, from the largest norms of q and k. FA2 and cuDNN are PyTorch's "
        "scaled_dot_product_attention, without a gate. An absolute time holds on this GPU only: compare within the run."
    )
    row = Row

    trained: TrainedGates | None
    wrong: dict[tuple[str, int], str] = field(default_factory=dict)  # (peer, head_dim): its errors out of bounds

    def measured_on(self) -> str:
        return f"{super().measured_on()}, cuDNN {torch.backends.cudnn.version()}"

    def cap(self, shape: Shape) -> Shape:
        """Return the shape with its length capped at `longest`."""
        return Shape(shape.batch, shape.heads, min(shape.length, self.longest), shape.head_dim)

    def problem(self, shape: Shape, logit: float = GATE_LOGIT) -> Problem:
        """Draw random tensors, and gates logsigmoid(N(logit, 1))."""
        logits = torch.full((shape.heads[0],), logit, device=self.device)
        gates = checks.random_gates(shape.batch, shape.length, logits)
        return checks.random_problem(shape.batch, shape.length, shape.heads, shape.head_dim, gates)

    def side_by_side(
        self,
        section: str,
        names: Sequence[str],
        shape: Shape,
        problem: Problem,
        parameter: str = "",
        passes: Sequence[str] = (FORWARD, BOTH),
        rounds: int = 1,
        pruned: float | None = None,
        flops: float | None = None,
    ) -> list[Row]:
        """Measure the implementations in turn, `rounds` times, and keep the median of the rounds.

        flops: of the forward pass, if not full causal attention. pruned: stored with the times.
        """
        self.say(f"{section}: {shape} {parameter}")
        flops = attention_flops(shape) if flops is None else flops
        measured = self.in_turn({name: partial(IMPLEMENTATIONS[name], problem) for name in names}, passes, rounds)
        rows = []
        for (name, which), found in measured.items():
            work = flops * (WITH_BACKWARD if which == BOTH else 1)
            wrong = self.wrong.get((name, shape.head_dim), "")
            rate = work / found.milliseconds / 1e9 if found.milliseconds else None
            rows.append(self.new_row(section, name, shape, which, found, parameter, wrong, rate=rate, pruned=pruned))
        self.add_rows(rows)
        return rows
