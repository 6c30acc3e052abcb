"""A whole decoding step of an 8B Llama with a packed cache, against the same model with keys and values in 16 bits.

    python -m benchmarks.cache.decoding [--cases "batch 8, 32k"] [--layers 32]

Random weights in the shape of Llama-3.1-8B. Prompts are prefilled in chunks; then the step, from token to next token,
is captured once in a CUDA graph and replayed; between replays the cache packs what is due. Every cache runs in the
same model and the same step, this project's (`lit_modules.generation.cuda_graphs`). The caches of transformers run in
its own model, whose steps it launches one by one. The largest batch is the one that fits in MEMORY bytes, weights
included; its rows are copies of one prompt's. Writes packed_decoding.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import free_memory, one_line
from lit_modules.generation.cuda_graphs import WARM_UP, DecodingStep, Output, Replay, with_own_attention
from lit_modules.networks.caches import CompressedCache
from lit_modules.networks.caches.settings import CacheSettings, TensorSettings
from lit_modules.networks.linearized import LinearizedForCausalLM
from lit_modules.networks.positions import locate

CHUNK = 2048
STEPS, BEFORE = 256, 384
"""Decoded tokens that are timed, and those before them: packing counts, its first three times do not."""
PEER_STEPS = 8
MEMORY = 80e9
LARGEST = "largest batch, 8k"
BEST = "cache=best"
CASES = {
    "batch 8, 32k": (8, 32768),
    "batch 64, 8k": (64, 8192),
    "batch 8, 4k": (8, 4096),
    "batch 1, 4k": (1, 4096),
    "batch 1, 8k": (1, 8192),
    "batch 1, 16k": (1, 16384),
    LARGEST: (1, 8192),
}
PEER_CASES = ("batch 8, 4k",)


def settings_of(name: str) -> CacheSettings:
    """Return the settings of a cache that is measured."""
    wide: dict = {"keep": "first_and_recent", "group": None}
    if name == "16 bits":
        full = TensorSettings(bits=16)
        return CacheSettings(full, full)
    if name == "LogQuant, 2 bits":
        return CacheSettings(TensorSettings(groups_along="tokens", group=128), TensorSettings(group=None), window=64)
    if name == BEST:
        # Random weights have no maps: others of the same size.
        chosen: dict = {"keep": "prompt_attention", "transform": "hadamard"}
        keys = TensorSettings(**chosen, debias=True, clip=0.96)
        return CacheSettings(keys, TensorSettings(**chosen, clip=0.92), window=192)
    bits = 4 if "4 bits" in name else 2
    one = TensorSettings(**wide, bits=bits, transform="hadamard" if "rotated" in name else "none")
    return CacheSettings(one, one, window=192, first=4)


CACHES = ("16 bits", "LogQuant, 2 bits", BEST, "by token, 2 bits", "by token, 2 bits, rotated", "by token, 4 bits")


def _quantized(backend: str, bits: int) -> Callable[[LlamaConfig, int], QuantizedCache]:
    axis = 1 if backend == "hqq" else 0
    return lambda config, _: QuantizedCache(backend, config, nbits=bits, axis_key=axis, axis_value=axis)


PEERS: dict[str, Callable[[LlamaConfig, int], Any]] = {
    "transformers, dynamic": lambda config, _: DynamicCache(config=config),
    "transformers, static": lambda config, capacity: StaticCache(config=config, max_cache_len=capacity),
    "transformers, quanto, 2 bits": _quantized("quanto", 2),
    "transformers, quanto, 4 bits": _quantized("quanto", 4),
    "transformers, HQQ, 2 bits": _quantized("hqq", 2),
    "transformers, HQQ, 4 bits": _quantized("hqq", 4),
}


@dataclass(frozen=True)
class Measurement:
    """One cache in one case: milliseconds a step, bits an element, bytes of the cache, seconds of the prefill."""

    case: str
    cache: str
    batch: int
    milliseconds: float
    bits: float
    nbytes: int
    prefill: float


def random_llama(layers: int) -> LlamaForCausalLM:
    """Return Llama-3.1-8B's shape with random weights in bfloat16 on the GPU."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0,
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def prefill(model: Any, prompt: torch.Tensor, cache: Any) -> tuple[torch.Tensor, float]:
    """Return the likeliest next tokens `[B]` after `prompt` `[B, T]`, and the seconds that it took."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for start in range(0, prompt.shape[1], CHUNK):
        logits = model(prompt[:, start : start + CHUNK], past_key_values=cache, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1)
    torch.cuda.synchronize()
    return token, time.perf_counter() - began


def random_prompt(batch: int, length: int) -> torch.Tensor:
    """Return random tokens `[batch, length]`."""
    return torch.randint(0, 128256, (batch, length), device="cuda")


def elapsed(run: Callable[[], object], steps: int) -> float:
    """Return the milliseconds of a call, the mean over `steps`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


