"""Decode attention that reads the values of the highest scores alone, against the same attention over all values.

    python -m benchmarks.cache.selective_values [--lengths 65536] [--batches 1 16 32] [--top-values 100]

One step of decoding over random keys and values in bfloat16, heads of 64 channels: those of DiffQKV (arXiv 2501.13629)
and grouped ones with as many values. Full attention is this project's decode kernel, the faster of the two layouts in
which caches hold heads. Each call is first compared with its definition. Writes selective_values.md. On a CPU it only
tests itself: TRITON_INTERPRET=1, and small sizes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import copy_rate, default_device, free_memory, relative_error, timed
from kernels.forgetting_attention import forgetting_attention, forgetting_attention_reference
from kernels.rounding import cdiv
from kernels.selective_attention import selective_attention, selective_attention_reference
from kernels.selective_attention.triton import launch

DIM = 64
HEADS = {"DiffQKV, 32 / 4 / 16": (32, 4, 16), "GQA-16, 32 / 16 / 16": (32, 16, 16)}
LENGTHS = (4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 16, 32)
COLD_BYTES = 2**28
"""Bytes of keys that a call reads before it reads the same again: five times the L2 cache of an H200."""
MOST_ERROR = 0.02
"""Relative error of bfloat16 results above which a kernel is taken to be wrong."""


@dataclass(frozen=True)
class Measurement:
    """One size: microseconds of full attention, of selective attention and of its launches, bytes, and errors."""

    heads: str
    batch: int
    length: int
    full: float
    selective: float
    scores: float
    choice: float
    full_bytes: int
    least_bytes: int
    full_error: float
    selective_error: float


def random_step(heads: tuple[int, int, int], batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v of one step; k and v are views of `[B, H, S, D]`, as `cache=selective_v` holds them."""
    query_heads, *cached = heads
    options = {"dtype": torch.bfloat16, "device": default_device()}
    q = torch.randn(batch, 1, query_heads, DIM, **options)
    k, v = (torch.randn(batch, number, length, DIM, **options).transpose(1, 2) for number in cached)
    return q, k, v


def checked(name: str, found: Tensor, exact: Tensor) -> float:
    """Return the relative error of a result.

    Raises:
        RuntimeError: it is too large to be rounding.
    """
    error = relative_error(found, exact)
    if not error <= MOST_ERROR:
        raise RuntimeError(f"{name}: relative error {error:.1e}, rounding alone gives less than {MOST_ERROR}")
    return error


def microseconds(call: Callable[..., object], arguments: Sequence[tuple]) -> float:
    """Return the median microseconds of a call, which reads each of these arguments in turn."""

    def each() -> None:
        for given in arguments:
            call(*given)

    return 1e3 * timed(each, default_device())[0] / len(arguments)


def measure(name: str, batch: int, length: int, top_values: int) -> Measurement:
    """Measure one size, after the results of its last row were compared with the definitions."""
    q, k, v = random_step(HEADS[name], batch, length)
    exact = [x[-1:].double() for x in (q, k, v)]
    full_error = checked("full attention", forgetting_attention(q, k, v)[-1:], forgetting_attention_reference(*exact))
    found, exact_choice = selective_attention(q, k, v, top_values), selective_attention_reference(*exact, top_values)
    selective_error = checked("selective attention", found[-1:], exact_choice)
    del exact, exact_choice
    copies = cdiv(COLD_BYTES, k.nbytes) if k.is_cuda else 1
    steps = [(q, k, v)] + [random_step(HEADS[name], batch, length) for _ in range(copies - 1)]
    scale = DIM**-0.5
    selective = microseconds(lambda q, k, v: selective_attention(q, k, v, top_values), steps)
    scores = microseconds(lambda q, k, _: launch.score(q, k, None, None, None, scale, None), steps)
    scored = [(*launch.score(q, k, None, None, None, scale, None), v) for q, k, v in steps]
    choice = microseconds(lambda order, maxima, v: launch.choose(order, maxima, v, top_values, None, None), scored)
    del scored
    full = microseconds(forgetting_attention, steps)
    for place, (q, k, v) in enumerate(steps):
        steps[place] = q, k.contiguous(), v.contiguous()
    full = min(full, microseconds(forgetting_attention, steps))
    chosen = min(v.nbytes, q.nbytes * min(top_values, length))
    return Measurement(
        name, batch, length, full, selective, scores, choice, k.nbytes + v.nbytes, k.nbytes + chosen, full_error,
        selective_error,
    )  # fmt: skip


def report(rows: list[Measurement], top_values: int, copy: float) -> str:
    """Return the page."""
    lines = [
        [
            row.heads, row.batch, f"{row.length:,}", f"{row.full:.1f}", f"{row.selective:.1f}",
            f"{row.selective / row.full:.2f}", f"{row.least_bytes / row.full_bytes:.2f}",
            f"{row.scores:.1f}", f"{row.choice:.1f}", f"{row.full_bytes / 2**20:.0f}", f"{row.least_bytes / 2**20:.0f}",
            f"{row.full_bytes / row.full / copy / 10:.0f}%", f"{row.least_bytes / row.selective / copy / 10:.0f}%",
            f"{row.full_error:.1e}", f"{row.selective_error:.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "heads of q / k / v", "batch", "tokens", "all values, us", f"{top_values} values, us", "time, ratio",
        "bytes, ratio", "scores, us", "choice, us", "MiB, all", f"MiB, {top_values}", "copy rate, all",
        f"copy rate, {top_values}", "error, all", f"error, {top_values}",
    ]  # fmt: skip
    return page(
        "Decode attention over selected values",
        measured_on("torch", "triton"),
        f"One step of decoding over a cache in bfloat16, heads of {DIM} channels. Selective attention scores all keys, "
        f"and each query head reads the values of its {top_values} highest scores. Medians of CUDA graph replays that "
        "read other keys at each call, so that none are in the L2 cache. Scores and choice are the two launches, each "
        "alone. Bytes are the least that have to be read: keys, and all values or the chosen ones; scores are written "
        f"besides. Copying reads and writes {copy:.0f} GB/s. Errors are relative, against the definition in float64.",
        table(head, lines),
    )


def main() -> None:
    """Measure all sizes and write the page after each."""
    parser = CommandLine(__doc__)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--top-values", type=int, default=100)
    arguments = parser.parse_for_gpu()
    torch.manual_seed(0)
    copy = copy_rate(default_device())
    rows = []
    for name, batch, length in itertools.product(arguments.heads, arguments.batches, arguments.lengths):
        rows.append(measure(name, batch, length, arguments.top_values))
        print(rows[-1], flush=True)
        free_memory()
    publish(arguments.output / "selective_values.md", report(rows, arguments.top_values, copy))


if __name__ == "__main__":
    main()
