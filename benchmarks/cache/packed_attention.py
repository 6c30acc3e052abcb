"""Decode attention over a packed cache against the fastest attention over the same cache in 16 bits.

    python -m benchmarks.cache.packed_attention [--cases "batch 8, 32k"]

The heads are those of Llama-3.1-8B (32 for queries, 8 for keys and values, 128 wide), with random data. Peers in
bfloat16: this project's decode kernel, PyTorch's attention, and FlashAttention-3 if it is installed. Each kernel is
first compared with the definition. Writes packed_attention.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import copy_rate, default_device, relative_error, timed
from kernels import forgetting_attention
from kernels.packed_kv import Format, Packed, PackedPast, pack, packed_attention, packed_attention_reference

QUERY_HEADS, HEADS, DIM = 32, 8, 128
DENSE = 384
"""Tokens that are kept in 16 bits."""
BLOCK = 128
CASES = {"batch 8, 32k": (8, 32768), "batch 1, 100k": (1, 100352), "batch 64, 8k": (64, 8192), "batch 1, 4k": (1, 4096)}
VALUES = Format(2, "channels", DIM)
CLIPPED = Format(2, "channels", DIM, clip=0.92)
FORMATS: dict[str, tuple[Format, Format, bool, bool]] = {
    "2 bits, keys by channel": (Format(2, "tokens", BLOCK), VALUES, False, False),
    "2 bits, keys by token": (VALUES, VALUES, False, False),
    "2 bits, keys by token, rotated": (VALUES, VALUES, True, False),
    "2 bits, 8 channels of keys in 4, mapped, debiased": (
        Format(2, "tokens", BLOCK, high_channels=8), CLIPPED, True, True,
    ),
    "cache=best": (Format(2, "channels", DIM, clip=0.96), CLIPPED, True, True),
    "4 bits, keys by channel": (Format(4, "tokens", BLOCK), Format(4, "channels", DIM), False, False),
}  # fmt: skip
"""Formats of keys and values, whether they are mapped before, and whether logits are debiased."""


@dataclass(frozen=True)
class Measurement:
    """One measurement: milliseconds, bytes that had to be read, and the relative error."""

    case: str
    name: str
    milliseconds: float
    nbytes: int
    error: float


def rotation(device: torch.device) -> Tensor:
    """Return a random orthogonal matrix, as a calibrated rotation would be."""
    return torch.linalg.qr(torch.randn(DIM, DIM, device=device)).Q.contiguous()


def packed_arguments(batch: int, length: int, formats: tuple[Format, Format], *, rotated: bool, debias: bool) -> tuple:
    """Return random arguments of `packed_attention` for one step of decoding."""
    device = default_device()
    blocks = (length - DENSE) // BLOCK
    sides = []
    for format, by_channel in zip(formats, (False, True), strict=True):
        # Row by row: the numbers in float32 take far more memory than what they are packed into.
        rows = [
            pack(torch.randn(1, HEADS, blocks * BLOCK, DIM, device=device), format, BLOCK, by_channel=by_channel)
            for _ in range(batch)
        ]
        high = None if rows[0].high is None else torch.cat([row.high for row in rows])
        sides.append(
            Packed(
                torch.cat([row.low for row in rows]),
                high,
                torch.cat([row.metadata for row in rows]),
                format,
                by_channel,
            )
        )
    turns = (rotation(device), rotation(device)) if rotated else (None, None)
    held = torch.full((batch,), blocks, dtype=torch.int32, device=device)
    past = PackedPast(sides[0], sides[1], held, None, *turns, debias)
    q = torch.randn(batch, QUERY_HEADS, 1, DIM, device=device, dtype=torch.bfloat16)
    dense = [torch.randn(batch, HEADS, DENSE, DIM, device=device, dtype=torch.bfloat16) for _ in range(2)]
    return q, *dense, torch.full((batch,), DENSE, dtype=torch.int32, device=device), past


def peers(batch: int, length: int) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """Return calls of attention over keys and values in bfloat16, and the bytes that each has to read."""
    device = default_device()
    q = torch.randn(batch, 1, QUERY_HEADS, DIM, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, length, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    calls = {
        "bf16, this project": lambda: forgetting_attention(q, k, v),
        "bf16, PyTorch": lambda: F.scaled_dot_product_attention(*heads_first, enable_gqa=True),
    }
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache

        calls["bf16, FlashAttention-3"] = lambda: flash_attn_with_kvcache(q, k, v)
    except ImportError as error:
        print(f"without FlashAttention-3: {error}")
    return {name: (call, k.nbytes + v.nbytes) for name, call in calls.items()}


def measure(case: str) -> list[Measurement]:
    """Measure one batch and length."""
    device = default_device()
    batch, length = CASES[case]
    rows = []
    for name, (call, nbytes) in peers(batch, length).items():
        try:
            rows.append(Measurement(case, name, timed(call, device)[0], nbytes, 0.0))
        except RuntimeError as error:
            print(f"{case}: {name}: {str(error).splitlines()[0]}")
    for name, (keys, values, rotated, debias) in FORMATS.items():
        args = packed_arguments(batch, length, (keys, values), rotated=rotated, debias=debias)
        # The definition in float64 takes 8 bytes a number and more: it holds the first row only.
        first = first_row(args)
        exact = packed_attention_reference(first[0].double(), first[1].double(), first[2].double(), *first[3:])
        error = relative_error(packed_attention(*args)[:1], exact)
        past = args[4]
        nbytes = past.keys.nbytes + past.values.nbytes + args[1].nbytes + args[2].nbytes
        time = timed(lambda args=args: packed_attention(*args), device)[0]
        rows.append(Measurement(case, name, time, nbytes, error))
    return rows


def first_row(args: tuple) -> tuple:
    """Return the arguments of the first batch row alone."""
    q, keys, values, end, past = args
    sides = [side.map(lambda x: x[:1]) for side in (past.keys, past.values)]
    one = replace(past, keys=sides[0], values=sides[1], blocks=past.blocks[:1])
    return q[:1], keys[:1], values[:1], end[:1], one


def report(rows: list[Measurement], copy: float) -> str:
    """Return the page."""
    lines = []
    for row in rows:
        fastest = min(other.milliseconds for other in rows if other.case == row.case and other.name.startswith("bf16"))
        rate = row.nbytes / row.milliseconds / 1e6
        lines.append(
            [
                row.case, row.name, f"{1e3 * row.milliseconds:.1f}", f"{fastest / row.milliseconds:.2f}",
                f"{row.nbytes / 2**20:.0f}", f"{100 * rate / copy:.0f}%", f"{row.error:.1e}" if row.error else "",
            ]
        )  # fmt: skip
    head = ["case", "cache", "us", "fastest bf16 / this", "MiB read", "of copy rate", "relative error"]
    return page(
        "Decode attention over a packed cache",
        measured_on("torch", "triton"),
        f"One step of decoding, {QUERY_HEADS} query and {HEADS} key and value heads of {DIM}, {DENSE} tokens in 16 "
        f"bits (counted in the bytes). Medians of CUDA graph replays. Copying reads and writes {copy:.0f} GB/s.",
        table(head, lines),
    )


def main() -> None:
    """Measure all cases and write the page."""
    parser = CommandLine(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_for_gpu()
    torch.manual_seed(0)
    rows = []
    for case in arguments.cases:
        rows += measure(case)
        torch.cuda.empty_cache()
    publish(arguments.output / "packed_attention.md", report(rows, copy_rate(default_device())))


if __name__ == "__main__":
    main()
