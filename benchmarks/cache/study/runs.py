r"""Measure models under every cache: losses, recall, coverage and L1 error, most important first.

    python -m benchmarks.cache.study.runs --model SmolLM2=models/smollm2 --model FoX=runs/fox \
        --texts wikitext.txt manuals.txt --calibration other.txt --minutes 8

--processes shares the GPU among several: a small model leaves most of it idle.

Rows that cache_study.csv in the output folder has are not measured again. All models are in memory at once, so that the
most important cases of each come before the others of any; of equally important ones the first model's come first. What
maps are fitted to (--calibration) must not be among the texts. Then `python -m benchmarks.cache.study.report`.
"""

import argparse
import datetime
import gc
import itertools
import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.cache.study.cases import EVICTED, FULL_CASE, GATE, RESERVED, Case, cases
from benchmarks.cache.study.measuring import Attention, Subject, attention_values
from benchmarks.cache.study.records import FILE, IN_CHUNKS, Records, Result, joined
from benchmarks.measuring.configuration import compose
from benchmarks.measuring.report import CommandLine, device_name
from data_pipeline.tokens.tokenizer import text_start
from evaluation.calibration import sequences as cut_sequences
from evaluation.loading import load_checkpoint
from evaluation.recall.questions import KINDS
from lit_modules.generation.job import choose_device
from lit_modules.launching.run_folder import code_commit
from lit_modules.networks.caches import in_parts
from lit_modules.networks.caches.calibration import fit_rotations
from lit_modules.networks.caches.rotations import read_rotations, write_rotations

log = logging.getLogger(__name__)

FIT_LENGTH = 2048
LEAST_RECALL = 0.2
"""Of the full cache: what it recalls less often is not asked for under the others."""

GPU_WEIGHTS = 1 << 29
"""Attention weights that policies without a fused kernel hold at a time: a GPU that is measured has the room."""

SAME_LOSS = 0.01
"""Nats a token by which the full cache's loss of a sequence may differ from the one in the file: more than rounding
makes, and less than another model or text would."""

ATTENTION_TIER = 1
RETRIES = 2
"""Attempts after the first, of a task that finds too little memory."""

ASKING = 0.5
"""Added to a case's tier for recall, which follows the losses of that tier."""


@dataclass(frozen=True)
class Task:
    """One measurement: its importance, its name in the log, and the function that adds its results.

    Attributes:
        of_full: whether it measures the full cache, on which it depends what the others are asked.
    """

    tier: float
    place: int
    name: str
    run: Callable[[], None]
    of_full: bool = False


