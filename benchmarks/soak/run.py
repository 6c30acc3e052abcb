"""Repeat every kernel next to others on one GPU and compare its results: `python -m benchmarks.soak.run`.

Each kernel, forward and backward, is repeated in its own process, next to a second process that multiplies 8192 x 8192
matrices, next to seven processes that repeat the same kernel, or next to both matrix products and seven other kernels.
This exposes faults that depend on timing: a fault is reported with the kernel, the passes so far and the error, and
ends only its process. Results must be bitwise equal to the first pass, taken before the others start; if the kernel
sums in no fixed order, they must be within `cases.ATOMIC`.

    python -m benchmarks.soak.run --seconds 60 --kernels 'attention D128*' --neighbours products
    python -m benchmarks.soak.run --output benchmarks/results      # everything, a minute in all
    python -m benchmarks.soak.run --seconds 60 --neighbours others         # a minute each, eight kernels at once
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import wait

import torch

from benchmarks.measuring.report import CommandLine, measured_on, page
from benchmarks.measuring.tables import table
from benchmarks.soak.cases import CASES, repeated
from benchmarks.soak.processes import GRACE, START_LIMIT, Make, Products, Repeated, Worker, out_of_bounds
from common.atomic_files import write_atomic

ALONE, PRODUCTS, KIND, OTHERS = "alone", "products", "kind", "others"
NEIGHBOURS = {
    ALONE: "nothing",
    PRODUCTS: "matrix products",
    KIND: "its own kind",
    OTHERS: "matrix products and other kernels",
}
PROCESSES = 8
IN_ALL = 60.0
HEADER = ("kernel", "beside", "passes", "seconds", "worst difference", "verdict")


@dataclass(frozen=True)
class Outcome:
    """One kernel next to one kind of neighbour: the results of each process that repeated it."""

    kernel: str
    neighbours: str
    seconds: float
    seen: tuple[Repeated, ...]
    bounds: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """Return the result that differed most, and its difference."""
        found = [(name, value) for one in self.seen for name, value in one.worst.items()]
        return max(found, key=lambda pair: pair[1], default=("", 0.0))

    @property
    def faults(self) -> list[str]:
        """Return a line for each fault and each result out of its bound; empty if all is well."""
        died = [one for one in self.seen if one.fault]
        lines = []
        for fault in dict.fromkeys(one.fault for one in died):
            passes = sorted(one.passes for one in died if one.fault == fault)
            after = f"{passes[0]}" if passes[0] == passes[-1] else f"{passes[0]} to {passes[-1]}"
            lines.append(f"{len(passes)} of {len(self.seen)} processes, after {after} passes: {fault}")
        wrong = [one for one in self.seen if out_of_bounds(one.worst, self.bounds)]
        if wrong:
            worst = {name: max(one.worst[name] for one in wrong) for name in wrong[0].worst}
            differ = [
                f"{name} {worst[name]:.1e} over {self.bounds.get(name, 0.0):.0e}"
                for name in out_of_bounds(worst, self.bounds)
            ]
            first = min(one.first_wrong for one in wrong)
            lines.append(f"{len(wrong)} of {len(self.seen)} processes, from pass {first} on: {', '.join(differ)}")
        return lines

    def cells(self) -> list[str]:
        name, value = self.worst
        return [
            self.kernel,
            NEIGHBOURS[self.neighbours],
            f"{sum(one.passes for one in self.seen):,}",
            f"{self.seconds:.1f}",
            f"{name} {value:.1e}" if value else "none",
            "; ".join(self.faults) or "right",
        ]


class Soak:
    """The processes, started once and restarted after a fault."""

    def __init__(
        self,
        device: torch.device,
        make: Make = repeated,
        bounds: Callable[[str], dict[str, float]] = lambda name: CASES[name].bounds,
        processes: int = PROCESSES,
        start: str = "spawn",
    ):
        self.device, self.make, self.bounds, self.processes = device, make, bounds, processes
        self._context = multiprocessing.get_context(start)
        self._share = 0.9 / (processes + 1)
        self._workers = [self._worker() for _ in range(processes)]
        self._products: Products | None = None

    def _worker(self) -> Worker:
        return Worker(self._context, self.make, self.device, self._share)

    def _living(self, count: int) -> list[Worker]:
        self._workers = [worker if worker.alive else self._worker() for worker in self._workers]
        return self._workers[:count]

    def compile(self, names: Sequence[str]) -> None:
        """Run one pass of each kernel, in parallel over the processes, to fill Triton's cache.

        A kernel that fails here fails again, and is reported then.
        """
        left, busy = list(names), {}
        while left or busy:
            idle = [worker for worker in self._living(len(self._workers)) if worker.connection not in busy]
            for worker in idle[: len(left)]:
                worker.ask("prepare", left.pop(0))
                busy[worker.connection] = worker
            ready = wait(list(busy), timeout=START_LIMIT)
            for connection in ready or list(busy):
                busy.pop(connection).answer(0.0)
        for worker in self._workers:
            worker.prepared = None  # these first passes ran next to others

    def beside(self, neighbours: str, name: str, seconds: float) -> Outcome:
        """Repeat a kernel for `seconds` next to the neighbours."""
        workers = self._living(len(self._workers) if neighbours == KIND else 1)
        seen = _prepare(workers, name)
        began, bounds = time.monotonic(), self.bounds(name)
        if not seen:
            with self._products_of(neighbours):
                seen = _ask(workers, "repeat", [(seconds, bounds)] * len(workers), seconds + GRACE)
        return Outcome(name, neighbours, time.monotonic() - began, tuple(seen), bounds)

    def together(self, names: Sequence[str], seconds: float) -> list[Outcome]:
        """Repeat different kernels at once, at most one per process, next to matrix products."""
        workers = self._living(len(names))
        seen = {name: _prepare([worker], name) for worker, name in zip(workers, names, strict=True)}
        well = [(worker, name) for worker, name in zip(workers, names, strict=True) if not seen[name]]
        began, arguments = time.monotonic(), [(seconds, self.bounds(name)) for _, name in well]
        with self._products_of(OTHERS):
            answers = _ask([worker for worker, _ in well], "repeat", arguments, seconds + GRACE)
        seen |= {name: [answer] for (_, name), answer in zip(well, answers, strict=True)}
        took = time.monotonic() - began
        return [Outcome(name, OTHERS, took, tuple(seen[name]), self.bounds(name)) for name in names]

    def _products_of(self, neighbours: str) -> AbstractContextManager:
        if neighbours not in (PRODUCTS, OTHERS):
            return nullcontext()
        if self._products is None:
            self._products = Products(self._context, self.device)
        return self._products

    def close(self) -> None:
        for process in (*self._workers, *([self._products] if self._products else [])):
            process.close()


def _prepare(workers: Sequence[Worker], name: str) -> list[Repeated]:
    """Run the first pass of a kernel where it has not run yet; return the faults.

    The first process runs it on an otherwise idle GPU, then the others follow.
    """
    seen: list[Repeated] = []
    for some in (workers[:1], workers[1:]):
        if not any(one.fault for one in seen):
            fresh = [worker for worker in some if worker.prepared != name]
            seen += _ask(fresh, "prepare", [name] * len(fresh), START_LIMIT)
    return [one for one in seen if one.fault]


def _ask(workers: Sequence[Worker], command: str, arguments: Sequence[object], limit: float) -> list[Repeated]:
    """Send each worker its argument at once; return the answers in order."""
    for worker, argument in zip(workers, arguments, strict=True):
        worker.ask(command, argument)
    end = time.monotonic() + limit
    return [worker.answer(max(0.0, end - time.monotonic())) for worker in workers]


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the cases that match any of the patterns.

    Raises:
        ValueError: a pattern matches no case.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CASES):
            raise ValueError(f"--kernels {pattern!r} matches none: --list shows their names")
    return [name for name in CASES if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _outcomes(soak: Soak, names: Sequence[str], neighbours: Sequence[str], seconds: float) -> Iterator[Outcome]:
    """Yield the outcome of each kernel next to each kind of neighbour, as it completes."""
    for name in names:
        for beside in neighbours:
            if beside != OTHERS:
                yield soak.beside(beside, name, seconds)
    if OTHERS in neighbours:
        for first in range(0, len(names), soak.processes):
            yield from soak.together(names[first : first + soak.processes], seconds)


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the table and its hardware, in Markdown."""
    failed = sum(bool(outcome.faults) for outcome in outcomes)
    return page(
        "Every kernel beside others on one GPU",
        f"{measured_on('torch', 'triton')}. By `python -m benchmarks.soak.run`. Passes are those of all processes; the "
        "difference is the largest of any result from the first pass, relative, in the 2-norm. "
        f"{len(outcomes) - failed} of {len(outcomes)} right.",
        table(HEADER, [[cell.replace("|", "/") for cell in outcome.cells()] for outcome in outcomes]),
    )


