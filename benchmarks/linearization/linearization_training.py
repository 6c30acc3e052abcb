"""Training speed of linearization: `python -m benchmarks.linearization.linearization_training`.

Tokens a second and memory of whole optimizer steps (forward, backward, clipping, AdamW on LoRA's weights), on random
weights and tokens, against the layers of the official code of arXiv 2503.01496 on the best parts that run here
(linearization_peers.py). Each is checked against the float32 definition before it is timed. The sections can be run
separately: the report keeps an earlier run's measurements of the other, with its date.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.linearization.linearization_peers import (
    WINDOWED,
    Attention,
    banded,
    peer,
    peer_loss,
    plain_recurrence,
    tune,
    why_not_theirs,
)
from benchmarks.linearization.linearization_report import LARGE, TRAINING, Row, Run
from benchmarks.linearization.linearization_steps import (
    SHAPES,
    Shape,
    Trained,
    draw_lora,
    errors,
    first_passes,
    our_builders,
    our_loss,
    ours,
    peer_builders,
    refuse,
    stock_model,
    timed_step,
)
from benchmarks.measuring import compilation
from benchmarks.measuring.parallel_tuning import tune_in_parallel
from benchmarks.measuring.report import RESULTS, CommandLine
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import (
    allocated,
    free_memory,
    one_line,
    relative_error,
    synchronize,
    timed,
)

PEER_DTYPES = ("float32", "bfloat16")  # of q, k, v
WARM, STEPS = 2, 2  # warm-up steps; timed steps of each implementation in a round
ROUNDS = {TRAINING: 5, LARGE: 2}
# Bounds on the relative errors of the loss and of LoRA's gradients. float32 products use TF32.
SMALL = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (1e-2, 5e-2)}
DEEP = (1e-2, 0.1)  # of a deep network in bfloat16, relative to the peer


def compile_kernels(run: Run, shape: Shape, sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile all kernels that ours launches on a GPU, in parallel."""
    if run.device.type != "cuda":
        return
    compiled = compilation.CompilationTimes()
    try:
        compilation.compile_at_once(first_passes, shape, sizes, run.device, dtype)
        words = "compiled at once"
    except Exception as error:  # each then compiles at its first launch
        words = f"not compiled at once: {one_line(error)}"
    run.say(f"{shape}, {str(dtype)[6:]}: kernels {words} ({compiled.since_asked()})")


def check(run: Run, shape: Shape, dtypes: Sequence[torch.dtype], peer_dtypes: Sequence[str]) -> set[str]:
    """Check ours and the peer against the float32 definition on a small model, with weights of these dtypes.

    Return which of "ours" and "fla" are right.
    """
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
    for dtype in dtypes:
        compile_kernels(run, shape, [shape.batch], dtype)
        for name, (make, loss) in makers.items():
            if dtype is torch.float32 and "bfloat16" in name:
                continue
            if name != "ours" and not any(kind in name for kind in peer_dtypes):
                continue
            try:
                model = draw_lora(make(stock_model(shape, device, dtype)))
                found = errors(Trained(name, model, loss).loss_and_gradients(tokens), exact)
                refuse(found, SMALL[dtype])
                note = "yes"
            except Exception as error:  # still check the others
                found, note = (math.nan, math.nan), one_line(error)
            right[name] = right.get(name, True) and note == "yes"
            lines.append([f"{name}, {str(dtype)[6:]} weights", *(f"{error:.1e}" for error in found), note])
            run.say(f"check: {lines[-1]}")
    shown = (
        f"{shape.layers} layers, {shape.heads} query heads and {shape.key_heads} key heads of "
        f"{shape.hidden // shape.heads}, {shape.batch} x {shape.length} tokens: relative errors from the definition, "
        "token by token in float32, on the same weights."
    )
    title = f"Correctness with heads of {shape.hidden // shape.heads}"
    run.add_section(title, shown, table(["", "loss", "gradients of LoRA", "right"], lines))
    return {"ours", "fla"} - {name.partition(",")[0] for name, is_right in right.items() if not is_right}


def choose_attention(run: Run, shape: Shape) -> Attention:
    """Return the peer's fastest correct windowed attention at the largest micro-batch."""
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
    """Return the median time of a call, without a CUDA graph: a failed capture breaks the device's random generator."""
    if device.type != "cuda":
        return timed(run, device)[0]
    from triton.testing import do_bench

    return do_bench(run, return_mode="median")


def build(run: Run, shape: Shape, builders: dict[str, Callable]) -> dict[str, Trained | str]:
    """Build each model by name, once for all micro-batches; store the reason for each failure instead."""
    built: dict[str, Trained | str] = {}
    for name, make in builders.items():
        before, began = allocated(run.device), time.perf_counter()
        try:
            trained = make(shape, run.device)
            synchronize(run.device)
            trained.resident = allocated(run.device) - before
            built[name] = trained
            words = f"built in {time.perf_counter() - began:.0f} s, {trained.resident / 2**30:.1f} GiB"
        except Exception as error:  # still build the others
            words = built[name] = one_line(error)
            trained = None
            free_memory()
        run.say(f"{shape}, {name}: {words}")
    return built


