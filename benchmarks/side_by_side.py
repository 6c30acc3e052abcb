"""Implementations side by side: problems, medians, and the report as it grows."""

import datetime
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks import attention_checks as checks
from benchmarks import attention_report as report
from benchmarks.attention_peers import IMPLEMENTATIONS, PRUNE, Call, Problem
from benchmarks.attention_report import BOTH, FORWARD, Row, Shape

GATE_LOGIT = 3.0  # gates are logsigmoid(N(3, 1)) unless said otherwise
WITH_BACKWARD = 3.5  # FLOPs of forward + backward, in forward passes


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a call: on a GPU, of replays of its CUDA graph, without the host's work of launching it.

    What cannot be captured is launched.
    """
    if device.type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        run()
        torch.cuda.synchronize()
        try:
            return do_bench_cudagraph(run, rep=30, return_mode="median")
        except RuntimeError:
            torch.cuda.synchronize()
            return do_bench(run, return_mode="median")
    timer = Timer("run()", globals={"run": run})
    return timer.blocked_autorange(min_run_time=0.02).median * 1e3


def host_microseconds(run: Callable[[], object], calls: int = 50) -> float:
    """The median wall-clock time that a call keeps the host busy, where the device has next to nothing to do."""
    times = []
    for _ in range(calls + 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[10:]) * 1e6


@dataclass(frozen=True)
class TrainedGates:
    """What `benchmarks.trained_gates` stored: log_forget [heads, tokens] from the fastest head to forget to the
    slowest, logit_bound [heads]."""

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
        """The problem with gates and bounds of heads spread evenly over all that are stored."""
        batch, length, heads = problem.log_forget.shape
        chosen = torch.linspace(0, len(self.log_forget) - 1, heads).round().long().to(self.log_forget.device)
        repeats = math.ceil(batch * length / self.log_forget.shape[1])
        gates = self.log_forget[chosen].repeat(1, repeats)[:, : batch * length]
        problem.log_forget = gates.view(heads, batch, length).permute(1, 2, 0).contiguous()
        problem.logit_bound = self.logit_bound[chosen]
        return problem


def pruned_fraction(log_forget: Tensor, logit_bound: Tensor, tile: int = 128) -> float:
    """The fraction of the causal tile x tile blocks whose largest decay bias is under the pruning threshold.

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
    """Of the forward pass of causal attention: two products for half of the T x T pairs."""
    return 2 * shape.batch * shape.heads[0] * shape.length**2 * shape.head_dim


@dataclass
class Benchmark:
    """The run: what has been measured, and the report so far. Nothing longer than `longest` tokens is measured."""

    device: torch.device
    longest: int
    folder: Path
    trained: TrainedGates | None
    rows: list[Row] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    verdicts: list[tuple[str, float, str, bool]] = field(default_factory=list)
    wrong: dict[tuple[str, int], str] = field(default_factory=dict)  # (peer, head_dim): what its errors say
    spread: float = 0.0  # largest difference between two rounds, relative
    began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", flush=True)

    def cap(self, shape: Shape) -> Shape:
        """The shape, no longer than `longest`."""
        return Shape(shape.batch, shape.heads, min(shape.length, self.longest), shape.head_dim)

    def problem(self, shape: Shape, logit: float = GATE_LOGIT) -> Problem:
        """Random tensors, and gates logsigmoid(N(logit, 1))."""
        logits = torch.full((shape.heads[0],), logit, device=self.device)
        gates = checks.random_gates(shape.batch, shape.length, logits)
        return checks.random_problem(shape.batch, shape.length, shape.heads, shape.head_dim, gates)

    def add_section(self, title: str, *paragraphs: str) -> None:
        """Add to the report, and write it: a run that is cut short leaves what it has."""
        self.sections.append("\n\n".join([f"## {title}", *(text.rstrip("\n") for text in paragraphs)]))
        report.write(self.folder, self.text(), self.rows)

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

        flops: of the forward pass, where it is not that of full causal attention. pruned: to be kept with the times.
        """
        self.say(f"{section}: {shape} {parameter}")
        flops = attention_flops(shape) if flops is None else flops
        calls: dict[str, Call] = {}
        notes: dict[str, str] = {}
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds):
            for name in names:
                try:
                    if turn == 0:
                        calls[name] = IMPLEMENTATIONS[name](problem)
                    for which in passes if name not in notes else ():
                        run = calls[name].forward if which == FORWARD else calls[name].forward_backward
                        times.setdefault((name, which), []).append(milliseconds(run, self.device))
                except Exception as error:  # whatever a peer raises, the others are measured
                    notes[name] = one_line(error)
        rows = []
        for name in names:
            for which in passes:
                found = times.get((name, which)) if name not in notes else None
                median = statistics.median(found) if found else None
                work = flops * (WITH_BACKWARD if which == BOTH else 1)
                rate = work / median / 1e9 if median else None
                note = notes.get(name) or self.wrong.get((name, shape.head_dim), "")
                rows.append(Row(section, name, shape, parameter, which, median, rate, note, pruned))
                self.spread = max(self.spread, max(found) / min(found) - 1) if found else self.spread
        self.rows += rows
        report.write(self.folder, self.text(), self.rows)
        return rows

    def judge(self, what: str, measured: float, target: float, at_least: bool = False) -> None:
        """Hold a measurement to its target."""
        met = measured >= target if at_least else measured <= target
        self.verdicts.append((what, measured, f"{'at least' if at_least else 'at most'} {target:.2f}", met))

    def text(self) -> str:
        """The report."""
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, no GPU"
        triton_version = getattr(sys.modules.get("triton"), "__version__", None)
        head = (
            "# Forgetting attention\n\n"
            f"{datetime.date.today()}; {name}; torch {torch.__version__}, Triton {triton_version}, cuDNN "
            f"{torch.backends.cudnn.version()}. By `python -m benchmarks.forgetting_attention "
            f"{shlex.join(sys.argv[1:])}`.\n\n".replace(" `.", "`.")
            + "bfloat16, causal, random data; medians of CUDA graph replays (`triton.testing.do_bench_cudagraph`): "
            "what the device takes, without the host's launching, which has a table of its own. TFLOP/s counts "
            "2 B H T^2 D forward "
            f"and {WITH_BACKWARD} times that forward + backward, pruned work too. Gates are logsigmoid(N(3, 1)) unless "
            "said otherwise; pruning may lose e^-10 of the attention, ours and the authors' at one threshold, from the "
            "largest norms of q and k. FA2 and cuDNN are PyTorch's scaled_dot_product_attention, without a gate. An "
            "absolute time holds on this GPU only: compare within the run."
        )
        met = [(what, f"{value:.2f}", target, "yes" if ok else "no") for what, value, target, ok in self.verdicts]
        summary = ["## Targets\n\n" + report.table(["", "measured", "target", "met"], met).rstrip()] if met else []
        return "\n\n".join([head, *summary, *self.sections]) + "\n"


def one_line(error: Exception) -> str:
    """Why an implementation could not be measured."""
    if isinstance(error, ImportError):
        return "not installed"
    return f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0][:150].replace('|', '/')}"
