"""Decoding of linearized models: `python -m benchmarks.linearization.linearized_decoding`.

Liger, Liger with every 8th layer left as softmax, the same model with this project's attention over a static cache in
all layers, and Hugging Face's Llama with its static cache and SDPA: one set of random weights, every token one replay
of a CUDA graph. Errors are checked first; if they are out of bounds, nothing is timed.

Without a GPU it only serves to test this program: `--shape tiny --lengths 16 32`.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

from benchmarks.linearization.decoding_checks import (
    BEST,
    HYBRID,
    KERNEL_BOUNDS,
    LIGER,
    SHAPES,
    SOFTMAX,
    decoding_errors,
    kernel_error,
    liger_error,
    new_model,
    product_error,
    settings_of,
)
from benchmarks.linearization.decoding_operations import operations
from benchmarks.measuring import tables
from benchmarks.measuring.comparison_run import Measured, Run
from benchmarks.measuring.pictures import Panel, draw_lengths
from benchmarks.measuring.report import CommandLine
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import (
    allocated,
    clock,
    elapsed,
    free_memory,
    one_line,
    peak_allocated,
    timestamp,
)
from lit_modules.generation.cuda_graphs import WARM_UP, DecodingStep, Output, Replay
from lit_modules.networks.linearized import linearize
from lit_modules.networks.positions import locate

HUGGING_FACE, FUSED, COMPILED = "HF static, SDPA", ", fused", ", compiled"
WAYS = (FUSED, COMPILED, "")  # of running a step; the verdict uses the first that was measured for both sides
PROMPT, POSITIONS = 4, 5
REPEATS = {"cuda": 9, "cpu": 2}
# Targets, as ratios of the seconds for a whole sequence: own attention's to Liger's.
SPEEDUPS = {1024: 1.0, 16384: 1.7, 32768: 2.6}


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """Decoding of one length. milliseconds: mean of a step; first, last: at the ends of the sequence."""

    length: int
    seconds: float | None = None
    first: float | None = None
    last: float | None = None
    allocated_gb: float | None = None
    peak_gb: float | None = None


@dataclass(kw_only=True)
class Benchmark(Run):
    """A run, with its common sizes."""

    name = "linearization.linearized_decoding"
    title = "Decoding of linearized models"
    preamble = (
        "Random weights in bfloat16, shared by all implementations. A step of decoding is embedding, layers, head and "
        "greedy choice, in one CUDA graph. The time of a step is the median of replays at five positions evenly spread "
        "over the length, and the seconds of a length are the sum over its steps by the trapezoidal rule. A cache has "
        "room for its length and no more. GB are 1e9 bytes: allocated while decoding, weights included, and the peak, "
        "a prompt of four tokens and the capture included. Compiled: the layers' step through torch.compile, before it "
        "is captured. Fused: its matrices through small_batch_linear as well, with the norms, SwiGLU and residuals "
        "around them. An absolute time holds on this GPU only: compare within the run."
    )
    row = Row
    packages = (*Run.packages, "transformers")
    batch: int = 16
    shape: str = "llama3_8b"
    implementations: Sequence[str] = ()

    def length_row(self, implementation: str, length: int, found: Measured, **numbers: float) -> Row:
        """Return the row of one implementation at one length."""
        parameter = f"batch {self.batch}"
        return self.new_row("decoding", implementation, self.shape, "step", found, parameter, length=length, **numbers)

    def found(self, implementation: str, length: int) -> Row | None:
        """Return the row of an implementation and length, or None."""
        rows = (row for row in self.rows if row.milliseconds and row.length == length)
        return next((row for row in rows if row.implementation == implementation), None)


def check(run: Benchmark) -> list[str]:
    """Write the error tables; return what is out of bounds."""
    wrong, lines = [], []
    errors = {"windowed_step": kernel_error, "liger_step": liger_error, "small_batch_linear": product_error}
    for (name, error_of), (dtype, bound) in product(errors.items(), KERNEL_BOUNDS.items()):
        error = error_of(run.device, dtype)
        lines.append([f"{name}, {dtype}, against float64", f"{error:.1e}", f"{bound:.1e}"])
        run.say(f"error of {' '.join(lines[-1])}")
        wrong += [lines[-1][0]] * (not error <= bound)
    shape = "small" if run.device.type == "cuda" else "tiny"
    variants = [(HYBRID, FUSED), (BEST, FUSED), (LIGER, ""), (SOFTMAX, "")]
    for name, way in variants:
        compiled = bool(way) and run.device.type == "cuda"
        decoded, parallel = decoding_errors(name, shape, run.device, fused=way == FUSED, compiled=compiled)
        # Decoding rounds other sums than the parallel pass, to the same precision.
        bound = 2 * parallel + 1e-3
        label = f"{name}{way}: logits of captured decoding, bfloat16, against float32"
        lines.append([label, f"{decoded:.1e}", f"{bound:.1e}"])
        run.say(f"error of {' '.join(lines[-1])}")
        wrong += [label] * (not decoded <= bound)
    run.add_section(
        "Errors",
        "Relative, in the 2-norm. windowed_step and liger_step: outputs and state over 90 tokens, sinks and left "
        "padding included, of the latter in bfloat16 with every gate. "
        "small_batch_linear: the worst of odd sizes, and in bfloat16 of the products of a layer, up to 64 rows. "
        f"Captured decoding of 190 tokens with the shape called {shape}, rows padded on the left; its bound is twice "
        "what the parallel pass in bfloat16 is off by.",
        table(["", "error", "bound"], lines),
    )
    return wrong


class StockStep:
    """One token of Hugging Face's own model and cache, with the interface of `DecodingStep`."""

    def __init__(self, model: LlamaForCausalLM, capacity: int, token: Tensor):
        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=capacity)
        self.token, self.index = token, torch.full_like(token, PROMPT)
        self.places = torch.arange(capacity, device=token.device)
        self.output = Output(len(token), capacity, (), 0, token.device)

    def prepare(self) -> None:
        """Do nothing: nothing has to be done on the host."""

    def __call__(self) -> None:
        # Its own mask may need a synchronization with the host.
        mask = (self.places <= self.index)[:, None, None]
        logits = self.model(self.token, mask, self.index, self.cache).logits
        self.token.copy_(self.output.append(logits[:, -1].float().argmax(-1))[:, None])
        self.index += 1