class Study:
    """The measurements of all models.

    Args:
        options: of the command line.
        records: what was measured before.
    """

    def __init__(self, options: argparse.Namespace, records: Records) -> None:
        self.options, self.records = options, records
        self.texts = {path.stem: path.read_text(encoding="utf-8") for path in options.texts}
        self.began = time.perf_counter()
        self.conditions = {"gpu": device_name(), "commit": code_commit()}
        self.questions: dict[tuple[str, str, int], list] = {}

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self.began

    def load(self, name: str, checkpoint: str) -> Subject:
        """Load a model, and fit its maps if there is no file of them."""
        device = choose_device(self.options.device)
        dtype = self.options.dtype
        cfg = compose("job=measure", f"checkpoint='{checkpoint}'", f"dtype={dtype}", "benchmark.text=''")
        model, tokenizer = load_checkpoint(cfg, device)
        path = self.options.output / f"{name}.safetensors"
        if not path.is_file():
            start = text_start(tokenizer)
            text = self.options.calibration.read_text(encoding="utf-8")
            tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: self.options.fit_tokens]
            write_rotations(path, fit_rotations(model, cut_sequences(tokens, start, FIT_LENGTH, device)))
        log.info("[%4.0f s] %s: loaded, maps in %s", self.seconds(), name, path)
        return Subject(name, model, tokenizer, path, self.options.chunk)

    def refuse_another(self, subject: Subject) -> None:
        """Exit if the file's results are of another model, tokenizer or text: rows of two could not be compared."""
        for name, text in self.texts.items():
            full = self.records.find(subject.name, FULL_CASE.key, "loss", name)
            if full is None:
                continue
            row = subject.sequences(text, self.options.length, self.options.sequences, self.options.seed)[:1]
            (found,), _, _ = subject.losses(FULL_CASE, row)
            if not abs(found - full.singles[0]) <= SAME_LOSS:
                raise SystemExit(
                    f"{self.records.path} has a loss of {full.singles[0]:.4f} for {subject.name} on {name}, and this "
                    f"model's is {found:.4f}: give the model, tokenizer and texts it was measured with, or another NAME"
                )

    def tasks(self, place: int, subject: Subject) -> list[Task]:
        """Return what is to be measured of a model."""
        found = []
        for case in cases(subject.has_gates):
            if self.options.tiers is not None and case.tier >= self.options.tiers:
                continue
            of_full, name = case == FULL_CASE, f"{subject.name}, {case.name}"
            run = partial(self.losses, subject, case)
            found.append(Task(case.tier, place, f"loss, {name}", run, of_full))
            for kind, length, whole in self.asked_for() if case.asked else ():
                run = partial(self.recall, subject, case, kind, length, whole)
                asked = recall_text(kind, length, whole)
                found.append(Task(case.tier + ASKING, place, f"recall, {asked}, {name}", run, of_full))
        if self.options.tiers is None or self.options.tiers > ATTENTION_TIER:
            name = f"attention, {subject.name}"
            found.append(Task(ATTENTION_TIER, place, name, partial(self.attention, subject)))
        return found

    def result(self, subject: Subject, case: Case, measure: str, text: str, values: Sequence[float], bits: float,
               seconds: float) -> Result:  # fmt: skip
        """Return a line of the file."""
        value, singles = joined(values)
        return Result(
            model=subject.name, policy=case.policy, treatment=case.treatment, bits=case.bits, reserved=case.reserved,
            match=case.match, measure=measure, text=text, value=value, bits_per_number=round(bits, 4), values=singles,
            seconds=round(seconds, 2), date=datetime.datetime.now().isoformat(timespec="seconds"), **self.conditions,
        )  # fmt: skip

    def losses(self, subject: Subject, case: Case) -> None:
        """Measure the losses of all texts' sequences, in one batch."""
        missing = {name: text for name, text in self.texts.items() if not self.has(subject, case, "loss", name)}
        if not missing:
            return
        began, options = time.perf_counter(), self.options
        cut = {n: subject.sequences(t, options.length, options.sequences, options.seed) for n, t in missing.items()}
        losses, late, bits = subject.losses(case, torch.cat(list(cut.values())))
        seconds, start = time.perf_counter() - began, 0
        for name, rows in cut.items():
            own = slice(start, start := start + len(rows))
            self.records.add(
                self.result(subject, case, measure, name, found[own], bits, seconds)
                for measure, found in (("loss", losses), ("late_loss", late))
            )

    def asked_for(self) -> Iterable[tuple[str, int, bool]]:
        """Return kinds and lengths of questions, and whether their prompts are read whole or in chunks."""
        return itertools.product(KINDS, self.options.recall_lengths, (True, False))

    def recall(self, subject: Subject, case: Case, kind: str, length: int, whole: bool) -> None:
        """Ask for facts, where the full cache finds them often enough."""
        text = recall_text(kind, length, whole)
        if self.has(subject, case, "right", text):
            return
        full = self.records.find(subject.name, FULL_CASE.key, "right", text)
        if case != FULL_CASE and (full is None or full.value < LEAST_RECALL):
            return
        began = time.perf_counter()
        right, bits = subject.answered(case, self.asked(subject, kind, length), length if whole else subject.chunk)
        seconds = time.perf_counter() - began
        self.records.add([self.result(subject, case, "right", text, right, bits, seconds)])

    def asked(self, subject: Subject, kind: str, length: int) -> list:
        """Return the questions, made once for each model."""
        key = subject.name, kind, length
        if key not in self.questions:
            options = self.options
            text = next(iter(self.texts.values()))
            self.questions[key] = subject.questions(kind, length, options.questions, options.seed, text)
        return self.questions[key]

    def attention(self, subject: Subject) -> None:
        """Measure coverage and L1 errors."""
        for name, text in self.texts.items():
            if any((r.model, r.measure, r.text) == (subject.name, "l1", name) for r in self.records.results):
                continue
            began, options = time.perf_counter(), self.options
            rows = subject.sequences(text, options.length, options.attention_sequences, options.seed)
            rotations = read_rotations(subject.rotations, subject.model)
            reserved = tuple(sorted(RESERVED))
            measured = Attention(subject, rotations, reserved, options.length, options.queries).measure(rows)
            found, seconds = attention_values(measured), time.perf_counter() - began
            self.records.add(
                self.result(subject, attention_case(selection, reserved, how), measure, name, values,
                            16 * tokens / options.length, seconds)
                for (measure, selection, reserved, how), (values, tokens) in found.items()
            )  # fmt: skip

    def has(self, subject: Subject, case: Case, measure: str, text: str) -> bool:
        """Return whether this was measured."""
        return self.records.find(subject.name, case.key, measure, text) is not None

    def run(self, tasks: Sequence[Task]) -> bool:
        """Run tasks, most important first, until the time is over; return whether all were run.

        A task that finds the GPU's memory taken by other processes is put off to the end, RETRIES times at most.
        """
        longest = 0.0
        queue = deque((task, RETRIES) for task in in_order(tasks))
        number, all_run = 0, True
        while queue:
            (task, retries), began = queue.popleft(), self.seconds()
            if began + longest > 60 * self.options.minutes:
                log.info("[%4.0f s] %s of %s done, the time is over", began, number, len(tasks))
                return False
            try:
                task.run()
            except torch.OutOfMemoryError:
                all_run = all_run and retries > 0
                queue.extend([(task, retries - 1)] if retries else [])
                log.info("[%4.0f s] %s: out of memory, %s more attempts", self.seconds(), task.name, retries)
                continue
            finally:
                torch.cuda.empty_cache()  # for the other processes on the GPU
            taken = self.seconds() - began
            longest, number = max(taken, longest / 2), number + 1
            log.info("[%4.0f s] %s of %s, %s: %.1f s", self.seconds(), number, len(tasks), task.name, taken)
        return all_run


