"""The gated recurrence against its peers, in one run: `python -m benchmarks.recurrence.gated_recurrence`.

First the errors of every form of ours against float64 (the run stops at one out of bounds), then times: forward without
gradients, forward with what the backward pass needs, and forward + backward with the gradients of all inputs, on random
bfloat16 data with float32 gates. Peers that are not installed or raise are listed.

--quick leaves out most checks of small sizes and those of 65,536 tokens, the second round of the targets, and all other
sections that are not named. A run without a GPU only serves to test this program: `--lengths 16 32`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.measuring.comparison_run import (
    Errors,
    Run,
    against_copy,
    error_cells,
    line_or_reason,
    out_of_bounds,
    parse,
    spread_documents,
)
from benchmarks.measuring.parallel_tuning import tune_in_parallel
from benchmarks.measuring.report import CommandLine
from benchmarks.measuring.tables import comparison, shown, table
from benchmarks.measuring.timing import (
    BOTH,
    FORWARD,
    INFERENCE,
    Call,
    host_microseconds,
    one_line,
    peak_bytes,
)
from benchmarks.recurrence import recurrence_checks as checks
from benchmarks.recurrence import recurrence_report as report
from benchmarks.recurrence.recurrence_peers import (
    IMPLEMENTATIONS,
    PEERS,
    Case,
    Problem,
    random_problem,
    step_fla,
    step_ours,
)
from benchmarks.recurrence.recurrence_report import Row

LARGE, MANY, LONG = Case(4, 16, 4096, 128, 128), Case(8, 32, 2048, 64, 64), Case(1, 32, 16384, 64, 64)


@dataclass(frozen=True)
class Target:
    """Bounds on the time of `passes`, relative to the first of `PEERS` or else to the byte floor: target and aim."""

    case: Case
    met: float
    aim: float
    passes: str = BOTH
    floors: bool = False


TARGETS = (
    Target(LARGE, 0.36, 0.25),
    Target(LARGE, 0.45, 0.33, INFERENCE),
    Target(replace(LARGE, strength=1.0), 0.36, 0.25),
    Target(replace(LARGE, strength=3.0), 0.90, 0.55),
    Target(replace(LARGE, strength=30.0), 0.90, 0.55),
    Target(MANY, 0.30, 0.20),
    Target(LONG, 0.30, 0.20),
    Target(replace(LARGE, gate="slots"), 0.50, 0.30),
    *(Target(replace(case, gate="head"), 4.0, 2.0, floors=True) for case in (LARGE, MANY, LONG)),
)
STEP, STEP_MET, STEP_AIM = Case(64, 32, 1, 128, 128, initial_state=True), 0.70, 0.85
SWEEP_TOKENS, SWEEP = 2**18, Case(1, 16, 1, 128, 128)


@dataclass(kw_only=True)
class Benchmark(Run):
    """A run, with the errors found in peers."""

    name = "recurrence.gated_recurrence"
    title = "The gated recurrence"
    preamble = (
        "Random data, bfloat16 with float32 gates, g = logsigmoid(N(0, 1)) by channel, head or slot, g / 16 unless "
        "said otherwise; slots are 1 - gate, at 3 g and 30 g still 1 - exp(g). Medians of CUDA graph replays "
        "(`triton.testing.do_bench_cudagraph`): what the device takes, without the host's launching, which has a table "
        "of its own. What cannot be captured is marked as launched. The peers are flash-linear-attention's; their "
        "tuners' configurations are compiled together and measured for 20 ms each. The floor is the time of moving "
        "each input, output and gradient once at the rate of a copy on this device. An absolute time holds on this GPU "
        "only: compare within the run."
    )
    row = Row
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)  # (peer, gate): its errors out of bounds

    def problem(self, case: Case) -> Problem:
        """Draw random tensors for the case, shortened to `longest` tokens."""
        return random_problem(checks.shorten(case, self.longest), self.device)

    def side_by_side(
        self, section: str, names: Sequence[str], problem: Problem, passes: Sequence[str], rounds: int = 1
    ) -> list[Row]:
        """Measure the implementations in turn, `rounds` times, and keep the median of the rounds."""
        case = problem.case
        self.say(f"{section}: {case}, {case.gates}")
        measured = self.in_turn({name: partial(IMPLEMENTATIONS[name], problem) for name in names}, passes, rounds)
        rows = []
        for (name, which), found in measured.items():
            moved, read_again = (problem.bytes_moved(which, again) / 1e9 for again in (False, True))
            wrong = self.wrong.get((name, case.gate), "")
            floors = {
                "gigabytes": moved,
                "floor_milliseconds": moved / self.copy_rate * 1e3,
                "read_again_milliseconds": read_again / self.copy_rate * 1e3,
            }
            rows.append(self.new_row(section, name, case, which, found, case.gates, wrong, **floors))
        self.add_rows(rows)
        return rows


def check(run: Benchmark) -> list[str]:
    """Write the error tables. Return our errors out of bounds; peers' errors are only shown."""
    off = checks.check_definition(run.device)
    run.say(f"the float64 form is within {off:.0e} of the definition")
    timed_cases = dict.fromkeys(replace(target.case, initial_state=True) for target in TARGETS)
    wrong, lines = [], []

    def show(label: str, case: Case, errors: Errors) -> None:
        label = f"{label}{case}, {case.gates}"
        wrong.extend(f"{label}: {found}" for found in out_of_bounds(errors, checks.BOUNDS))
        lines.append([label, *error_cells(errors, checks.NAMES)])
        run.say(f"error of {' '.join(lines[-1])}")

    for case in checks.QUICK_CHECKS if run.quick else checks.CHECKS + checks.LONG_CHECKS:
        case = checks.shorten(case, run.longest)
        show("", case, *checks.errors_of_ours(case, run.device))
    for case in timed_cases:
        case = checks.shorten(case, run.longest)
        both = checks.errors_of_ours(case, run.device, (None, 0))
        for label, errors in zip(("timed: ", "recomputed: "), both, strict=True):
            show(label, case, errors)
    for case in checks.STEP_CHECKS:
        show("step: ", case, checks.errors_of_step(case, run.device))
    header = ["relative error, 2-norm", *checks.NAMES]
    run.add_section(
        "Errors against float64",
        f"Of out and the final states, and of all gradients from both. The float64 form is within {off:.0e} of the "
        f"definition. Bounds of ours: {checks.BOUNDS['out']:.1e}, dlog_decay {checks.BOUNDS['dlog_decay']:.1e}. Those "
        "called timed and recomputed are the sizes of the tables below, with what the backward pass needs kept as by "
        "default, or computed again.",
        table(header, lines),
        "Peers, without states:",
        table(header, _check_peers(run)),
    )
    return wrong


