"""Estimates of `job=plan` against measurements: `python -m benchmarks.pretraining.plan_against_measured`.

A few training steps of each case, like those of `job=pretrain`: its module and loss, fused AdamW, bfloat16 autocast,
random tokens, one sequence a document, gradients dropped where Lightning drops them. Measured are the peak of allocated
memory, its levels and peaks by phase, tokens a second, and the kernels' time by kind (one more step, profiled).

The measured values go to a CSV file after each case; `--again` reads them from there and repeats the plan, without a
GPU.
"""

import argparse
import csv
import datetime
import gc
import io
import itertools
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import Tensor

from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import RESULTS, check_output, one_line
from benchmarks.pretraining.modules import compose, pretraining
from benchmarks.pretraining.training_speed import elapsed, read_clock
from common.atomic_files import write_atomic
from lit_modules.parallel.gradients import clip_gradients
from lit_modules.planning import Setup, eager, estimate
from lit_modules.pretraining import Pretraining

WARM, TIMED = 3, 4  # steps
GIB = 2**30
PHASES = ("forward", "backward", "clip", "optimizer")
# Kinds of kernels by patterns of their names; the first match counts.
KINDS = {
    "matrix_products": r"nvjet|gemm|cutlass|xmma|cublas|splitK",
    "fused": r"^triton_(poi|red|per|tem|for)",
    "optimizer": r"multi_tensor|FusedAdam|fused_adam|foreach",
    "copies": r"Memcpy|Memset|copy",
    "elementwise": r"at::native|elementwise|reduce_kernel|indexing|scatter|gather|softmax|embedding",
    "mixing": r"",  # our own kernels have no prefix
}


@dataclass(frozen=True)
class Case:
    """A model of `conf/model`, a micro-batch of sequences of `length` tokens, and micro-batches per step."""

    model: str
    length: int
    sequences: int
    accumulation: int = 1
    compile: bool = True
    recomputation: str = "none"


CASES = (
    Case("fox_pro_360m", 16384, 2),
    Case("fox_pro_760m", 16384, 2),
    Case("fox_pro_125m", 16384, 2, accumulation=2),
    Case("sigma_1_5b", 4096, 4, accumulation=2),
    Case("transformer_llama_360m", 16384, 2),
    Case("hgrn2_360m", 16384, 2),
    Case("fox_pro_760m", 16384, 2, recomputation="full"),
    Case("fox_pro_360m", 16384, 1, compile=False),
    Case("fox_pro_760m", 16384, 2, recomputation="selective"),
    Case("sigma_1_5b", 4096, 2, compile=False, recomputation="full"),
)
TINY = (
    Case("fox_pro_tiny", 64, 2, accumulation=2, compile=False),
    Case("fox_pro_tiny", 64, 2, compile=False, recomputation="full"),
)


