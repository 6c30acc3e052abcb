"""Training on one long document: `python -m benchmarks.pretraining.context_parallel --lengths 131072 262144`.

FoX (Pro) on one GPU, which has to recompute its blocks, against all GPUs of this machine that share the document, with
and without recomputation: bfloat16 autocast, compiled blocks, fused AdamW, random tokens, an optimizer step for each
document. Gradients are averaged after the backward pass. First the loss and some gradients of a short document are
compared with those of one GPU.

Every case runs in separate processes. Earlier measurements are kept in `context_parallel.csv` next to the page, so that
lengths can be measured one by one; --seconds limits the total time.
"""

import datetime
import functools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.measuring.report import CommandLine, page
from benchmarks.measuring.tables import csv_text, read_csv, shown, table
from benchmarks.measuring.timing import clock, free_memory, one_line, peak_allocated, refuse_divergence, relative_error
from benchmarks.pretraining.modules import pretraining, random_batch, utilization
from benchmarks.pretraining.training_speed import set_gates
from common.atomic_files import write_atomic
from lit_modules.parallel.gradients import clip_gradients
from lit_modules.parallel.spreading import distribute
from lit_modules.pretraining import Pretraining

CHECKED = 4096  # tokens of the document that compares one GPU with several
# Bounds for rounding. The float32 bound detects tokens that miss the last tokens of the previous rank.
TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.1}
COMPARED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.k_shift_proj.weight",
    "model.layers.0.self_attn.forget_gate.proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "lm_head.weight",
)


@dataclass(frozen=True)
class Case:
    """One document of `length` tokens on `gpus` GPUs. recomputation: what the backward pass recomputes."""

    size: str
    length: int
    gpus: int
    recomputation: str


@dataclass(frozen=True)
class Measured:
    """A line of the table and of the CSV file.

    float32_error, bfloat16_error: error of several GPUs against one on a short document; note: why the measurement is
    missing.
    """

    size: str
    length: int
    gpus: int
    recomputation: str
    tokens_per_second: float | None = None
    steps: int = 0
    mfu: float | None = None
    memory_gib: float | None = None
    float32_error: float | None = None
    bfloat16_error: float | None = None
    device: str = "no GPU"
    torch: str = torch.__version__
    date: str = str(datetime.date.today())
    note: str = ""


def build(size: str, length: int, device: torch.device) -> Pretraining:
    """Build the module of `job=pretrain` on this device; the same in every process."""
    torch.manual_seed(0)
    module = pretraining(f"fox_pro_{size}", device, length, length)
    set_gates(module, None)
    return module