def _check_peers(run: Benchmark) -> list[list[str]]:
    """Return lines of the error table. Errors over a tenth are also noted with the times."""
    lines = []
    for name, case in checks.PEER_CHECKS:
        shown = checks.shorten(case, run.longest)
        label = f"{name}, {shown}, {shown.gates}"
        try:
            errors = checks.errors_of(name, shown, run.device)
        except Exception as error:
            lines.append([label, one_line(error)])
            continue
        lines.append([label, *error_cells(errors, checks.NAMES)])
        if (worst := max(errors, key=errors.get)) and not errors[worst] < 0.1:
            run.wrong[name, case.gate] = f"wrong {worst}, {shown.gates}: {errors[worst]:.1e}"
    return lines


def targets(run: Benchmark) -> None:
    """Measure the shapes of the target table, each with its peers."""
    rows: list[Row] = []
    for case in dict.fromkeys(target.case for target in TARGETS):
        names, rounds = ("ours", *PEERS[case.gate]), 1 if run.quick else 2
        rows += run.side_by_side("targets", names, run.problem(case), (INFERENCE, FORWARD, BOTH), rounds)
    found = {(row.implementation, row.shape, row.passes): row for row in rows}
    for target in TARGETS:
        case = target.case
        mine, peer = (found.get((name, case, target.passes)) for name in ("ours", PEERS[case.gate][0]))
        what = f"{case}, {case.gates}, {target.passes}"
        if target.floors and mine and mine.milliseconds:
            run.judge(f"{what}: byte floors", mine.milliseconds / mine.floor_milliseconds, target.met, target.aim)
        elif not target.floors and mine and mine.milliseconds and peer and peer.milliseconds:
            ratio = mine.milliseconds / peer.milliseconds
            run.judge(f"{what}: of {peer.implementation}'s time", ratio, target.met, target.aim)
    run.add_section(
        "Side by side",
        *by_gate(rows),
        f"Each is the median of {'one round' if run.quick else 'two rounds'}; rounds differ by {run.spread:.1%} at "
        "most.",
        f"Against the bytes: a copy moves {run.copy_rate:.0f} GB/s, read and written. No pass keeps the inputs on the "
        "chip for the next, so the last columns count inputs that the backward pass reads again, too.",
        report.floors(row for row in rows if row.implementation in ("ours", PEERS[row.shape.gate][0])),
    )


