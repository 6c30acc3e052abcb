"""Seconds until the recurrence's first results, kernels not yet compiled: `python -m benchmarks.recurrence.first_call`.

Each configuration runs forward and backward twice in a process of its own with an empty cache of kernels. The first
call compiles; the second only runs. Without a GPU there is nothing to measure.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch

from benchmarks.measuring.report import CommandLine, device_name, measured_on, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import clock

# (dtype, width of keys and values, query heads, key heads): the dearest of each dtype that tests found.
CONFIGURATIONS = (
    ("bfloat16", 64, 4, 4),
    ("bfloat16", 128, 4, 1),
    ("bfloat16", 128, 8, 1),
    ("bfloat16", 128, 16, 1),
    ("bfloat16", 256, 4, 2),
    ("float16", 128, 4, 1),
    ("float16", 256, 4, 2),
    ("float32", 64, 4, 4),
    ("float32", 128, 4, 1),
    ("float32", 256, 4, 2),
)
HEADER = ["dtype", "width", "query heads", "key heads", "kernels", "slowest, s", "first call, s", "second, ms"]


def measure(dtype: str, width: int, query_heads: int, key_heads: int) -> dict[str, float | int]:
    """Measure one configuration, one gate per key channel, in this process."""
    from benchmarks.measuring.compilation import CompilationTimes
    from kernels.gated_recurrence import gated_recurrence

    times = CompilationTimes()
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(1, 1000, heads, width, generator=generator, device="cuda")
        return x.to(getattr(torch, dtype)).requires_grad_()

    q, k, v = draw(query_heads), draw(key_heads), draw(key_heads)
    gate = torch.nn.functional.logsigmoid(draw(key_heads).detach().float()).requires_grad_()
    seconds = []
    for _ in range(2):
        begin = clock(q.device)
        out, _ = gated_recurrence(q, k, v, gate)
        torch.autograd.grad(out.float().square().sum(), (q, k, v, gate))
        seconds.append(clock(q.device) - begin)
    return {
        "kernels": len(times.kernels),
        "slowest": max(took for _, took in times.kernels),
        "first": seconds[0],
        "second": seconds[1],
    }


def in_own_process(configuration: tuple[str, int, int, int]) -> dict[str, float | int]:
    """Measure a configuration in a new process with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.recurrence.first_call", "--one", *map(str, configuration)]
        result = subprocess.run(
            command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Measure all configurations and write the table."""
    parser = CommandLine(__doc__)
    parser.add_argument("--one", nargs=4, metavar=tuple(name.upper() for name in HEADER[:4]), help="one case")
    arguments = parser.parse_for_gpu()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if arguments.one:
        dtype, *sizes = arguments.one
        print(json.dumps(measure(dtype, *map(int, sizes))))
        return
    rows = []
    for configuration in CONFIGURATIONS:
        found = in_own_process(configuration)
        times = (f"{found[name]:.1f}" for name in ("slowest", "first"))
        rows.append([*configuration, found["kernels"], *times, f"{1000 * found['second']:.2f}"])
        print(*rows[-1], flush=True)
    machine = f"{device_name()}, {len(os.sched_getaffinity(0))} processor cores"
    text = page(
        "The recurrence's first call, kernels not yet compiled",
        f"{measured_on('torch', 'triton', machine=machine)}. By `python -m benchmarks.recurrence.first_call`: one "
        "forward and backward pass of 1,000 tokens with a gate per key channel, in a new process with an empty cache "
        "of kernels.",
        table(HEADER, rows),
    )
    publish(arguments.output / "recurrence_first_call.md", text)


if __name__ == "__main__":
    main()
