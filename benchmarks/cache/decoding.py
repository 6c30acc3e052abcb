"""A whole decoding step of an 8B Llama with a packed cache, against the same model with keys and values in 16 bits.

    python -m benchmarks.cache.decoding [--cases "batch 8, 32k"] [--layers 32]

Random weights in the shape of Llama-3.1-8B. Prompts are prefilled in chunks; then the step, from token to next token,
is captured once in a CUDA graph and replayed; between replays the cache packs what is due. Every cache runs in the same
model and the same step, this project's (`lit_modules.generation.cuda_graphs`). Writes packed_decoding.md.
"""

import time
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measuring.report import CommandLine, measured_on, page, publish
from benchmarks.measuring.tables import table
from lit_modules.generation.cuda_graphs import WARM_UP, DecodingStep, Output, Replay, with_own_attention
from lit_modules.networks.caches import CompressedCache
from lit_modules.networks.caches.settings import CacheSettings, TensorSettings
from lit_modules.networks.linearized import LinearizedForCausalLM
from lit_modules.networks.positions import locate

CHUNK = 2048
STEPS = 128
"""Decoded tokens that are timed: two windows, so that packing counts."""
CASES = {"batch 8, 32k": (8, 32768), "batch 64, 8k": (64, 8192), "batch 8, 4k": (8, 4096), "batch 1, 4k": (1, 4096)}


def settings_of(name: str) -> CacheSettings:
    """Return the settings of a cache that is measured."""
    wide: dict = {"keep": "first_and_recent", "group": None}
    if name == "16 bits":
        full = TensorSettings(bits=16)
        return CacheSettings(full, full)
    if name == "LogQuant, 2 bits":
        return CacheSettings(TensorSettings(groups_along="tokens", group=128), TensorSettings(group=None), window=64)
    bits = 4 if "4 bits" in name else 2
    one = TensorSettings(**wide, bits=bits, transform="hadamard" if "rotated" in name else "none")
    return CacheSettings(one, one, window=192, first=4)


CACHES = ("16 bits", "LogQuant, 2 bits", "by token, 2 bits", "by token, 2 bits, rotated", "by token, 4 bits")


@dataclass(frozen=True)
class Measurement:
    """One cache in one case: milliseconds a step, bits an element, bytes of the cache, seconds of the prefill."""

    case: str
    cache: str
    milliseconds: float
    bits: float
    nbytes: int
    prefill: float


def random_llama(layers: int) -> LinearizedForCausalLM:
    """Return Llama-3.1-8B's shape with random weights in bfloat16 on the GPU, and this project's attention."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0,
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return with_own_attention(LlamaForCausalLM(config).eval())
        finally:
            torch.set_default_dtype(torch.float32)


@torch.no_grad()
def measure(model: LinearizedForCausalLM, case: str, name: str) -> Measurement:
    """Prefill, capture a step, and time STEPS replays."""
    batch, length = CASES[case]
    prompt = torch.randint(0, 128256, (batch, length - STEPS), device="cuda")
    cache = CompressedCache(model.config, settings_of(name), capacity=length + 16)
    began = time.perf_counter()
    for start in range(0, prompt.shape[1], CHUNK):
        logits = model(prompt[:, start : start + CHUNK], past_key_values=cache, logits_to_keep=1).logits
    torch.cuda.synchronize()
    prefill = time.perf_counter() - began
    output = Output(batch, STEPS + WARM_UP + 2, (), 0, prompt.device)
    positions = locate(batch, prompt.shape[1], 0, prompt.device)
    step = DecodingStep(model, cache, positions, lambda logits: logits.argmax(-1), output)
    step.take(logits[:, -1].argmax(-1))
    replay = Replay(step)
    for _ in range(WARM_UP + 1):
        replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        replay()
    end.record()
    torch.cuda.synchronize()
    elapsed = start.elapsed_time(end) / STEPS
    memory = sum(cache.memory().values())
    return Measurement(case, name, elapsed, cache.bits_per_element, memory, prefill)


def report(rows: list[Measurement]) -> str:
    """Return the page."""
    lines = []
    for row in rows:
        full = next((other for other in rows if (other.case, other.cache) == (row.case, "16 bits")), row)
        lines.append(
            [
                row.case, row.cache, f"{row.milliseconds:.2f}", f"{full.milliseconds / row.milliseconds:.2f}",
                f"{row.bits:.2f}", f"{row.nbytes / 2**30:.2f}", f"{full.nbytes / row.nbytes:.2f}", f"{row.prefill:.1f}",
            ]
        )  # fmt: skip
    head = ["case", "cache", "ms a step", "16 bits / this", "bits", "GiB", "16 bits / this", "prefill s"]
    return page(
        "Decoding steps with a packed cache",
        measured_on("torch", "triton", "transformers"),
        f"Llama-3.1-8B's shape, random weights, prompts prefilled in chunks of {CHUNK}, {STEPS} replays of a captured "
        "step, packing included.",
        table(head, lines),
    )


def main() -> None:
    """Measure the cases and write the page."""
    parser = CommandLine(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_for_gpu()
    torch.manual_seed(0)
    model = random_llama(arguments.layers)
    rows = []
    for case in arguments.cases:
        for name in arguments.caches:
            rows.append(measure(model, case, name))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    publish(arguments.output / "packed_decoding.md", report(rows))


if __name__ == "__main__":
    main()