def main() -> int:
    parser = CommandLine(__doc__)
    parser.set_defaults(output=None)  # a run of some kernels does not replace the page of all
    parser.add_argument("--seconds", type=float, help="of each kernel beside each neighbour; default: a minute in all")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="as a shell matches file names")
    parser.add_argument("--neighbours", nargs="+", choices=NEIGHBOURS, default=[PRODUCTS, KIND])
    parser.add_argument("--processes", type=int, default=PROCESSES, help="at once, for `kind` and `others`")
    parser.add_argument("--list", action="store_true", help="the names of the kernels, and nothing else")
    arguments = parser.parse_args()
    try:
        names = chosen(arguments.kernels)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(names))
        return 0
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and nothing to soak")
    if arguments.processes < 1 or (arguments.seconds is not None and arguments.seconds <= 0):
        parser.error("--seconds and --processes take numbers above 0")
    seconds = arguments.seconds or IN_ALL / (len(names) * len(arguments.neighbours))
    device, outcomes = torch.device("cuda"), []
    soak = Soak(device, processes=arguments.processes)
    try:
        began = time.monotonic()
        soak.compile(names)
        print(f"{len(names)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
        for found in _outcomes(soak, names, arguments.neighbours, seconds):
            outcomes.append(found)
            print(" | ".join(found.cells()), flush=True)
    finally:
        soak.close()
        if outcomes and arguments.output:
            write_atomic(arguments.output / "soak.md", report(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.faults]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} right, {time.monotonic() - began:.0f} s")
    for outcome in wrong:
        print(f"WRONG: {outcome.kernel}, beside {outcome.cells()[1]}: {'; '.join(outcome.faults)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