@torch.no_grad()
def measure(model: LinearizedForCausalLM, case: str, name: str, copies: int = 1) -> Measurement:
    """Prefill, repeat each row `copies` times, capture a step, and time STEPS replays."""
    batch, length = CASES[case]
    prompt = random_prompt(batch, length - BEFORE - STEPS)
    cache = CompressedCache(model.config, settings_of(name), capacity=length + 16)
    token, seconds = prefill(model, prompt, cache)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
        token, batch = token.repeat_interleave(copies), batch * copies
    output = Output(batch, BEFORE + STEPS + WARM_UP + 2, (), 0, prompt.device)
    positions = locate(batch, prompt.shape[1], 0, prompt.device)
    step = DecodingStep(model, cache, positions, lambda logits: logits.argmax(-1), output)
    step.take(token)
    replay = Replay(step)
    for _ in range(BEFORE):
        replay()
    milliseconds = elapsed(replay, STEPS)
    return Measurement(case, name, batch, milliseconds, cache.bits_per_element, sum(cache.memory().values()), seconds)


def measure_largest(model: LinearizedForCausalLM, name: str) -> Measurement:
    """Measure with as many copies of a prompt as fit in MEMORY."""
    one = measure(model, LARGEST, name)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    copies = int((MEMORY - weights) / one.nbytes)
    torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(0).total_memory)
    try:
        while True:
            free_memory()
            try:
                return measure(model, LARGEST, name, copies)
            except torch.cuda.OutOfMemoryError:
                copies -= max(1, copies // 50)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@torch.no_grad()
def measure_peer(model: LlamaForCausalLM, case: str, name: str) -> Measurement:
    """Prefill, and time PEER_STEPS steps with a cache of transformers."""
    batch, length = CASES[case]
    before = torch.cuda.memory_allocated()
    cache = PEERS[name](model.config, length)
    prompt = random_prompt(batch, length - PEER_STEPS - WARM_UP)
    token, seconds = prefill(model, prompt, cache)
    held = torch.cuda.memory_allocated() - before - prompt.nbytes - token.nbytes
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    numbers = 2 * batch * prompt.shape[1] * config.num_hidden_layers * config.num_key_value_heads * width

    def step() -> None:
        logits = model(token[:, None], past_key_values=cache).logits
        token.copy_(logits[:, -1].argmax(-1))

    for _ in range(WARM_UP):
        step()
    return Measurement(case, name, batch, elapsed(step, PEER_STEPS), 8 * held / numbers, held, seconds)


def report(rows: list[Measurement]) -> str:
    """Return the page."""
    lines = []
    for row in rows:
        full = next((other for other in rows if (other.case, other.cache) == (row.case, "16 bits")), row)
        rate, full_rate = (1e3 * each.batch / each.milliseconds for each in (row, full))
        lines.append(
            [
                row.case, row.cache, str(row.batch), f"{row.milliseconds:.2f}", f"{rate:.0f}",
                f"{rate / full_rate:.2f}", f"{row.bits:.2f}", f"{row.nbytes / 2**30:.2f}",
                f"{full.nbytes / full.batch / (row.nbytes / row.batch):.2f}", f"{row.prefill:.1f}",
            ]
        )  # fmt: skip
    head = [
        "case", "cache", "batch", "ms a step", "tokens/s", "this / 16 bits", "bits", "GiB", "16 bits / this",
        "prefill s",
    ]  # fmt: skip
    return page(
        "Decoding steps with a packed cache",
        measured_on("torch", "triton", "transformers"),
        f"Llama-3.1-8B's shape, random weights, prompts prefilled in chunks of {CHUNK}, {STEPS} replays of a captured "
        f"step after {BEFORE} that are not timed, packing included. {LARGEST.capitalize()}: what fits in "
        f"{MEMORY / 1e9:.0f} GB, weights included; the prefill is that of one row. Caches of transformers: "
        f"{PEER_STEPS} steps of its model, launched one by one.",
        table(head, lines),
    )


def main() -> None:
    """Measure the cases and write the page."""
    parser = CommandLine(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--caches", nargs="*", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_for_gpu()
    torch.manual_seed(0)
    stock = random_llama(arguments.layers)
    own = with_own_attention(stock)
    rows: list[Measurement] = []

    def add(run: Callable[[], Measurement], what: str) -> None:
        try:
            rows.append(run())
            print(rows[-1], flush=True)
        except (RuntimeError, ImportError, TypeError) as error:
            print(f"{what}: {one_line(error)}", flush=True)
        free_memory()  # a step and its cache hold each other

    for case in arguments.cases:
        for name in arguments.caches:
            run = partial(measure_largest, own, name) if case == LARGEST else partial(measure, own, case, name)
            add(run, f"{case}, {name}")
        for name in arguments.peers if case in PEER_CASES else ():
            add(partial(measure_peer, stock, case, name), f"{case}, {name}")
        publish(arguments.output / "packed_decoding.md", report(rows))


if __name__ == "__main__":
    main()