def by_gate(rows: Sequence[Row]) -> list[str]:
    """Return a table for each form of gate, with ratios to its first peer that could be measured."""
    tables = []
    for gate in dict.fromkeys(row.shape.gate for row in rows):
        mine = [row for row in rows if row.shape.gate == gate]
        whole = {row.implementation for row in mine if row.passes == BOTH and row.milliseconds}
        tables.append(comparison(mine, next((name for name in PEERS[gate] if name in whole), None)))
    return tables


def memory(run: Benchmark) -> None:
    """Measure peak memory and time of forward + backward."""
    rows: list[Row] = []
    for case in dict.fromkeys(replace(target.case, strength=1 / 16) for target in TARGETS):
        problem = run.problem(case)
        names = ("ours", "ours, recomputed", *PEERS[case.gate])
        for row in run.side_by_side("memory", names, problem, (BOTH,)):
            peak = None
            if row.milliseconds and run.device.type == "cuda":
                call = IMPLEMENTATIONS[row.implementation](problem)
                peak = peak_bytes(call.forward_backward, run.device) / 2**30
            rows.append(replace(row, peak_gib=peak))
    run.rows[-len(rows) :] = rows
    cells = []
    for row in rows:
        time_ms, peak = shown(row.milliseconds, ".3f") or row.note, shown(row.peak_gib, ".2f")
        cells.append([f"{row.shape}, {row.shape.gates}", row.implementation, time_ms, peak])
    run.add_section(
        "Memory",
        "The most that forward + backward allocates beside the inputs: out and the gradients, and what is kept between "
        "the passes. Recomputed is ours with `memory_budget=0`.",
        table(["", "", "milliseconds", "peak, GiB"], cells),
    )


@torch.no_grad()
def step(run: Benchmark) -> None:
    """Measure a few tokens after a state: bandwidth of reading and writing the state over the copy rate."""
    rows: list[Row] = []
    for case in (STEP, replace(STEP, gate="head"), replace(STEP, length=8), replace(STEP, batch=1)):
        problem = random_problem(case, run.device)
        steps = {"ours": step_ours, "fla": step_fla}
        builds = {name: lambda build=build, problem=problem: Call(build(problem)) for name, build in steps.items()}
        moved = 2 * problem.initial_states[0].nbytes / 1e9
        for (name, _), found in run.in_turn(builds, (FORWARD,)).items():
            row = run.new_row("step", name, case, INFERENCE, found, case.gates, gigabytes=moved)
            rows.append(row)
            if name == "ours" and case == STEP and row.rate:
                what = f"step, {case}, {case.gates}: of the copy rate"
                run.judge(what, row.rate / run.copy_rate, STEP_MET, STEP_AIM, at_least=True)
        run.say(f"step: {case}, {case.gates}")
    run.add_rows(rows)
    run.add_section(
        "Step: a few tokens after a state",
        f"A copy moves {run.copy_rate:.0f} GB/s, read and written. GB/s counts the state, read and written once. Ours "
        "updates it in place; fla's recurrent form writes a new one.",
        against_copy(rows, run.copy_rate),
    )


