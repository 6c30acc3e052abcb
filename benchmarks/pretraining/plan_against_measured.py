"""Estimates of `job=plan` against measurements: `python -m benchmarks.pretraining.plan_against_measured`.

A few training steps of each case, like those of `job=pretrain`: its module and loss, fused AdamW, bfloat16 autocast,
random tokens, one sequence a document, gradients dropped where Lightning drops them. Measured are the peak of allocated
memory, its levels and peaks by phase, tokens a second, and the kernels' time by kind (one more step, profiled).

The measured values go to a CSV file after each case; `--again` reads them from there and repeats the plan, without a
GPU.
"""

import csv
import datetime
import io
import itertools
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import Tensor

from benchmarks.measuring.configuration import compose
from benchmarks.measuring.report import CommandLine, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import (
    allocated,
    default_device,
    elapsed,
    free_memory,
    one_line,
    peak_allocated,
    refuse_divergence,
    synchronize,
    timestamp,
)
from benchmarks.pretraining.modules import pretraining, random_batch
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


# Of the CSV file: the case, where it was measured, why it was not; then memory in bytes and seconds per step. held:
# allocated between two steps. levels, peaks: allocated after each phase and at most within it, of the micro-batch that
# had most. phases: seconds of each, all micro-batches together. kernels: their seconds, by kind.
COLUMNS = (
    *(field.name for field in fields(Case)),
    *("gpu", "torch", "note", "tokens_per_second", "peak", "held"),
    *(f"{name}_{phase}" for name in ("levels", "peaks", "phases") for phase in PHASES),
    *(f"kernels_{kind}" for kind in KINDS),
)


class Training:
    """Training steps of one case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.module = build(case, device)
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        self.micro_tokens = case.sequences * case.length
        self.batch = random_batch(self.module, self.micro_tokens, case.length, device)

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
            clocks = [("", timestamp(self.device))]
            self.step(lambda phase, clocks=clocks: clocks.append((phase, timestamp(self.device))))
            whole.append(elapsed(clocks[0][1], clocks[-1][1]))
            for phase in PHASES:
                pairs = itertools.pairwise(clocks)
                phases[phase].append(sum(elapsed(a, b) for (_, a), (name, b) in pairs if name == phase))
        return statistics.median(whole), {phase: statistics.median(found) for phase, found in phases.items()}

    def memory(self) -> dict[str, int]:
        """Return the bytes held between steps, and after each phase of one more step, and each phase's peak."""
        if self.device.type != "cuda":
            return {}
        found = {"held": torch.cuda.memory_allocated()}
        torch.cuda.reset_peak_memory_stats()

        def note(phase: str) -> None:
            for name, size in (("levels", allocated(self.device)), ("peaks", peak_allocated(self.device))):
                found[f"{name}_{phase}"] = max(size, found.get(f"{name}_{phase}", 0))
            torch.cuda.reset_peak_memory_stats()

        self.step(note)
        return found

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
        sums = dict.fromkeys((f"kernels_{kind}" for kind in KINDS), 0.0)
        for name, seconds, _ in found:
            kind = next(kind for kind, words in KINDS.items() if re.search(words, name))
            sums[f"kernels_{kind}"] += seconds
        return sums


def build(case: Case, device: torch.device) -> Pretraining:
    """Build the module of `job=pretrain`."""
    tokens = case.sequences * case.length * case.accumulation
    settings = {"compile": case.compile, "activation_checkpointing": case.recomputation}
    module = pretraining(case.model, device, tokens, case.length, **settings)
    with device:
        module.configure_model()
    return module


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Build the case and train it for a few steps; return its values in `COLUMNS`."""
    torch.compiler.reset()
    torch.manual_seed(0)
    training = Training(case, device)
    for _ in range(WARM - 1):
        training.step()
    synchronize(device)
    if device.type == "cuda":  # exclude the memory of compiling and tuning
        torch.cuda.reset_peak_memory_stats()
    refuse_divergence(training.step())
    seconds, phases = training.timed()
    return {
        "peak": peak_allocated(device),
        "tokens_per_second": training.micro_tokens * case.accumulation / seconds,
        **{f"phases_{phase}": found for phase, found in phases.items()},
        **training.memory(),
        **training.kernels(),
    }


def attempt(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the line of a case: what `measure` found, or why it failed. Free the memory before."""
    free_memory()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else ""
    line = {**asdict(case), "gpu": gpu, "torch": torch.__version__}
    try:
        return line | measure(case, device)
    except torch.OutOfMemoryError:
        return line | {"note": "out of memory"}
    except Exception as error:  # still measure the others
        return line | {"note": one_line(error)}