def recall_text(kind: str, length: int, whole: bool) -> str:
    """Return the name of questions in the file of results."""
    return f"{kind} {length}" if whole else f"{kind} {length}{IN_CHUNKS}"


def in_order(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks, most important first."""
    return sorted(tasks, key=lambda task: (task.tier, task.place))


def own_tasks(tasks: Iterable[Task], processes: int, part: int | None, of_full: bool) -> list[Task]:
    """Return the tasks of one process.

    Args:
        tasks: of all processes.
        processes: that share them.
        part: which of them this is; None for one that has all tasks.
        of_full: whether the full cache is measured now, or what depends on it; with `part`.
    """
    if part is None:
        return list(tasks)
    return [task for task in in_order(tasks) if task.of_full == of_full][part::processes]


def part_file(options: argparse.Namespace, part: int) -> Path:
    """Return the file of one process's results, until all have ended."""
    return options.output / f"part_{part}_{FILE}"


def run_side_by_side(options: argparse.Namespace, records: Records, minutes: float, *more: str) -> None:
    """Run tasks in processes that have a part of them each, and take their results."""
    command = [sys.executable, "-m", "benchmarks.cache.study.runs", *sys.argv[1:], "--minutes", f"{minutes:.2f}", *more]
    children = [subprocess.Popen([*command, "--part", str(part)]) for part in range(options.processes)]
    failed = [part for part, child in enumerate(children) if child.wait()]
    if failed:
        log.error("processes %s of %s have failed: what they measured is kept", failed, options.processes)
    for path in map(partial(part_file, options), range(options.processes)):
        if path.is_file():
            records.take(path)


def attention_case(selection: str, reserved: int, how: str) -> Case:
    """Return the case of a selection of the analysis; `how` is what becomes of the other tokens, by its name there."""
    policies = {
        "two_and_recent": ("first_and_recent", "slots"), "two_and_fewer": ("first_and_recent", "tokens"),
        "four_and_recent": ("first_and_recent", "slots"), "recent_as_many": ("recent", "tokens"),
    }  # fmt: skip
    policy, match = policies.get(selection, (selection, "block more" if selection == GATE else "slots"))
    if how in ("", EVICTED):
        return Case(policy, how or "any", 0, reserved, match)
    bits, _, way = how.split(", ")
    return Case(policy, "oscar" if way == "clipped" else way, int(bits.split()[0]), reserved, match)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = CommandLine(__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=CHECKPOINT", dest="models")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="what is measured; the first has needles")
    parser.add_argument("--calibration", type=Path, required=True, help="what maps are fitted to")
    parser.add_argument("--fit-tokens", type=int, default=30000)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of each text; all are one batch")
    parser.add_argument("--chunk", type=int, default=256, help="tokens that pass through a model at a time")
    parser.add_argument("--recall-lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--questions", type=int, default=20, help="for each kind, length and one of five depths")
    parser.add_argument("--attention-sequences", type=int, default=3, help="of each text, for coverage and L1 errors")
    parser.add_argument("--queries", type=int, default=64, help="the last tokens, whose attention is measured")
    parser.add_argument("--tiers", type=int, help="only the first so many tiers of cases")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing that would end later")
    parser.add_argument("--seed", type=int, default=0, help="of sequences and questions")
    parser.add_argument("--processes", type=int, default=1, help="that share the GPU")
    parser.add_argument("--part", type=int, help="of the tasks; the processes are started with it")
    parser.add_argument("--of-full", action="store_true", help="with --part: tasks of the full cache, not the others")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    return parser.parse_for_gpu()


def main() -> None:
    """Measure, and say what is left."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options.output.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        in_parts.MAX_WEIGHTS = GPU_WEIGHTS
    records = Records(options.output / FILE)
    for path in options.output.glob(f"part_*_{FILE}") if options.part is None else ():
        records.take(path)  # of a run that was killed
    if options.part is not None:
        records = Records(part_file(options, options.part), known=options.output / FILE)
    study = Study(options, records)
    tasks: list[Task] = []
    for place, (name, _, checkpoint) in enumerate(model.partition("=") for model in options.models):
        subject = study.load(name, checkpoint)
        if options.part is None:
            with torch.no_grad():
                study.refuse_another(subject)
        tasks += study.tasks(place, subject)
    if options.part is None and options.processes > 1:
        del subject
        tasks.clear()
        gc.collect()
        torch.cuda.empty_cache()  # of the models
        for more in (["--of-full"], []):
            run_side_by_side(options, records, options.minutes - study.seconds() / 60, *more)
        return
    with torch.no_grad():
        study.run(own_tasks(tasks, options.processes, options.part, options.of_full))


if __name__ == "__main__":
    main()