def take(module: Pretraining, batch: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Run forward and backward, average gradients over the ranks that share the document, and return the loss."""
    with torch.autocast(batch["targets"].device.type, dtype, enabled=dtype != torch.float32):
        loss = module.training_step(batch, 0)
    loss.backward()
    module.micro_losses.clear()
    loss = loss.detach()
    if module.context is not None:
        for x in (loss, *(p.grad for p in module.parameters() if p.grad is not None)):
            dist.all_reduce(x)
            x /= module.context.size
    return loss


def spread_out(module: Pretraining, case: Case, *, compile: bool, recomputation: str) -> None:
    """Set up context parallelism over the processes of this case, then compile and recompute as given."""
    strategy = SimpleNamespace(context_group=dist.group.WORLD if case.gpus > 1 else None)
    module.context = distribute(module.model, strategy, compile=compile, activation_checkpointing=recomputation)


def compare(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative error of the loss and some gradients against one GPU.

    Raises:
        RuntimeError: an error exceeds its bound for rounding.
    """
    alone, shared = (build(case.size, CHECKED, device) for _ in range(2))
    spread_out(shared, case, compile=False, recomputation="none")
    batch = random_batch(alone, CHECKED, CHECKED, device)
    wanted, found = (take(module, batch, dtype) for module in (alone, shared))
    pairs = [(shared.model.get_parameter(name).grad, alone.model.get_parameter(name).grad) for name in COMPARED]
    errors = [relative_error(*pair) for pair in ((found, wanted), *pairs)]
    if max(errors) > TOLERANCES[dtype]:
        named = ", ".join(f"{name} {error:.1e}" for name, error in zip(("loss", *COMPARED), errors, strict=True))
        raise RuntimeError(f"not what one GPU computes in {dtype}: {named}")
    return max(errors)


def measure(rank: int, case: Case, steps: int, folder: str) -> None:
    """Run one process of a case. Rank 0 writes its results to FOLDER/found.jsonl, line by line."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=case.gpus)
    note = functools.partial(write_line, Path(folder) / "found.jsonl", rank)
    if case.gpus > 1:
        note(**{f"{str(dtype).rpartition('.')[2]}_error": compare(case, dtype, device) for dtype in TOLERANCES})
    module = build(case.size, case.length, device)
    note(flops_per_token=module.flops_per_token)
    optimizer = module.configure_optimizers()["optimizer"]
    spread_out(module, case, compile=device.type == "cuda", recomputation=case.recomputation)
    batch = random_batch(module, case.length, case.length, device)
    layers = module.model.model.layers
    module.model.model.layers = layers[:1]  # compiles, and takes as long as a block
    take(module, batch)
    optimizer.zero_grad()
    module.model.model.layers = layers
    free_memory()
    for _ in range(steps):
        began = clock(device)
        loss = take(module, batch)
        clip_gradients(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = clock(device) - began
        refuse_divergence(loss)
        note(seconds=seconds, memory_gib=peak_allocated(device) / 2**30)
    dist.destroy_process_group()


def write_line(file: Path, rank: int, **found: float | None) -> None:
    """Append a line of JSON on rank 0."""
    if rank == 0:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")


def attempt(case: Case, steps: int, until: float) -> Measured:
    """Measure a case in separate processes; end them at `until`, and keep their results so far."""
    note = ""
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.start_processes(
            measure, (case, steps, folder), nprocs=case.gpus, join=False, start_method="spawn"
        )
        try:
            while not processes.join(timeout=max(0.1, min(1.0, until - time.perf_counter()))):
                if time.perf_counter() >= until:
                    note = "stopped: no time left"
                    break
        except torch.multiprocessing.ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            note = "out of memory" if "OutOfMemoryError" in last else one_line(RuntimeError(last))
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        file = Path(folder) / "found.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return summary(case, found, note)


def summary(case: Case, found: list[dict[str, float]], note: str) -> Measured:
    """Combine the lines of a case."""
    known = {key: value for line in found for key, value in line.items()}
    errors = {key: known.get(key) for key in ("float32_error", "bfloat16_error")}
    steps = [line["seconds"] for line in found if "seconds" in line]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if not steps:
        return Measured(**vars(case), **errors, device=device, note=note)
    rate = case.length / statistics.median(steps)
    mfu = utilization(rate, known["flops_per_token"], case.gpus)
    return Measured(
        **vars(case), **errors, tokens_per_second=rate, steps=len(steps), mfu=mfu, memory_gib=known["memory_gib"],
        device=device,
    )  # fmt: skip


def report(rows: list[Measured]) -> str:
    """Return the Markdown page."""
    one = {(row.size, row.length): row.tokens_per_second for row in rows if row.gpus == 1 and row.tokens_per_second}
    lines = []
    for row in rows:
        model = [f"FoX (Pro) {row.size}", f"{row.length:,}", row.gpus, row.recomputation]
        if row.tokens_per_second is None:
            lines.append([*model, row.note, "", "", "", ""])
            continue
        base = one.get((row.size, row.length))
        linear = f"{row.tokens_per_second / (base * row.gpus):.1%}" if base else ""
        numbers = f"{row.tokens_per_second:,.0f}", linear, shown(row.mfu, ".1%"), shown(row.memory_gib, ".0f")
        lines.append([*model, *numbers, row.steps])
    header = ["", "tokens", "GPUs", "recomputation", "tokens/s", "of linear", "MFU", "GiB on a GPU", "steps"]
    where = "; ".join(sorted({f"{row.date}, {row.device}, torch {row.torch}" for row in rows}))
    errors = {
        dtype: max((e for row in rows if (e := getattr(row, f"{dtype}_error")) is not None), default=None)
        for dtype in ("float32", "bfloat16")
    }
    worst = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in errors.items() if error is not None)
    compared = (
        f"Several GPUs against one, on {CHECKED} tokens: the worst of the loss and {len(COMPARED)} gradients differs, "
        f"relative to its norm, by {worst}."
    ) * bool(worst)
    return page(
        "Context parallelism",
        f"{where}. One document a step, bfloat16 autocast, fused AdamW, compiled blocks where there is a GPU; medians "
        "of steps, after one of a single block. By `python -m benchmarks.pretraining.context_parallel`.",
        table(header, lines),
        "Of linear: of as many times the tokens/s of one GPU, which recomputes its blocks. MFU counts neither "
        f"recomputation nor pruning, and nothing is pruned. {compared}",
    )


def main() -> int:
    """Measure, and write a page and a CSV file; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--size", default="360m", help="of the FoX (Pro) models in conf/model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[131072], help="tokens of the document")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="that share it")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--seconds", type=float, default=230, help="after which all stops")
    arguments = parser.parse_for_gpu()
    began = time.perf_counter()
    until = began + arguments.seconds
    ways = ((arguments.gpus, "none"), (1, "full"), (arguments.gpus, "full"))
    for length in arguments.lengths:
        for gpus, recomputation in ways:
            if time.perf_counter() >= until:
                break
            row = attempt(Case(arguments.size, length, gpus, recomputation), arguments.steps, until)
            print(f"[{time.perf_counter() - began:5.0f} s] {row}", flush=True)
            keep(arguments.output, row)
    print((arguments.output / "context_parallel.md").read_text(encoding="utf-8"))
    return 0


def keep(folder: Path, row: Measured) -> None:
    """Add a row to the CSV file and the page, replacing an older row of the same case if it has a measurement."""
    file = folder / "context_parallel.csv"
    rows = {(x.size, x.length, x.gpus, x.recomputation): x for x in read_csv(file, Measured)}
    case = (row.size, row.length, row.gpus, row.recomputation)
    if row.tokens_per_second is not None or case not in rows:
        rows[case] = row
    ordered = [rows[case] for case in sorted(rows)]
    write_atomic(file, csv_text(Measured, ordered))
    write_atomic(folder / "context_parallel.md", report(ordered))


if __name__ == "__main__":
    sys.exit(main())