@dataclass(frozen=True)
class Measured:
    """One case on one GPU; a note says why a measurement is missing. Memory in bytes, times in seconds per step.

    held: allocated between two steps. levels, peaks: allocated after each phase and at most within it, of the
    micro-batch that had most. phases: seconds of each, all micro-batches together. kernels: their seconds,
    by kind.
    """

    case: Case
    gpu: str
    torch: str
    note: str = ""
    tokens_per_second: float = 0.0
    peak: int = 0
    held: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return one line of the CSV file."""
        by_phase = {
            f"{name}_{phase}": getattr(self, name).get(phase, "")
            for name in ("levels", "peaks", "phases")
            for phase in PHASES
        }
        kernels = {f"kernels_{kind}": self.kernels.get(kind, "") for kind in KINDS}
        plain = {f.name: getattr(self, f.name) for f in fields(self)[1:7]}
        return {**asdict(self.case), **plain, **by_phase, **kernels}

    @classmethod
    def of_row(cls, row: dict[str, str]) -> "Measured":
        """Parse a line that `row` wrote."""
        kinds = {f.name: f.type for f in fields(Case)}
        case = Case(**{k: row[k] == "True" if kinds[k] is bool else kinds[k](row[k]) for k in kinds})
        groups = {
            name: {k.removeprefix(f"{name}_"): float(v) for k, v in row.items() if k.startswith(f"{name}_") and v}
            for name in ("levels", "peaks", "phases", "kernels")
        }
        return cls(
            case,
            row["gpu"],
            row["torch"],
            row["note"],
            float(row["tokens_per_second"]),
            int(row["peak"]),
            int(row["held"]),
            **groups,
        )


class Training:
    """Training steps of one case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.module = build(case, device)
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        tokens = torch.randint(self.module.model.config.vocab_size, (1, self.micro_tokens + 1), device=device)
        bounds = torch.arange(0, self.micro_tokens + 1, case.length, dtype=torch.int32, device=device)
        self.batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:], "cu_seqlens": bounds}

    @property
    def micro_tokens(self) -> int:
        return self.case.sequences * self.case.length

    def step(self, after: Any = lambda phase: None) -> Tensor:
        """Take an optimizer step like Lightning; call `after` at the end of each phase."""
        for number in range(self.case.accumulation):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.module.training_step(self.batch, 0)
            after("forward")
            if not number:
                self.optimizer.zero_grad()
            (loss / self.case.accumulation).backward()
            after("backward")
        clip_gradients(self.module.parameters(), 1.0)
        after("clip")
        self.optimizer.step()
        self.module.micro_losses.clear()
        after("optimizer")
        return loss.detach()

    def timed(self) -> tuple[float, dict[str, float]]:
        """Return the median seconds of a step, and of its phases."""
        whole, phases = [], {phase: [] for phase in PHASES}
        for _ in range(TIMED):
            clocks = [("", read_clock(self.device))]
            self.step(lambda phase, clocks=clocks: clocks.append((phase, read_clock(self.device))))
            whole.append(elapsed(clocks[0][1], clocks[-1][1]))
            for phase in PHASES:
                pairs = itertools.pairwise(clocks)
                phases[phase].append(sum(elapsed(a, b) for (_, a), (name, b) in pairs if name == phase))
        return statistics.median(whole), {phase: statistics.median(found) for phase, found in phases.items()}

    def memory(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Return the bytes held between steps, and after each phase of one more step, and each phase's peak."""
        if self.device.type != "cuda":
            return 0, {}, {}
        held, levels, peaks = torch.cuda.memory_allocated(), {}, {}
        torch.cuda.reset_peak_memory_stats()

        def note(phase: str) -> None:
            levels[phase] = max(torch.cuda.memory_allocated(), levels.get(phase, 0))
            peaks[phase] = max(torch.cuda.max_memory_allocated(), peaks.get(phase, 0))
            torch.cuda.reset_peak_memory_stats()

        self.step(note)
        return held, levels, peaks

    def kernels(self) -> dict[str, float]:
        """Return the kernel seconds of one more step by kind; print the longest kernels."""
        if self.device.type != "cuda":
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            torch.cuda.synchronize()
        found = [(e.key, e.self_device_time_total / 1e6, e.count) for e in profile.key_averages()]
        for name, seconds, count in sorted(found, key=lambda row: -row[1])[:30]:
            print(f"    {seconds * 1e3:9.3f} ms {count:6d} x {name[:110]}")
        sums = dict.fromkeys(KINDS, 0.0)
        for name, seconds, _ in found:
            sums[next(kind for kind, words in KINDS.items() if re.search(words, name))] += seconds
        return sums


def build(case: Case, device: torch.device) -> Pretraining:
    """Build the module of `job=pretrain`."""
    tokens = case.sequences * case.length * case.accumulation
    settings = {"compile": case.compile, "activation_checkpointing": case.recomputation}
    module = pretraining(case.model, device, tokens, case.length, **settings)
    with device:
        module.configure_model()
    return module


def measure(case: Case, device: torch.device) -> Measured:
    """Build the case and train it for a few steps."""
    torch.compiler.reset()
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    where = (torch.cuda.get_device_name() if on_gpu else "", torch.__version__)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    training = Training(case, device)
    for _ in range(WARM - 1):
        training.step()
    if on_gpu:  # exclude the memory of compiling and tuning
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    loss = training.step()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    seconds, phases = training.timed()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    rate = training.micro_tokens * case.accumulation / seconds
    memory = training.memory()
    return Measured(case, *where, "", rate, peak, *memory, phases, training.kernels())


def attempt(case: Case, device: torch.device) -> Measured:
    """Return `measure` or the reason of its failure; then free the memory."""
    where = (torch.cuda.get_device_name() if device.type == "cuda" else "", torch.__version__)
    try:
        return measure(case, device)
    except torch.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:  # still measure the others
        note = one_line(error)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Measured(case, *where, note)


def planned(case: Case, gpu: str, version: str) -> tuple[float, float]:
    """Return the plan's (peak bytes, tokens per second) for a GPU and a version of torch."""
    if version.startswith("2.11."):
        eager.NORMS_IN_FLOAT32 = False
    cfg = compose(f"model={case.model}")
    setup = Setup(
        gpu=gpu,
        sequence_length=case.length,
        micro_batch_size=case.sequences,
        batch_tokens=case.sequences * case.length * case.accumulation,
        compile=case.compile,
        recomputation=case.recomputation,
        fused_optimizer=True,
    )
    found = estimate(hydra.utils.instantiate(cfg.model, _convert_="all"), setup)
    return found.memory.peak, found.speed.tokens_per_second


def side_by_side(measured: Measured, default_gpu: str) -> list[str]:
    """Return one line of the table."""
    case = measured.case
    cells = [case.model, f"{case.sequences} x {case.length}", str(case.accumulation)]
    cells += ["compiled" if case.compile else "eager", case.recomputation]
    peak, rate = planned(case, measured.gpu or default_gpu, measured.torch)
    if measured.note:
        return [*cells, f"{peak / GIB:.1f}", measured.note, "", f"{rate:,.0f}", "", ""]
    cells += [f"{peak / GIB:.1f}", f"{measured.peak / GIB:.1f}"]
    cells += [f"{peak / measured.peak - 1:+.1%}" if measured.peak else ""]
    return [
        *cells,
        f"{rate:,.0f}",
        f"{measured.tokens_per_second:,.0f}",
        f"{rate / measured.tokens_per_second - 1:+.1%}",
    ]


def page(results: list[Measured], default_gpu: str) -> str:
    """Return the Markdown page."""
    header = ["model", "micro-batch", "micro-batches", "blocks", "recomputed", "plan GiB", "measured GiB", "error"]
    header += ["plan tokens/s", "measured tokens/s", "error"]
    where = sorted({f"{m.gpu or 'no GPU'}, torch {m.torch}" for m in results})
    return (
        "# The plan against what was measured\n\n"
        f"{datetime.date.today()}; {'; '.join(where)}. Peak of allocated memory, and tokens a second, of `job=plan` "
        f"and of {TIMED} training steps as `job=pretrain` makes them: bfloat16 autocast, fused AdamW. By "
        "`python -m benchmarks.pretraining.plan_against_measured`.\n\n"
        + table(header, [side_by_side(m, default_gpu) for m in results])
    )


def csv_of(results: list[Measured]) -> str:
    """Return the CSV text of all measurements."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(results[0].row()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(m.row() for m in results)
    return out.getvalue()


def main() -> int:
    """Measure and plan, or only plan again; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="plan anew beside the values of the CSV file")
    parser.add_argument("--cases", nargs="+", type=int, help="numbers of the cases, from 0; default all")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no case is begun")
    parser.add_argument("--gpu", default="H200", help="what is planned for where nothing was measured on a GPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    data, text = (arguments.output / f"plan_against_measured.{ending}" for ending in ("csv", "md"))
    if arguments.again:
        with open(data, newline="") as handle:
            results = [Measured.of_row(row) for row in csv.DictReader(handle)]
        write_atomic(text, page(results, arguments.gpu))
        print(text.read_text())
        return 0
    check_output(parser, arguments.output)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = CASES if device.type == "cuda" else TINY
    began, results = time.perf_counter(), []
    for case in cases if arguments.cases is None else [cases[number] for number in arguments.cases]:
        if time.perf_counter() - began > arguments.limit:
            print(f"no time left for {case}")
            continue
        results.append(attempt(case, device))
        print(f"[{time.perf_counter() - began:5.0f} s] {results[-1]}", flush=True)
        write_atomic(data, csv_of(results))
    write_atomic(text, page(results, arguments.gpu))
    print(text.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
