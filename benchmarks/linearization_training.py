"""Training speed of linearization: `python -m benchmarks.linearization_training`.

Tokens a second and memory of whole optimizer steps (forward, backward, clipping, AdamW on LoRA's weights), on random
weights and tokens, against the layers of the official code of arXiv 2503.01496 on the best parts that run here
(benchmarks/linearization_peers.py). What is timed has first been held to the float32 definition.
"""

import argparse
import gc
import importlib.metadata
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import side_by_side, tables
from benchmarks.linearization_peers import (
    WINDOW,
    WINDOWED,
    Attention,
    banded,
    peer,
    peer_loss,
    plain_recurrence,
    why_not_theirs,
)
from benchmarks.linearization_steps import (
    SHAPES,
    Shape,
    Trained,
    allocated,
    draw_lora,
    errors,
    our_builders,
    our_loss,
    ours,
    peer_builders,
    refuse,
    stock_model,
    timed_step,
)
from benchmarks.measuring import milliseconds, one_line, relative_error
from benchmarks.peer_tuning import tune
from benchmarks.tables import table

WARM, ROUNDS, STEPS = 2, 5, 2  # steps before the first round; rounds; timed steps of each implementation in a round
TARGET = 1.5
# Relative errors that are allowed, of the loss and of LoRA's gradients. Matrices are multiplied in TF32 for float32.
SMALL = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (1e-2, 5e-2)}
LARGE = (1e-2, 0.1)  # of a deep network in bfloat16, from the peer's


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """milliseconds: of a step. first_seconds: of a micro-batch and then a step, the first ones, compilation included.
    loss_error, gradient_error: relative, from the first implementation of the section."""

    tokens_per_second: float | None = None
    peak_gib: float | None = None
    first_seconds: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None


@dataclass(kw_only=True)
class Run(side_by_side.Run):
    """The report."""

    name = "linearization_training"
    title = "Training speed of linearization"
    preamble = (
        f"Liger-GLA (window {WINDOW}) with LoRA of rank 8 on q, k and v, bfloat16 weights. A step is forward, backward "
        "and clipping over a whole batch, and AdamW on LoRA's weights; random weights and tokens. Medians; "
        "implementations take turns. GiB: the peak of allocated memory, each with its own copy of the weights."
    )
    row = Row

    def versions(self) -> str:
        found = [super().versions()]
        for package in ("transformers", "peft", "flash-linear-attention"):
            try:
                found.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"no {package}")
        return ", ".join(found)


def check(run: Run, shape: Shape, peer_dtypes: Sequence[str]) -> set[str]:
    """Hold ours and the peer to the float32 definition on a small model; of "ours" and "fla", those that are right."""
    device = run.device
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=device)
    band = banded(shape.length, device)
    definition = draw_lora(peer(stock_model(shape, device, torch.float32), band, plain_recurrence))
    exact = Trained("definition", definition, peer_loss).loss_and_gradients(tokens)
    makers = {
        "ours": (ours, our_loss),
        "fla, float32 q, k, v": (lambda stock: peer(stock, band), peer_loss),
        "fla, bfloat16 q, k, v": (lambda stock: peer(stock, band, dtype=torch.bfloat16), peer_loss),
    }
    lines, right = [], {}
    for dtype, allowed in SMALL.items():
        for name, (make, loss) in makers.items():
            if dtype is torch.float32 and "bfloat16" in name:
                continue
            if name != "ours" and not any(kind in name for kind in peer_dtypes):
                continue
            try:
                model = draw_lora(make(stock_model(shape, device, dtype)))
                found = errors(Trained(name, model, loss).loss_and_gradients(tokens), exact)
                refuse(found, allowed)
                note = "yes"
            except Exception as error:  # the others are checked all the same
                found, note = (math.nan, math.nan), one_line(error)
            right[name] = right.get(name, True) and note == "yes"
            lines.append([f"{name}, {str(dtype)[6:]} weights", *(f"{error:.1e}" for error in found), note])
            run.say(f"check: {lines[-1]}")
    shown = (
        f"{shape.layers} layers, {shape.heads} query heads and {shape.key_heads} key heads of "
        f"{shape.hidden // shape.heads}, {shape.batch} x {shape.length} tokens: relative errors from the definition, "
        "token by token in float32, on the same weights."
    )
    run.add_section("Correctness", shown, table(["", "loss", "gradients of LoRA", "right"], lines))
    return {"ours", "fla"} - {name.partition(",")[0] for name, is_right in right.items() if not is_right}


