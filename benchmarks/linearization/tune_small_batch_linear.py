"""Find the tiles of a few rows' products on this GPU: `python -m benchmarks.linearization.tune_small_batch_linear`.

The products are those of Sigma 1.5B's attention, and of the model it is measured against. Every candidate is compiled
(in parallel threads), compared with float32, and only then timed, on matrices in rotation. It prints the best, today's
tiles, and torch's own operations: the best belongs in kernels/small_batch_linear/triton_linear.py, and which of the two
is faster in lit_modules/generation/fused_layers.py (FEW_ROWS, SMALL_MATRIX).
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measuring.compilation import compile_at_once
from benchmarks.measuring.timing import one_line, relative_error
from evaluation.device_timing import replay_seconds
from kernels.small_batch_linear import small_batch_linear, small_batch_linear_reference, triton_linear
from lit_modules.generation.fused_layers import FusedProduct

UNCACHED = 4e8  # bytes read in rotation, as in a model
LARGEST_ERROR = 0.01


class Shape(NamedTuple):
    """A product: numbers of outputs and inputs, and what is fused with it."""

    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


class Tiles(NamedTuple):
    """What `triton_linear._tiles` returns: outputs and inputs of a program's step, stages of its pipeline, warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


SHAPES = {
    "gate and up of queries": Shape(3072, 2048, norm=True, gated=True),
    "down of queries": Shape(2048, 3072),
    "plain queries": Shape(2048, 2048, norm=True),
    "output": Shape(2048, 2048, residual=True),
    "queries, keys and values": Shape(4096, 2048, norm=True),
    "keys and values": Shape(1280, 2048, norm=True),
}
CANDIDATES = [Tiles(*each) for each in product((16, 32, 64), (64, 128, 256, 512), (3, 5, 8), (2, 4))]


@contextlib.contextmanager
def tiled(tiles: Tiles | None) -> Iterator[None]:
    """Let the kernel have these tiles, or today's."""
    patch = None if tiles is None else mock.patch.object(triton_linear, "_tiles", return_value=tiles)
    with patch or contextlib.nullcontext():
        yield


def candidates(shape: Shape, rows: int) -> list[Tiles]:
    """Return the candidates that fit a processor's shared memory."""
    fitting = []
    for tiles in CANDIDATES:
        stage = 2 * tiles.inputs * (tiles.outputs * (1 + shape.gated) + max(triton_linear.SMALLEST_PRODUCT, rows))
        if tiles.inputs <= shape.inputs and (tiles.stages - 1) * stage <= triton_linear.SHARED_BYTES:
            fitting.append(tiles)
    return fitting


class Problem:
    """Random arguments of one product, with matrices in rotation."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, dtype: torch.dtype):
        normal = partial(torch.randn, device=device, dtype=dtype)
        width = shape.outputs * (1 + shape.gated)
        copies = math.ceil(UNCACHED / (width * shape.inputs * dtype.itemsize)) if device.type == "cuda" else 1
        self.x, self.gated = normal(rows, shape.inputs), shape.gated
        self.residual = normal(rows, shape.outputs) if shape.residual else None
        norm = 1 + 0.1 * normal(shape.inputs) if shape.norm else None
        self.products = [
            FusedProduct(normal(width, shape.inputs) * shape.inputs**-0.5, None, norm, 1e-6) for _ in range(copies)
        ]

    def in_one_kernel(self, product: FusedProduct) -> Tensor:
        """Compute by the kernel."""
        norm = {"norm_weight": product.norm_weight, "norm_eps": product.norm_eps}
        return small_batch_linear(self.x, product.weight, residual=self.residual, gated=self.gated, **norm)

    def in_parts(self, product: FusedProduct) -> Tensor:
        """Compute by torch's operations."""
        return product.in_parts(self.x, self.residual, self.gated)

    def microseconds(self, way: Callable[[FusedProduct], Tensor]) -> float:
        """Return the time of a call."""
        return 1e6 * replay_seconds([partial(way, each) for each in self.products])

    def error(self) -> float:
        """Return the kernel's relative error against float32."""
        first = self.products[0]
        wide: Any = [None if t is None else t.float() for t in (self.x, first.weight, first.norm_weight, self.residual)]
        exact = small_batch_linear_reference(*wide[:2], None, wide[2], first.norm_eps, wide[3], self.gated)
        return relative_error(self.in_one_kernel(first), exact.double())


def tune(name: str, rows: int, device: torch.device) -> None:
    """Print a product's times: the five best tiles, today's, and torch's operations."""
    shape, times = SHAPES[name], []
    problem = Problem(shape, rows, device, torch.bfloat16)
    fitting = candidates(shape, rows)

    def every() -> None:
        for tiles in fitting:
            with tiled(tiles):
                problem.in_one_kernel(problem.products[0])

    with contextlib.suppress(Exception):  # what does not compile fails again below
        compile_at_once(every)
    for tiles in (None, *fitting):
        try:
            with tiled(tiles):
                error = problem.error()
                if not error < LARGEST_ERROR:
                    print(f"{name}, {rows} rows, {tiles}: off by {error:.1e}")
                    continue
                times.append((problem.microseconds(problem.in_one_kernel), tiles))
        except Exception as error:
            print(f"{name}, {rows} rows, {tiles}: {one_line(error)}")
    best = sorted((each for each in times if each[1] is not None), key=lambda each: each[0])[:5]
    lines = [(each, str(tiles or "as today")) for each, tiles in (*best, *(each for each in times if each[1] is None))]
    lines.append((problem.microseconds(problem.in_parts), "torch's operations"))
    print(f"{name}, {rows} rows:")
    for microseconds, words in lines:
        rate = problem.products[0].weight.nbytes / microseconds / 1e3
        print(f"  {microseconds:7.2f} us {rate:6.0f} GB/s  {words}", flush=True)


def main() -> None:
    """Tune the products that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--products", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:3])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        for rows, name in product(arguments.rows, arguments.products):
            tune(name, rows, torch.device("cuda"))


if __name__ == "__main__":
    main()