@torch.no_grad()
def new_step(implementation: str, model: Any, batch: int, capacity: int, device: torch.device) -> Any:
    """Return a step whose cache has room for `capacity` tokens and holds a short prompt."""
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), device=device)
    if implementation == HUGGING_FACE:
        step = StockStep(model, capacity, prompt[:, :1].clone())
        model(prompt, past_key_values=step.cache, logits_to_keep=1)
        return step
    cache = model.new_cache(capacity)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    output = Output(batch, capacity, (), 0, device)
    positions, greedy = locate(batch, PROMPT, 0, device), lambda logits: logits.argmax(-1)
    fused = implementation.endswith(FUSED)
    # The CPU only tests this program; skip compiling there.
    compiled = (fused or implementation.endswith(COMPILED)) and device.type == "cuda"
    step = DecodingStep(model, cache, positions, greedy, output, fused=fused, compile=compiled)
    step.take(prompt[:, 0])
    return step


def move_to(step: Any, position: int) -> None:
    """Move the step's next token to `position`; the cache keeps its contents."""
    for layer in step.cache.layers:
        for name in ("counter", "place", "held", "cumulative_length"):
            if isinstance(held := getattr(layer, name, None), Tensor):
                held.fill_(position)
    index = step.index if isinstance(step, StockStep) else step.positions.index
    index.fill_(position)
    step.output.count.zero_()