def choose_attention(run: Run, shape: Shape) -> Attention:
    """The fastest windowed attention for the peer, of those that are right, at the largest micro-batch."""
    size = (max(shape.micro_batches), shape.length, shape.heads, shape.hidden // shape.heads)
    q, k, v, d_out = (torch.randn(size, device=run.device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact_leaves = [x.detach().float().requires_grad_() for x in leaves]
    exact = banded(shape.length, run.device)(*exact_leaves)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, d_out.float())
    times, lines, made = {}, [], {}
    for name, make in WINDOWED.items():
        try:
            made[name] = attend = make(shape.length, run.device)

            def both(attend: Attention = attend) -> tuple[Tensor, ...]:
                out = attend(*leaves)
                return out, *torch.autograd.grad(out, leaves, d_out)

            worst = max(relative_error(a, b.double()) for a, b in zip(both(), (exact, *exact_gradients), strict=True))
            if worst > 2e-2:
                raise RuntimeError(f"a relative error of {worst:.1e}")
            times[name] = launched_milliseconds(both, run.device)
            lines.append([name, f"{times[name]:.3f}"])
        except Exception as error:
            lines.append([name, one_line(error)])
    best = min(times, key=times.get)
    run.add_section(
        "The peer's attention",
        f"Milliseconds, forward + backward, {' x '.join(map(str, size))} (K and V repeated). {best} is taken.",
        table(["", "milliseconds"], lines),
    )
    return made[best]


def launched_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a call. Nothing is captured into a graph: where that fails, the device draws no numbers
    afterwards."""
    if device.type != "cuda":
        return milliseconds(run, device)
    from triton.testing import do_bench

    return do_bench(run, return_mode="median")


def prepare(
    run: Run, shape: Shape, micro_batch: int, builders: dict[str, Callable], tokens: Tensor
) -> tuple[list[Trained], dict[str, dict[str, object]]]:
    """Build, check and warm each; those that may be timed, and what is known of each by name."""
    ready, known, exact = [], {}, None
    for name, build in builders.items():
        about = known[name] = {}
        trained = None
        try:
            before = allocated(run.device)
            trained = build(shape, run.device)
            began = time.perf_counter()
            found = trained.loss_and_gradients(tokens[:micro_batch])
            if exact is None:
                exact = found
            else:
                about["loss_error"], about["gradient_error"] = apart = errors(found, exact)
                refuse(apart, LARGE)
            trained.step(tokens, micro_batch)
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            about["first_seconds"] = time.perf_counter() - began
            for _ in range(WARM - 1):
                trained.step(tokens, micro_batch)
            trained.resident = allocated(run.device) - before
            ready.append(trained)
            run.say(f"{shape}, micro-batch {micro_batch}, {name}: ready after {about['first_seconds']:.0f} s")
        except Exception as error:  # the others are timed all the same
            about["note"] = one_line(error)
            run.say(f"{shape}, micro-batch {micro_batch}, {name}: {about['note']}")
            del trained
            _clear()
    return ready, known


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(run: Run, shape: Shape, micro_batch: int, builders: dict[str, Callable], rounds: int) -> dict[str, Row]:
    """Train each in turns; a row for each implementation."""
    torch.compiler.reset()
    _clear()
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=run.device)
    ready, known = prepare(run, shape, micro_batch, builders, tokens)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for number in range(rounds):
        for trained in list(ready):
            if trained.published and number:  # slower, and not what decides: one round
                continue
            try:
                for _ in range(STEPS):
                    elapsed, peak = timed_step(trained, tokens, micro_batch)
                    seconds.setdefault(trained.name, []).append(elapsed)
                    peaks[trained.name] = max(peaks.get(trained.name, 0), peak)
            except Exception as error:
                known[trained.name]["note"] = one_line(error)
                seconds.pop(trained.name, None)
                ready.remove(trained)
    rows = {}
    for name, about in known.items():
        median = statistics.median(seconds[name]) if name in seconds else None
        rows[name] = Row(
            section=f"micro-batch {micro_batch}",
            implementation=name,
            shape=shape,
            parameter=f"micro-batch {micro_batch}",
            passes="step",
            milliseconds=None if median is None else median * 1e3,
            tokens_per_second=None if median is None else tokens.numel() / median,
            peak_gib=peaks.get(name, 0) / 2**30 or None,
            **about,
        )
    run.add_rows(list(rows.values()))
    return rows


def speed_table(rows: dict[str, Row], base: str | None = None) -> str:
    """A line for each implementation; base: the one whose speed is 1."""
    reference = rows[base].tokens_per_second if base in rows else None
    lines = []
    for name, row in rows.items():
        if row.tokens_per_second is None:
            lines.append([name, row.note, *[""] * 6])
            continue
        lines.append(
            [
                name,
                f"{row.tokens_per_second:,.0f}",
                f"{row.tokens_per_second / reference:.2f}" if reference else "",
                f"{row.milliseconds:.0f}",
                f"{row.peak_gib:.1f}" if row.peak_gib else "",
                f"{row.first_seconds:.0f}",
                "" if row.loss_error is None else f"{row.loss_error:.1e}",
                "" if row.gradient_error is None else f"{row.gradient_error:.1e}",
            ]
        )
    header = ["", "tokens/s", "ratio", "step, ms", "peak GiB", "first step, s", "loss apart", "gradients apart"]
    return table(header, lines)


def compare(run: Run, shape: Shape, micro_batch: int, builders: dict[str, Callable]) -> None:
    """Ours against the peer with one micro-batch's size."""
    rows = measure(run, shape, micro_batch, builders, ROUNDS)
    base = "fla, float32 q, k, v"
    run.add_section(
        f"{shape}, {shape.batch} x {shape.length} tokens a step, micro-batch {micro_batch}",
        "Ratio: to the official layers on fla's ops, not compiled, as their code runs. Apart: relative errors from the "
        "first line. What the official trainer does: anomaly detection in the backward pass, logits copied to the "
        f"host, the pooling of gates as a layer (median of {STEPS} steps). Compiled: each decoder layer's forward. "
        "bfloat16 q, k, v: kinder than their code, which has float32.",
        speed_table(rows, base),
    )
    against = {
        "ours": [base],
        "ours, compiled": ["fla, float32 q, k, v, compiled", "fla, with what the official trainer does"],
    }
    for mine, other in ((mine, other) for mine, others in against.items() for other in others):
        rates = [rows[name].tokens_per_second for name in (mine, other) if name in rows]
        if len(rates) == 2 and None not in rates:
            what = f"micro-batch {micro_batch}: tokens/s of {mine}, to {other}"
            run.judge(what, rates[0] / rates[1], TARGET, at_least=True)
    run.write()


def large(run: Run, shape: Shape) -> None:
    """Ours alone, on a model that fills more of the device."""
    rows = {}
    for micro_batch in shape.micro_batches:
        builders = {"ours, compiled": our_builders()["ours, compiled"]}
        found = measure(run, shape, micro_batch, builders, rounds=2)
        rows |= {f"{name}, micro-batch {micro_batch}": row for name, row in found.items()}
    run.add_section(f"{shape}, {shape.batch} x {shape.length} tokens a step, on one device", speed_table(rows))


def main() -> int:
    """Check, measure, and leave the report. Returns the status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=("1b", "tiny"), default="1b", help="tiny: to try the flow, all of it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sections", nargs="+", choices=("training", "large"), default=("training", "large"))
    known = ("float32", "bfloat16")
    parser.add_argument("--peer-dtypes", nargs="+", choices=known, default=known, help="of the peer's q, k, v")
    parser.add_argument("--processes", type=int, default=8, help="that compile the peer's kernels")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    # A compiled function is one for each implementation; without this, dynamo would give up on the later ones.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    run = Run(device=torch.device(arguments.device), longest=1024, folder=arguments.output)
    shape = SHAPES[arguments.shape]
    run.add_section("What the official package does not find here", "\n".join(f"- {x}" for x in why_not_theirs()))
    if run.device.type == "cuda" and "training" in arguments.sections:
        size = (max(shape.micro_batches), shape.length, shape.heads, shape.hidden // shape.heads)
        for name in arguments.peer_dtypes:
            tune(*size, getattr(torch, name), processes=arguments.processes)
            run.say(f"the peer's kernels are tuned for {' x '.join(map(str, size))} in {name}")
    right = check(run, SHAPES["check"], arguments.peer_dtypes)
    builders = our_builders() if "ours" in right else {}
    sections: list[Callable[[], None]] = []
    if "training" in arguments.sections:
        peers = peer_builders(choose_attention(run, shape)) if "fla" in right else {}
        without = [kind for kind in known if kind not in arguments.peer_dtypes]
        peers = {name: build for name, build in peers.items() if not any(kind in name for kind in without)}
        sections += [partial(compare, run, shape, size, peers | builders) for size in shape.micro_batches]
    if "large" in arguments.sections and builders:
        sections.append(partial(large, run, SHAPES["8b"] if arguments.shape == "1b" else shape))
    failed = 2 - len(right)
    for section in sections:
        try:
            section()
        except Exception as error:  # the other sections are still worth their time
            failed += 1
            run.say(f"{section.func.__name__}: {one_line(error)}")
    print(run.text())
    run.print_verdicts()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
