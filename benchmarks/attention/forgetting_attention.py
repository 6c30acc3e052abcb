"""Forgetting attention against its peers, in one run: `python -m benchmarks.attention.forgetting_attention`.

First the errors of every kernel of ours against float64 (the run stops at one out of bounds), then times: forward, and
forward + backward with the gradients of all inputs, on random bfloat16 data, each implementation in the layout it
prefers. Peers that are not installed are skipped and listed.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention import attention_checks as checks
from benchmarks.attention import attention_report as report
from benchmarks.attention.attention_peers import IMPLEMENTATIONS
from benchmarks.attention.attention_report import Row, Shape
from benchmarks.attention.attention_run import Benchmark, TrainedGates, attention_flops, pruned_fraction
from benchmarks.measuring.comparison_run import (
    against_copy,
    error_cells,
    line_or_reason,
    out_of_bounds,
    parse,
    spread_documents,
)
from benchmarks.measuring.report import CommandLine
from benchmarks.measuring.tables import comparison, table
from benchmarks.measuring.timing import BOTH, FORWARD, Call, default_device, host_microseconds, one_line
from kernels import forgetting_attention

TARGET_SHAPES = [
    Shape(4, (24,) * 3, 4096, 64),
    Shape(1, (24,) * 3, 16384, 64),
    Shape(4, (16,) * 3, 4096, 128),
    Shape(1, (16,) * 3, 16384, 128),
]
# (implementation, shape, largest allowed ratio of forward + backward to cuDNN's time without a gate)
TARGETS = [
    ("ours, gated", TARGET_SHAPES[0], 1.30),
    ("ours, gated", TARGET_SHAPES[1], 1.25),
    ("ours, gated", TARGET_SHAPES[3], 1.20),
    ("ours, pruned", TARGET_SHAPES[0], 0.75),
    ("ours, pruned", TARGET_SHAPES[1], 0.28),
    ("ours, pruned", TARGET_SHAPES[3], 0.25),
]
DIFFQKV_TARGET, DECODING_TARGET = 1.02, 0.70
SWEEP_TOKENS, SWEEP_WIDTH = 131072, 512
TRAINED = "trained gates"


def check(run: Benchmark) -> list[str]:
    """Write the error tables. Return our errors out of bounds; peers' errors are only shown."""
    checks.check_chunked_reference(run.device)
    wrong, lines = [], []
    for case in checks.CHECKS:
        if run.quick and case.name not in ("plain", "gated", "pruned"):
            continue
        errors = checks.errors_of_ours(case, run.device)
        label = f"{case.name}: {case.shape}"
        wrong += [f"{label}: {found}" for found in out_of_bounds(errors, checks.BOUNDS)]
        lines.append([label, *error_cells(errors, checks.NAMES)])
        run.say(f"error of {' '.join(lines[-1])}")
    peers = []
    for name in IMPLEMENTATIONS:
        if name.startswith("ours") or (run.quick and name == "flex"):
            continue
        for head_dim in (64,) if name == "flex" else (64, 128):
            try:
                errors = checks.errors_of(name, head_dim, run.device)
            except Exception as error:
                peers.append([f"{name}, D{head_dim}", one_line(error)])
                break
            peers.append([f"{name}, D{head_dim}", *error_cells(errors, checks.NAMES)])
            if found := out_of_bounds(errors, checks.BOUNDS):
                run.wrong[name, head_dim] = f"wrong {', '.join(found)}"
    long = []
    for length in () if run.quick else (8192, 32768, 131072):
        for head_dim in (64, 128) if length <= run.longest else ():
            for gated in (False, True):
                errors = checks.errors_at_length(length, head_dim, gated, run.device)
                long.append(
                    [f"{'gated' if gated else 'plain'}, T{length} D{head_dim}", *error_cells(errors, checks.NAMES)]
                )
                run.say(f"error of {' '.join(long[-1])}")
    header = ["relative error, 2-norm", *checks.NAMES]
    run.add_section(
        "Errors against float64",
        "Inputs are bfloat16; gates are logsigmoid(N(m, 1)) with m from 0 to 8 over the heads, so that short and long "
        f"memory are mixed. Bounds of ours up to 2048 tokens: {checks.BOUNDS['out']:.0e}, dlog_forget "
        f"{checks.BOUNDS['dlog_forget']:.0e}.",
        table(header, lines),
        "Ours at length:" if long else "",
        table(header, long) if long else "",
        "Peers, 1024 tokens:",
        table(header, peers),
    )
    return wrong