def prepare(
    run: Run, shape: Shape, micro_batch: int, built: dict[str, Trained | str], tokens: Tensor
) -> tuple[list[Trained], dict[str, dict[str, object]]]:
    """Check and warm up each; return those that may be timed, and the facts about each by name."""
    ready, known, exact = [], {}, None
    compiled = compilation.CompilationTimes()
    for name, trained in built.items():
        about = known[name] = {}
        if isinstance(trained, str):
            about["note"] = trained
            continue
        here = f"{shape}, micro-batch {micro_batch}, {name}"
        try:
            before = allocated(run.device)
            draw_lora(trained.model)  # steps at another micro-batch changed them
            began = time.perf_counter()
            found = trained.loss_and_gradients(
                tokens[:micro_batch],
                lambda passed, here=here: run.say(f"{here}: first {passed} ({compiled.since_asked()})"),
            )
            if exact is None:
                exact = found
            else:
                about["loss_error"], about["gradient_error"] = apart = errors(found, exact)
                refuse(apart, DEEP)
            trained.step(tokens, micro_batch)
            synchronize(run.device)
            about["first_seconds"] = time.perf_counter() - began
            for _ in range(WARM - 1):
                trained.step(tokens, micro_batch)
            trained.resident += allocated(run.device) - before
            ready.append(trained)
            words = f"ready after {about['first_seconds']:.0f} s ({compiled.since_asked()})"
        except Exception as error:  # still time the others
            words = about["note"] = one_line(error)
            free_memory()
        run.say(f"{here}: {words}")
    return ready, known


def measure(run: Run, section: str, shape: Shape, micro_batch: int, built: dict[str, Trained | str]) -> None:
    """Train the implementations in turn; add a row for each."""
    torch.compiler.reset()  # otherwise each call would first check the guards of other sizes
    free_memory()
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=run.device)
    ready, known = prepare(run, shape, micro_batch, built, tokens)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for number in range(ROUNDS[section]):
        for trained in list(ready):
            if trained.published and number:  # slower, and not part of the verdict: one round
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
    rows = []
    for name, about in known.items():
        median = statistics.median(seconds[name]) if name in seconds else None
        rows.append(
            Row(
                section=section,
                implementation=name,
                shape=shape,
                parameter=f"micro-batch {micro_batch}",
                passes="step",
                milliseconds=None if median is None else median * 1e3,
                tokens_per_second=None if median is None else tokens.numel() / median,
                peak_gib=peaks.get(name, 0) / 2**30 or None,
                date=run.date,
                machine=run.machine,
                **about,
            )
        )
    run.add_rows(rows)
    run.say(f"{shape}, micro-batch {micro_batch}: timed")


def compare(run: Run, section: str, shape: Shape, builders: dict[str, Callable]) -> list[str]:
    """Compare implementations on one shape at each micro-batch size; return failures, one line each."""
    failures = []
    compile_kernels(run, shape, shape.micro_batches)
    free_memory()
    built = build(run, shape, builders)
    for size in shape.micro_batches:
        try:
            measure(run, section, shape, size, built)
        except Exception as error:  # still measure the other sizes
            failures.append(f"{section}, micro-batch {size}: {one_line(error)}")
    return failures


def training(run: Run, shape: Shape, peer_dtypes: Sequence[str]) -> list[str]:
    """Compare ours with the peer's; return failures, one line each."""
    run.add_section("What the official package does not find here", "\n".join(f"- {x}" for x in why_not_theirs()))
    if run.device.type == "cuda":
        tune_in_parallel()
        size = (max(shape.micro_batches), shape.length, shape.heads, shape.hidden // shape.heads)
        for name in peer_dtypes:
            tune(size, getattr(torch, name))
            run.say(f"the peer's kernels are tuned for {' x '.join(map(str, size))} in {name}")
    right = check(run, SHAPES["check"], tuple(SMALL), peer_dtypes)
    failures = [f"{name} is not right" for name in ("ours", "fla") if name not in right]
    builders = our_builders() if "ours" in right else {}
    if "fla" in right:
        try:
            peers = peer_builders(choose_attention(run, shape))
            without = [kind for kind in PEER_DTYPES if kind not in peer_dtypes]
            builders = {n: make for n, make in peers.items() if not any(kind in n for kind in without)} | builders
        except Exception as error:  # still measure ours
            failures.append(f"the peer's attention: {one_line(error)}")
    return failures + compare(run, TRAINING, shape, builders)


def large(run: Run, shape: Shape) -> list[str]:
    """Measure ours alone, on a model that fills more of the device; return failures, one line each."""
    if "ours" not in check(run, SHAPES["check of 8b"], [torch.bfloat16], []):
        return ["ours is not right with the large model's heads"]
    return compare(run, LARGE, shape, {"ours, compiled": our_builders()["ours, compiled"]})


def main() -> int:
    """Check, measure and write the report; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--shape", choices=("1b", "tiny"), default="1b", help="tiny: to try the flow, all of it")
    parser.add_argument("--sections", nargs="+", choices=(TRAINING, LARGE), default=(TRAINING, LARGE))
    parser.add_argument("--peer-dtypes", nargs="+", choices=PEER_DTYPES, default=PEER_DTYPES, help="of q, k, v")
    arguments = parser.parse_for_gpu()
    if arguments.shape == "tiny" and arguments.output.resolve() == RESULTS:
        parser.error("--shape tiny measures nothing of worth: give it an --output of its own")
    # Each implementation compiles its own function; with the default limit dynamo would give up on later ones.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        run = Run(folder=arguments.output)
    except ValueError as error:
        parser.error(str(error))
    failures = []
    if TRAINING in arguments.sections:
        failures += training(run, SHAPES[arguments.shape], arguments.peer_dtypes)
    if LARGE in arguments.sections:
        failures += large(run, SHAPES["8b" if arguments.shape == "1b" else "tiny"])
    print(run.text())
    run.print_verdicts()
    for failure in failures:
        run.say(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
