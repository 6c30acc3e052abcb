"""Tokens per second on several GPUs: `python -m benchmarks.pretraining.scaling`.

Weak scaling of pretraining as `job=pretrain` does it: the project's module, strategies, clipping and checkpoints under
Lightning's Trainer, random tokens, the same micro-batch on each GPU. Every micro-batch ends in an optimizer step and
pays for the gradient exchange, which a real run amortizes by accumulation. Then how long training waits for
asynchronous checkpoints, and how long one takes to load.

Earlier measurements are kept in a file of lines next to the page; the newest of a case counts.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measuring.report import CommandLine, device_name, page, publish
from benchmarks.measuring.tables import shown, table
from benchmarks.measuring.timing import default_device, elapsed, free_memory, one_line, peak_allocated, timestamp
from benchmarks.pretraining.modules import pretraining, random_batch, utilization
from lit_modules.checkpoints import Checkpoints
from lit_modules.parallel.strategies import DataParallel, OneDevice, Sharded

WARM, TIMED = 4, 8  # steps
EVERY_TOKENS = 67_108_864  # between checkpoints, as conf/config.yaml has it
CHECKPOINT_STEPS = (15, 45)  # interval in steps, and length in steps of the run with checkpoints


@dataclass(frozen=True)
class Case:
    """How a model is distributed. gathered: FSDP keeps a block's weights from its forward to its backward pass."""

    strategy: str
    compiled: bool = True
    gathered: bool = False
    checkpoints: bool = False

    @property
    def name(self) -> str:
        words = [self.strategy, "weights kept gathered" * self.gathered, "not compiled" * (not self.compiled)]
        return ", ".join(filter(None, words))


CASES = {
    1: (Case("one device", checkpoints=True), Case("one device", compiled=False)),
    2: (
        Case("FSDP2", checkpoints=True),
        Case("FSDP2", gathered=True),
        Case("DDP"),
        Case("HSDP"),
        Case("FSDP2", compiled=False),
        Case("DDP", compiled=False),
    ),
}


@dataclass
class Result:
    """Measurements of a case.

    first_wait, waited: seconds that training paused for the first checkpoint, which also allocates pinned memory, and
    for later ones; written: seconds of writing one during training; slowed: fraction by which steps took longer
    meanwhile; loaded: seconds to read one back.
    """

    gpus: int
    name: str
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    first_wait: float | None = None
    waited: float | None = None
    written: float | None = None
    slowed: float | None = None
    loaded: float | None = None
    gigabytes: float | None = None
    note: str = ""
    device: str = field(default_factory=device_name)
    torch: str = torch.__version__
    date: str = field(default_factory=lambda: str(datetime.date.today()))


class RandomTokens(lightning.LightningDataModule):
    """Repeats one batch of random tokens for each rank."""

    sequence_length = validation_length = 0
    hf_tokenizer = None

    def __init__(self, batch: dict[str, Tensor], steps: int) -> None:
        super().__init__()
        self.batches = [batch] * steps

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None, pin_memory=torch.cuda.is_available())


class Clock(Callback):
    """Records the start time of each step."""

    def __init__(self) -> None:
        self.instants: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.instants.append(timestamp(default_device()))

    def seconds(self) -> list[float]:
        """Return the seconds of each step after the warm-up steps."""
        return [elapsed(a, b) for a, b in itertools.pairwise(self.instants[WARM:])]


class Reading(Callback):
    """Measures the time from the model's setup until the checkpoint is loaded."""

    def on_fit_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_start(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.began


class Accounts(Checkpoints):
    """Checkpoints that measure how long each pauses training, and how long each takes to write.

    They follow each other faster than they are written, so that a write overlaps every step; waiting for the previous
    write is not counted.
    """

    def __init__(self, every_tokens: int) -> None:
        super().__init__(every_tokens, keep_last=1)
        self.waits: list[float] = []
        self.writes: list[float] = []

    def save(self, trainer: lightning.Trainer, loss: float | None = None) -> None:
        self.wait(trainer)
        trainer.strategy.barrier()  # ranks finish their copies at different times
        began = time.perf_counter()
        super().save(trainer, loss)
        trainer.strategy.barrier()
        self.waits.append(time.perf_counter() - began)

    def log_duration(self, trainer: lightning.Trainer, outcome: Any, waited: float) -> None:
        super().log_duration(trainer, outcome, waited)
        if outcome.error is not None:
            raise OSError(outcome.error)
        self.writes.append(outcome.seconds)


def strategy_of(case: Case) -> Strategy:
    """Return the strategy of a case; HSDP has one shard, as between nodes."""
    if case.strategy == "one device":
        return OneDevice(device="cuda:0" if torch.cuda.is_available() else "cpu")
    if case.strategy == "DDP":
        return DataParallel(gradient_as_bucket_view=True)
    shards = 1 if case.strategy == "HSDP" else None
    return Sharded(shard_size=shards, reshard_after_forward=not case.gathered)


def fit(case: Case, arguments: argparse.Namespace, steps: int, callbacks: list[Callback], folder: str, **fit: Any):
    """Train for some steps and return the module."""
    torch.compiler.reset()
    free_memory()  # of an earlier trainer, which is part of a reference cycle
    torch.manual_seed(0)
    gpus, rank = world()
    tokens, length = arguments.micro_batch * arguments.length, arguments.length
    compiled = case.compiled and torch.cuda.is_available()
    module = pretraining(f"fox_pro_{arguments.size}", torch.device("cpu"), tokens * gpus, length, compile=compiled)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=gpus,
        strategy=strategy_of(case),
        precision="bf16-mixed",
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoints) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=RandomTokens(random_batch(module, tokens, length, seed=rank), steps), **fit)
    return module