def packed(run: Benchmark) -> None:
    """Measure one row of packed documents whose log lengths are spread evenly."""
    length = min(65536, run.longest)
    bounds = spread_documents(length)
    rows: list[Row] = []
    for gate in ("key", "head"):
        problem = run.problem(Case(1, 16, length, 128, 128, gate, documents=tuple(bounds)))
        rows += run.side_by_side("packed", ("ours", *PEERS[gate]), problem, (INFERENCE, BOTH))
    run.add_section(
        "Packed documents",
        f"{len(bounds) - 1} documents of 128 to 8192 tokens, evenly spread in log.",
        *by_gate(rows),
    )


def host(run: Benchmark) -> None:
    """Measure the host time of a call, which the other tables exclude."""
    if run.device.type != "cuda":
        return

    def times(name: str, problem: Problem) -> list[str]:
        call = IMPLEMENTATIONS[name](problem)
        return [f"{host_microseconds(call.passes(which)):.0f}" for which in (INFERENCE, FORWARD, BOTH)]

    @torch.no_grad()
    def time_of_step(build: Callable[[Problem], Callable[[], object]], problem: Problem) -> list[str]:
        return [f"{host_microseconds(build(problem)):.0f}"]

    cells = []
    for gate in ("key", "head", "slots"):
        problem = run.problem(Case(1, 16, 256, 128, 128, gate))
        for name in ("ours", *PEERS[gate]):
            cells.append(line_or_reason(f"{name}, {problem.case.gates}", partial(times, name, problem)))
    problem = random_problem(replace(STEP, batch=1), run.device)
    for name, build in (("ours", step_ours), ("fla", step_fla)):
        cells.append(line_or_reason(f"{name}, step", partial(time_of_step, build, problem)))
    run.add_section(
        "The host's part",
        "Microseconds that a call keeps the host busy, at 256 tokens. Behind a busy device they are hidden.",
        table(["", INFERENCE, FORWARD, BOTH], cells),
    )


def sweep(run: Benchmark) -> None:
    """Measure a constant number of tokens in sequences of every length."""
    tokens, rows = min(SWEEP_TOKENS, run.longest), []
    for gate in ("key", "head"):
        for length in sorted(run.lengths):
            case = replace(SWEEP, batch=max(1, tokens // length), length=length, gate=gate)
            rows += run.side_by_side("lengths", ("ours", "fla chunk_gla"), run.problem(case), (BOTH,))
    report.draw(rows, run.folder / "recurrence_lengths.png")
    run.add_section(
        "Lengths",
        f"{tokens} tokens a batch, {SWEEP.heads} heads, K{SWEEP.key_dim} V{SWEEP.value_dim}: more sequences where they "
        "are shorter.",
        "![Time against length](recurrence_lengths.png)",
        *by_gate(rows),
    )


SECTIONS = {
    "targets": targets,
    "memory": memory,
    "step": step,
    "packed": packed,
    "host": host,
    "lengths": sweep,
}


def main() -> int:
    """Check, measure, print the verdicts, write the report, the numbers and the plot; return the exit status."""
    arguments = parse(CommandLine(__doc__), SECTIONS, [2**n for n in range(10, 19)])
    torch.manual_seed(0)
    tune_in_parallel()
    run = Benchmark(folder=arguments.output, lengths=arguments.lengths, quick=arguments.quick)
    return run.finish(check(run), [SECTIONS[name] for name in arguments.sections])


if __name__ == "__main__":
    sys.exit(main())
