"""Times of a decoding step's single operations, with the sizes of Llama 3 8B."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.linearization.step_arguments import liger_arguments, step_arguments
from benchmarks.measuring.comparison_run import Run
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import timed
from kernels import forgetting_attention
from kernels.gated_recurrence import liger_step, windowed_step
from kernels.small_batch_linear import small_batch_linear

HEADS, HEAD_DIM, WINDOW = 8, 128, 64
UNCACHED = 4e8  # bytes read in rotation, as in a model: data reread at once would stay in the cache


class Matrix(NamedTuple):
    """A matrix product of a layer, or the head, and what is fused with it."""

    outputs: int
    inputs: int
    norm: bool = False
    residual: bool = False
    gated: bool = False


MATRICES = {
    "q, k, v behind a norm": Matrix(6144, 4096, norm=True),
    "output and residual": Matrix(4096, 4096, residual=True),
    "gate and up behind a norm, SwiGLU": Matrix(28672, 4096, norm=True, gated=True),
    "down and residual": Matrix(4096, 14336, residual=True),
    "head behind a norm": Matrix(128256, 4096, norm=True),
}


@torch.no_grad()
def operations(run: Run, batch: int) -> None:
    """Write the table of operations."""
    device, lines, rate = run.device, [], run.copy_rate

    def add(name: str, calls: list[Callable[[], Tensor]], nbytes: int) -> None:
        found = timed(lambda: [call() for call in calls], device)[0] / len(calls)
        lines.append([name, f"{found * 1e3:.1f}", f"{nbytes / found / 1e6:.0f}", f"{nbytes / found / 1e6 / rate:.0%}"])
        run.say(" ".join(lines[-1]))

    for name, matrix in MATRICES.items():
        alone, fused, nbytes = _products(batch, matrix, device)
        add(f"small_batch_linear: {name}", fused, nbytes)
        add("torch: that product alone", alone, nbytes)
    layers = 16 if device.type == "cuda" else 2
    sizes = (batch, HEADS, 4, HEAD_DIM, WINDOW, 0, torch.bfloat16, device)
    given = [step_arguments(*sizes) for _ in range(layers)]
    moved = 2 * given[0]["state"].nbytes + 2 * given[0]["ring_keys"].nbytes
    add(f"windowed_step, window {WINDOW}", [partial(windowed_step, **arguments) for arguments in given], moved)
    for window, sinks, is_late in ((WINDOW, 0, False), (124, 4, True)):
        sizes = (batch, HEADS, 4, HEAD_DIM, window, sinks, torch.bfloat16, device)
        options = {"gate": "gla", "temperature": 16.0}
        given = [{**liger_arguments(*sizes, late=is_late), **options} for _ in range(layers)]
        for arguments in given if is_late else ():
            arguments["tokens"] += window  # until every token enters
        moved = 2 * given[0]["state"].nbytes + 2 * given[0]["ring_keys"].nbytes
        name = f"liger_step, window {window}" + f", {sinks} sinks, late state" * is_late
        add(name, [partial(liger_step, **arguments) for arguments in given], moved)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for held in (512, 8192) if device.type == "cuda" else (16,):
        pairs = [[normal(batch, held, HEADS, HEAD_DIM) for _ in range(2)] for _ in range(layers)]
        q = normal(batch, 1, 4 * HEADS, HEAD_DIM)
        calls = [partial(forgetting_attention, q, *pair) for pair in pairs]
        add(f"forgetting_attention, {held} keys", calls, 2 * pairs[0][0].nbytes)
    run.add_section(
        "Operations alone",
        f"Batch {batch}, 32 query heads, {HEADS} key heads of {HEAD_DIM}, in turn over several layers' tensors. Bytes "
        "are those of the matrix; of the state, read and written, and the ring; of keys and values. A copy moves "
        f"{rate:.0f} GB/s, read and written.",
        table(["", "microseconds", "GB/s", "of the copy"], lines),
    )


def _products(batch: int, matrix: Matrix, device: torch.device) -> tuple[list, list, int]:
    """Return calls of torch's linear layer and `small_batch_linear`, on matrices in rotation, and bytes per matrix."""
    outputs, inputs = matrix.outputs, matrix.inputs
    if device.type != "cuda":
        outputs, inputs = outputs // 64, inputs // 64
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, norm_weight = normal(batch, inputs), normal(inputs)
    nbytes = 2 * outputs * inputs
    weights = [normal(outputs, inputs) for _ in range(math.ceil(UNCACHED / nbytes) if device.type == "cuda" else 2)]
    options = {
        "norm_weight": norm_weight if matrix.norm else None,
        "residual": normal(batch, outputs) if matrix.residual else None,
        "gated": matrix.gated,
    }
    alone = [partial(F.linear, x, weight) for weight in weights]
    return alone, [partial(small_batch_linear, x, weight, **options) for weight in weights], nbytes