def replay_milliseconds(step: Any, replay: Replay, position: int, device: torch.device) -> float:
    """Return the median time of a step at `position`."""
    times = []
    for _ in range(REPEATS[device.type]):
        move_to(step, position)
        begin = timestamp(device)
        replay()
        times.append(elapsed(begin, timestamp(device)) * 1e3)
    return statistics.median(times)


@torch.no_grad()
def warmed(step: Any) -> Replay:
    """Return the step's replays after the first calls, which compile and capture."""
    replay = Replay(step)
    for _ in range(WARM_UP + 1):
        replay()
    return replay


@torch.no_grad()
def measure(run: Benchmark, implementation: str, model: Any, length: int) -> Row:
    """Measure one implementation at one length."""
    free_memory()
    step = new_step(implementation, model, run.batch, length, run.device)
    replay = warmed(step)
    positions = [round(part * (length - 1) / (POSITIONS - 1)) for part in range(POSITIONS)]
    times = [replay_milliseconds(step, replay, max(position, PROMPT), run.device) for position in positions]
    mean = sum((a + b) / 2 for a, b in pairwise(times)) / (POSITIONS - 1)
    found = Measured(mean, "")
    numbers = {"seconds": mean * length / 1e3, "first": times[0], "last": times[-1]}
    if run.device.type == "cuda":
        numbers |= {"allocated_gb": allocated(run.device) / 1e9, "peak_gb": peak_allocated(run.device) / 1e9}
    return run.length_row(implementation, length, found, **numbers)


@torch.no_grad()
def really_decode(run: Benchmark, implementation: str, model: Any, length: int) -> float:
    """Return the seconds of all steps of a sequence."""
    step = new_step(implementation, model, run.batch, length, run.device)
    replay = warmed(step)
    move_to(step, PROMPT)
    began = clock(run.device)
    for _ in range(length - PROMPT):
        replay()
    return clock(run.device) - began


def operations_or_reason(run: Benchmark) -> None:
    """Measure the operations alone; if that fails, the models are still measured."""
    try:
        operations(run, run.batch)
    except Exception as error:
        run.say(f"operations: {one_line(error)}")


def decode(run: Benchmark) -> None:
    """Measure all implementations at all lengths.

    An implementation that raises is listed with its error; the others continue.
    """
    stock = new_model(run.shape, run.device, torch.bfloat16)
    run.say(f"weights of {sum(p.numel() for p in stock.parameters()) / 1e9:.2f}e9 parameters")
    checked = []
    for name in run.implementations:
        try:
            plain = name.removesuffix(FUSED).removesuffix(COMPILED)
            model = stock if name == HUGGING_FACE else linearize(stock, settings_of(plain, len(stock.model.layers)))
        except Exception as error:
            run.say(f"{name}: {one_line(error)}")
            continue
        torch.compiler.reset()  # otherwise sizes that differ between implementations would compile as dynamic shapes
        began = time.perf_counter()
        for length in run.lengths:
            try:
                row = measure(run, name, model, length)
            except Exception as error:  # still measure the others
                row = run.length_row(name, length, Measured(None, one_line(error)))
            run.add_rows([row])
            run.say(
                f"{name}, {length}: "
                + (f"{row.seconds:.2f} s, {row.first:.3f} to {row.last:.3f} ms" if row.milliseconds else row.note)
            )
        shortest = run.found(name, run.lengths[0])
        if shortest is not None and plain in (LIGER, SOFTMAX):
            seconds = really_decode(run, name, model, run.lengths[0])
            checked.append([f"{name}, {run.lengths[0]} tokens", f"{shortest.seconds:.3f}", f"{seconds:.3f}"])
            run.say(f"{name}: {run.lengths[0]} tokens one after the other took {seconds:.3f} s")
        del model
        run.say(f"{name}: measured in {time.perf_counter() - began:.0f} s")
    report(run, checked)