def measure(case: Case, arguments: argparse.Namespace) -> Result:
    """Train for a few steps."""
    (gpus, _), clock = world(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        module = fit(case, arguments, WARM + TIMED + 1, [clock], folder)
    rate = gpus * arguments.micro_batch * arguments.length / statistics.median(clock.seconds())
    memory = peak_allocated(default_device()) / 2**30
    mfu = utilization(rate, module.flops_per_token, gpus)
    return Result(gpus, case.name, rate, mfu=mfu, memory_gib=memory)


def measure_checkpoints(case: Case, arguments: argparse.Namespace, result: Result) -> None:
    """Train with checkpoints, and load the last of them."""
    every, steps = CHECKPOINT_STEPS
    (gpus, _), clock = world(), Clock()
    tokens = gpus * arguments.micro_batch * arguments.length
    folder = shared_folder()
    saver = Accounts(every * tokens)
    fit(case, arguments, steps, [clock, saver], folder)
    result.first_wait, *later = saver.waits
    result.waited, result.written = statistics.median(later), statistics.median(saver.writes)
    result.slowed = statistics.median(clock.seconds()) * result.tokens_per_second / tokens - 1
    (last,) = (Path(folder) / "checkpoints").glob("step_*")
    result.gigabytes = sum(file.stat().st_size for file in last.iterdir()) / 1e9
    reading = Reading()
    fit(case, arguments, steps + 1, [reading], folder, ckpt_path=last)
    result.loaded = reading.seconds


def shared_folder() -> str:
    """Create a folder and share its path with all ranks of this host."""
    folder = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    return folder[0]


def world() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def work(arguments: argparse.Namespace) -> None:
    """Measure every case of this number of GPUs, on each rank; rank 0 writes a line after each."""
    gpus, rank = world()
    for case in CASES[min(gpus, 2)]:
        if arguments.cases and case.name not in arguments.cases:
            continue
        try:
            result = measure(case, arguments)
            if case.checkpoints:
                measure_checkpoints(case, arguments, result)
        except Exception as error:  # still measure the others
            if gpus > 1:
                raise
            result = Result(gpus, case.name, note=one_line(error))
        if rank == 0:
            print(result, flush=True)
            with open(arguments.worker, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def report(arguments: argparse.Namespace, results: list[Result]) -> str:
    """Return the Markdown page."""
    base = {r.name: r.tokens_per_second for r in results if r.gpus == 1}
    alone, eager = base.get("one device"), base.get("one device, not compiled")
    rows = []
    for r in results:
        if r.tokens_per_second is None:
            rows.append([r.gpus, r.name, r.note, "", "", ""])
            continue
        one = eager if "not compiled" in r.name else alone
        linear = f"{r.tokens_per_second / (r.gpus * one):.1%}" if one else ""
        rate, mfu, memory = f"{r.tokens_per_second:,.0f}", shown(r.mfu, ".1%"), shown(r.memory_gib, ".0f")
        rows.append([r.gpus, r.name, rate, linear, mfu, memory])
    waits = []
    for r in results:
        if r.waited is not None:
            seconds = f"{r.first_wait:.2f}", f"{r.waited:.2f}", share(r), f"{r.written:.1f}"
            waits.append([r.gpus, r.name, f"{r.gigabytes:.1f}", *seconds, f"{r.slowed:+.1%}", f"{r.loaded:.1f}"])
    header = ["GPUs", "strategy", "GB", "first wait, s", "wait, s", "of training", "written in, s"]
    header += ["steps meanwhile", "read in, s"]
    checkpoints = page(
        "Checkpoints, written while training goes on",
        table(header, waits),
        "Wait: the seconds that training stands still for one, the first of which also takes pinned memory. Of "
        f"training: where one is written every {EVERY_TOKENS:,} tokens, the default. Steps meanwhile: longer than "
        "without.",
        level=2,
    )
    where = "; ".join(sorted({f"{r.date}, {r.device}, torch {r.torch}" for r in results}))
    return page(
        f"Scaling, FoX (Pro) {arguments.size}",
        f"{where}. Micro-batches of {arguments.micro_batch} sequences of {arguments.length} tokens on each GPU, an "
        f"optimizer step after each, bf16-mixed, fused AdamW, clipping; medians of {TIMED} steps. By "
        "`python -m benchmarks.pretraining.scaling`.",
        table(["GPUs", "strategy", "tokens/s", "of linear", "MFU", "GiB on a GPU"], rows),
        "Of linear: of as many times the tokens/s of one GPU, compiled alike. HSDP: every GPU a copy, as nodes do.",
        checkpoints if waits else "",
    )


def share(result: Result) -> str:
    """Return the fraction of training time spent waiting for checkpoints at the default interval."""
    return f"{result.waited * result.tokens_per_second / EVERY_TOKENS:.3%}"


def main() -> int:
    """Measure every number of GPUs in separate processes, and write a page; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--size", default="760m", help="of the FoX (Pro) models in conf/model")
    parser.add_argument("--length", type=int, default=16384, help="tokens in a sequence")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences in a step of one GPU")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs; all there are, and one")
    parser.add_argument("--cases", nargs="+", help="only those of these names, as the page has them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_for_gpu()
    if arguments.worker:
        work(arguments)
        return 0
    numbers = arguments.gpus or sorted({1, max(1, torch.cuda.device_count())})
    kept = arguments.output / f"scaling_{arguments.size}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        itself = ["-m", "benchmarks.pretraining.scaling", *sys.argv[1:], "--worker", str(kept)]
        subprocess.run([sys.executable, *launch, *itself], check=False)
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.is_file() else []
    newest = {(r.gpus, r.name): r for r in (Result(**json.loads(line)) for line in lines)}
    publish(kept.with_suffix(".md"), report(arguments, sorted(newest.values(), key=lambda r: r.gpus)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