def targets(run: Benchmark) -> None:
    rows: list[Row] = []
    names = [name for name in IMPLEMENTATIONS if name != "flex"]
    for shape in TARGET_SHAPES:
        capped = run.cap(shape)
        flex = not run.quick and shape == TARGET_SHAPES[1]  # it recompiles for each shape
        problem = run.problem(capped)
        fraction = pruned_fraction(problem.log_forget, problem.logit_bound)
        found = run.side_by_side("targets", names + ["flex"] * flex, capped, problem, rounds=2, pruned=fraction)
        if run.trained is not None:
            problem = run.trained.put_into(problem)
            found += run.side_by_side(
                "targets",
                ["ours, pruned", "FoX official, pruned", "cuDNN"],
                capped,
                problem,
                TRAINED,
                rounds=2,
                pruned=pruned_fraction(problem.log_forget, problem.logit_bound),
            )
        rows += found
        time_of = {row.implementation: row.milliseconds for row in found if row.passes == BOTH and not row.parameter}
        for name, at, target in TARGETS:
            if at == capped and time_of.get(name) and time_of.get("cuDNN"):
                run.judge(f"{name}, {at}: of cuDNN's time", time_of[name] / time_of["cuDNN"], target)
    fractions = {(str(row.shape), row.parameter or "gates N(3, 1)"): row.pruned for row in rows}
    run.add_section(
        "Side by side",
        comparison(rows, "cuDNN"),
        table(
            ["128 x 128 tiles that can be pruned", "fraction"],
            [(", ".join(case), f"{fraction:.2f}") for case, fraction in fractions.items()],
        ),
        f"Each is the median of two rounds; the two differ by {run.spread:.1%} at most.",
    )


def diffqkv(run: Benchmark) -> None:
    """Measure fewer heads of k than of v: it must be as fast as grouped heads."""
    rows: list[Row] = []
    for key_heads, value_heads in ((4, 16), (16, 16), (32, 32)):
        shape = run.cap(Shape(1, (32, key_heads, value_heads), 16384, 64))
        names = ["ours, plain", "ours, gated"] + ["FA2", "cuDNN"] * (key_heads == value_heads)
        rows += run.side_by_side("DiffQKV", names, shape, run.problem(shape), rounds=2)
    time_of = {(row.shape.heads, row.implementation): row.milliseconds for row in rows if row.passes == BOTH}
    for name in ("ours, plain", "ours, gated"):
        fewer, grouped = time_of[(32, 4, 16), name], time_of[(32, 16, 16), name]
        if fewer and grouped and run.longest >= 16384:
            run.judge(f"{name}, heads 32/4/16: of the time with 32/16/16", fewer / grouped, DIFFQKV_TARGET)
    run.add_section("DiffQKV: heads of q, k and v", comparison(rows))


def windows(run: Benchmark) -> None:
    rows: list[Row] = []
    shape = run.cap(Shape(1, (24,) * 3, 16384, 64))
    for window in (512, 1024, 2048, 4096, None):
        problem = run.problem(shape)
        problem.window = window
        label = "no window" if window is None else f"window {window}"
        seen = shape.length if window is None else min(window, shape.length)
        # Some peers recompile their kernels for each window.
        names = ["ours, gated"] + ["fla", "FA3", "FA4"] * (window in (1024, None))
        share = (2 * shape.length - seen) * seen / shape.length**2
        flops = share * attention_flops(shape)
        rows += run.side_by_side("windows", names, shape, problem, label, flops=flops)
    run.add_section("Sliding windows", comparison(rows))


def packed(run: Benchmark) -> None:
    """Measure one row of packed documents whose log lengths are spread evenly."""
    length = min(65536, run.longest)
    bounds = spread_documents(length)
    lengths = [end - start for start, end in pairwise(bounds)]
    rows: list[Row] = []
    for heads, head_dim in ((24, 64), (16, 128)):
        shape = Shape(1, (heads,) * 3, length, head_dim)
        problem = run.problem(shape)
        problem.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=run.device)
        flops = sum(attention_flops(Shape(1, shape.heads, n, head_dim)) for n in lengths)
        names = ["ours, plain", "ours, gated", "ours, pruned", "fla", "FA2"]
        rows += run.side_by_side("packed", names, shape, problem, f"{len(bounds) - 1} documents", flops=flops)
    run.add_section(
        "Packed documents",
        f"{len(bounds) - 1} documents of 128 to 8192 tokens, evenly spread in log; FA2 is its variable-length form.",
        comparison(rows),
    )