def report(run: Benchmark, checked: list[list[str]]) -> None:
    """Add verdicts, tables and the plot to the report."""
    lengths, implementations = run.lengths, run.implementations
    measured = {row.implementation for row in run.rows if row.milliseconds}
    way = next((way for way in WAYS if {LIGER + way, SOFTMAX + way} <= measured), "")
    best, peer = LIGER + way, SOFTMAX + way
    for length, target in SPEEDUPS.items():
        ours, theirs = run.found(best, length), run.found(peer, length)
        if ours and theirs:
            what = f"{length} tokens, batch {run.batch}: seconds of {peer} to those of {best}"
            run.judge(what, theirs.seconds / ours.seconds, target, at_least=True)
    ends = [run.found(best, length) for length in (lengths[0], lengths[-1])]
    if all(row and row.allocated_gb for row in ends):
        what = f"memory of {best}, {lengths[-1]} tokens to {lengths[0]}"
        run.judge(what, ends[1].allocated_gb / ends[0].allocated_gb, 1.01)
    cells = [[row.implementation, row.length, *_cells(row)] for row in run.rows]
    by_length = [[f"{length} tokens", *(_seconds_and_gb(run.found(name, length)) for name in implementations)]
                 for length in lengths]  # fmt: skip
    draw(run, run.folder / "linearized_decoding.png")
    run.add_section(
        f"Seconds / GB, batch {run.batch}, {run.shape}",
        table(["", *implementations], by_length),
        "![Seconds and memory against length](linearized_decoding.png)",
        "The same sequence decoded one token after the other, beside what the table says (its first tokens are the "
        "prompt's):",
        table(["", "by the rule, s", "decoded, s"], checked),
    )
    header = ["", "length", "ms a step", "first", "last", "seconds", "allocated, GB", "peak, GB", "note"]
    run.add_section("Steps", table(header, cells))
    print(table(["seconds / GB", *implementations], by_length))


def _cells(row: Row) -> list[str]:
    numbers = (row.milliseconds, row.first, row.last, row.seconds, row.allocated_gb, row.peak_gb)
    return [*("" if number is None else f"{number:.3f}" for number in numbers), row.note]


def _seconds_and_gb(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.seconds:.2f}" + ("" if row.allocated_gb is None else f" / {row.allocated_gb:.2f}")


def draw(run: Benchmark, path: Path) -> Path:
    """Plot seconds and gigabytes against length."""
    panels = []
    for attribute, label in (
        ("seconds", "seconds for the sequence"),
        ("allocated_gb", "GB allocated, weights included"),
    ):
        lines = {}
        for name in dict.fromkeys(row.implementation for row in run.rows):
            rows = [row for length in run.lengths if (row := run.found(name, length))]
            lines[name] = [(row.length, value) for row in rows if (value := getattr(row, attribute)) is not None]
        panels.append(Panel("", label, lines, base=2))

    def style(name: str) -> str:
        return ":" if name == HUGGING_FACE else "-" if name.endswith(FUSED) else "--"

    return draw_lengths(panels, path, f"tokens decoded, batch {run.batch}", style)


def main() -> int:
    """Check, measure, and write the report, the numbers and the plot; return the exit status."""
    everything = [name + way for way in WAYS for name in (LIGER, SOFTMAX, HYBRID, BEST)] + [HUGGING_FACE]
    usual = [name for name in everything if name.endswith(FUSED) or name == HUGGING_FACE]
    parser = CommandLine(__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 16)])
    parser.add_argument("--shape", choices=SHAPES, default="llama3_8b")
    parser.add_argument("--implementations", nargs="+", choices=everything, default=usual)
    arguments = parser.parse_for_gpu()
    torch.manual_seed(0)
    run = Benchmark(
        folder=arguments.output,
        lengths=sorted(arguments.lengths),
        batch=arguments.batch,
        shape=arguments.shape,
        implementations=arguments.implementations,
    )
    return run.finish(check(run), [operations_or_reason, decode])


if __name__ == "__main__":
    sys.exit(main())