def planned(case: Case, gpu: str, version: str) -> tuple[float, float]:
    """Return the plan's (peak bytes, tokens per second) for a GPU and a version of torch."""
    eager.NORMS_IN_FLOAT32 = not version.startswith("2.11.")
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


def side_by_side(line: dict[str, str]) -> list[str]:
    """Return one line of the table, of one of the CSV file; what was measured without a GPU is planned for an H200."""
    sizes = {name: int(line[name]) for name in ("length", "sequences", "accumulation")}
    case = Case(line["model"], **sizes, compile=line["compile"] == "True", recomputation=line["recomputation"])
    cells = [case.model, f"{case.sequences} x {case.length}", str(case.accumulation)]
    cells += ["compiled" if case.compile else "eager", case.recomputation]
    peak, rate = planned(case, line["gpu"] or "H200", line["torch"])
    if line["note"]:
        return [*cells, f"{peak / GIB:.1f}", line["note"], "", f"{rate:,.0f}", "", ""]
    found_peak, found_rate = int(line["peak"]), float(line["tokens_per_second"])
    error = f"{peak / found_peak - 1:+.1%}" if found_peak else ""
    cells += [f"{peak / GIB:.1f}", f"{found_peak / GIB:.1f}", error]
    return [*cells, f"{rate:,.0f}", f"{found_rate:,.0f}", f"{rate / found_rate - 1:+.1%}"]


def report(data: Path) -> str:
    """Return the Markdown page of the CSV file."""
    with open(data, encoding="utf-8", newline="") as handle:
        lines = list(csv.DictReader(handle))
    header = ["model", "micro-batch", "micro-batches", "blocks", "recomputed", "plan GiB", "measured GiB", "error"]
    header += ["plan tokens/s", "measured tokens/s", "error"]
    where = sorted({f"{line['gpu'] or 'no GPU'}, torch {line['torch']}" for line in lines})
    return page(
        "The plan against what was measured",
        f"{datetime.date.today()}; {'; '.join(where)}. Peak of allocated memory, and tokens a second, of `job=plan` "
        f"and of {TIMED} training steps as `job=pretrain` makes them: bfloat16 autocast, fused AdamW. By "
        "`python -m benchmarks.pretraining.plan_against_measured`.",
        table(header, map(side_by_side, lines)),
    )


def write_lines(data: Path, lines: list[dict[str, Any]]) -> None:
    """Write the CSV file of all measurements."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(data, out.getvalue())


def main() -> int:
    """Measure and plan, or only plan again; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--again", action="store_true", help="plan anew beside the values of the CSV file")
    parser.add_argument("--cases", nargs="+", type=int, help="numbers of the cases, from 0; default all")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no case is begun")
    arguments = parser.parse_args()
    if not arguments.again:
        parser.keep_results(arguments)
    data, text = (arguments.output / f"plan_against_measured.{ending}" for ending in ("csv", "md"))
    device, lines = default_device(), []
    cases = CASES if device.type == "cuda" else TINY
    chosen = cases if arguments.cases is None else [cases[number] for number in arguments.cases]
    began = time.perf_counter()
    for case in () if arguments.again else chosen:
        if time.perf_counter() - began > arguments.limit:
            print(f"no time left for {case}")
            continue
        lines.append(attempt(case, device))
        print(f"[{time.perf_counter() - began:5.0f} s] {lines[-1]}", flush=True)
        write_lines(data, lines)
    publish(text, report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