def sweep(run: Benchmark) -> None:
    rows: list[Row] = []
    names = [name for name in IMPLEMENTATIONS if name not in ("flex", "FA3", "FA4")]
    tokens = min(SWEEP_TOKENS, run.longest)
    for head_dim in (64, 128):
        for length in sorted(run.lengths):
            shape = Shape(max(1, tokens // length), (SWEEP_WIDTH // head_dim,) * 3, length, head_dim)
            problem = run.problem(shape)
            rows += run.side_by_side(
                "lengths",
                names,
                shape,
                problem,
                passes=(BOTH,),
                pruned=pruned_fraction(problem.log_forget, problem.logit_bound),
            )
    report.draw_rates([row for row in rows if "pruned" not in row.implementation], run.folder / "attention_rates.png")
    run.add_section(
        "Lengths",
        f"{tokens} tokens a batch, {SWEEP_WIDTH} wide: more sequences where they are shorter.",
        "![TFLOP/s against length](attention_rates.png)",
        comparison(rows, "cuDNN"),
    )


def pruning(run: Benchmark) -> None:
    rows: list[Row] = []
    names = ["ours, pruned", "FoX official, pruned"]
    shape = run.cap(Shape(1, (16,) * 3, 16384, 64))
    for logit in (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10):
        problem = run.problem(shape, logit)
        fraction = pruned_fraction(problem.log_forget, problem.logit_bound)
        label = f"gates N({logit}, 1), {fraction:.2f} pruned"
        rows += run.side_by_side("pruning", names, shape, problem, label, passes=(BOTH,), pruned=fraction)
    if run.trained is not None:
        problem = run.trained.put_into(run.problem(shape))
        fraction = pruned_fraction(problem.log_forget, problem.logit_bound)
        rows += run.side_by_side("pruning", names, shape, problem, TRAINED, passes=(BOTH,), pruned=fraction)
    report.draw_pruning(rows, run.folder / "attention_pruning.png")
    run.add_section(
        "Pruning",
        "The fraction counts 128 x 128 tiles; trained gates come with the bound that the model's QK-norm gives.",
        "![Time against the fraction pruned](attention_pruning.png)",
        comparison(rows),
    )


@torch.no_grad()
def decoding(run: Benchmark) -> None:
    """Measure one query per row against a long cache: bandwidth of reading k, v and the gates over the copy rate."""
    batch, length, rows = 16, min(32768, run.longest), []
    for heads in ((32, 4, 16), (32, 16, 16), (32, 8, 8), (32, 32, 32)):
        shape = Shape(batch, heads, length, 64)
        problem = run.problem(shape)
        q, decay = problem.q[:, -1:].contiguous(), problem.log_forget.cumsum(1)
        k, v = problem.k, problem.v
        calls: dict[str, Callable[[], object]] = {
            "ours, plain": lambda q=q, k=k, v=v: forgetting_attention(q, k, v),
            "ours, gated": lambda q=q, k=k, v=v, decay=decay: forgetting_attention(q, k, v, decay, cumulative=True),
        }
        if heads[1] == heads[2]:
            leaves = tuple(x.transpose(1, 2) for x in (q, k, v))
            calls["SDPA, as it chooses"] = lambda leaves=leaves: scaled_dot_product_attention(*leaves, enable_gqa=True)
        builds = {name: lambda call=call: Call(call) for name, call in calls.items()}
        for (name, _), found in run.in_turn(builds, (FORWARD,)).items():
            moved = k.nbytes + v.nbytes + (decay.nbytes if name == "ours, gated" else 0)
            rate = moved / found.milliseconds / 1e6 if found.milliseconds else None
            rows.append(run.new_row("decoding", name, shape, FORWARD, found, rate=rate))
            if heads == (32, 4, 16) and rate and length == 32768:
                what = f"decoding, {name}, {shape}: of the copy rate"
                run.judge(what, rate / run.copy_rate, DECODING_TARGET, at_least=True)
        run.say(f"decoding: {shape}")
    run.rows += rows
    run.add_section(
        "Decoding: one query a row, T tokens cached",
        f"A device-to-device copy moves {run.copy_rate:.0f} GB/s, read and written. GB/s counts k, v and float32 gates "
        "once.",
        against_copy(rows, run.copy_rate),
    )


def host(run: Benchmark) -> None:
    """Measure the host time of a call, which the other tables exclude."""
    if run.device.type != "cuda":
        return
    problem = run.problem(Shape(1, (4,) * 3, 256, 64))

    def times(name: str) -> list[str]:
        call = IMPLEMENTATIONS[name](problem)
        return [f"{host_microseconds(call.passes(which)):.0f}" for which in (FORWARD, BOTH)]

    cells = [line_or_reason(name, partial(times, name)) for name in IMPLEMENTATIONS if name != "flex"]
    run.add_section(
        "The host's part",
        "Microseconds that a call keeps the host busy, at 256 tokens. Behind a busy device they are hidden.",
        table(["", "forward", "forward + backward"], cells),
    )


SECTIONS = {
    "targets": targets,
    "diffqkv": diffqkv,
    "decoding": decoding,
    "pruning": pruning,
    "windows": windows,
    "packed": packed,
    "host": host,
    "lengths": sweep,
}


def main() -> int:
    """Check, measure, print a short table, write the report, the numbers and the plots; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--gates", type=Path, help="gates of a trained model, by benchmarks.attention.trained_gates")
    arguments = parse(parser, SECTIONS, [2**n for n in range(10, 18)])
    torch.manual_seed(0)
    trained = None if arguments.gates is None else TrainedGates.load(arguments.gates, default_device())
    run = Benchmark(folder=arguments.output, lengths=arguments.lengths, quick=arguments.quick, trained=trained)
    return run.finish(check(run), [SECTIONS[name] for name in arguments.sections])


if __name__ == "__main__":
    sys.exit(main())
