"""Tokens per second in training: `python -m benchmarks.pretraining.training_speed`.

FoX and HGRN2 against the Transformer (LLaMA) whose attention is PyTorch's scaled_dot_product_attention, all else equal:
the project's module, loss and optimizer, bfloat16 autocast, compiled blocks, random tokens, one sequence a document. An
optimizer step follows every micro-batch, at a learning rate that leaves the weights where they are.

What pruning saves depends on the gates, so those of the untrained FoX models are set: each head's logit to the mean and
deviation of a trained model's heads (--gates, spread evenly over the heads of each layer), else to N(3, 1).
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.attention_peers import PRUNE, largest_logits
from benchmarks.attention.attention_run import TrainedGates, pruned_fraction
from benchmarks.measuring.report import CommandLine, measured_on, page
from benchmarks.measuring.tables import shown, table
from benchmarks.measuring.timing import (
    default_device,
    elapsed,
    free_memory,
    one_line,
    peak_allocated,
    refuse_divergence,
    timestamp,
)
from benchmarks.pretraining.modules import pretraining, random_batch, utilization
from common.atomic_files import write_atomic
from lit_modules.callbacks.forget_gates import projections
from lit_modules.networks.mixers import attention
from lit_modules.pretraining import Pretraining

WARM, TIMED = 3, 6  # steps


@dataclass(frozen=True)
class Variant:
    """A model of `conf/model` without its size, and how it attends, if it has attention."""

    name: str
    model: str
    backend: SDPBackend | None = None
    pruned: bool = False


VARIANTS = (
    Variant("Transformer (LLaMA), SDPA cuDNN", "transformer_llama", SDPBackend.CUDNN_ATTENTION),
    Variant("Transformer (LLaMA), SDPA FA2", "transformer_llama", SDPBackend.FLASH_ATTENTION),
    Variant("Transformer (LLaMA), our kernel", "transformer_llama"),
    Variant("FoX (LLaMA)", "fox_llama"),
    Variant("FoX (LLaMA), pruned", "fox_llama", pruned=True),
    Variant("FoX (Pro)", "fox_pro"),
    Variant("FoX (Pro), pruned", "fox_pro", pruned=True),
    Variant("HGRN2", "hgrn2"),
)


@dataclass(frozen=True)
class Speed:
    """Measurements of a variant. pruned: the fraction of tiles under the threshold, if it prunes."""

    tokens_per_second: float
    mfu: float | None
    micro_batch: int
    memory_gib: float
    pruned: float | None


def sdpa_in_place_of_ours(q: Tensor, k: Tensor, v: Tensor, log_forget: None, *, length: int, **_: Any) -> Tensor:
    """Compute causal attention of packed documents of equal `length` with the enabled SDPA backend."""
    rows = (x.view(-1, length, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2).reshape(q.shape)


def build(variant: Variant, size: str, length: int, device: torch.device) -> Pretraining:
    """Build the module of `job=pretrain`, compiled if there is a GPU."""
    overrides = [f"model.prune={PRUNE}"] * variant.pruned
    compiled = device.type == "cuda"
    module = pretraining(f"{variant.model}_{size}", device, length, length, overrides, compile=compiled)
    module.configure_model()
    return module


@torch.no_grad()
def set_gates(module: Pretraining, trained: TrainedGates | None) -> None:
    """Match each attention head's gate logits to a trained head: the mean by the bias, the deviation by the weights."""
    config = module.model.config
    layers = [getattr(layer.self_attn, "forget_gate", None) for layer in module.model.model.layers]
    if trained is not None:
        # log_forget is stored in float16: replace values rounded to 0 by the smallest magnitude it can hold.
        logits = -torch.log(torch.expm1(-trained.log_forget.double().clamp(max=-6e-8)))
        means, deviations = logits.mean(1), logits.std(1)
    for number, gate in enumerate(layers):
        if gate is None:
            continue
        mean, deviation = torch.full_like(gate.proj.bias, 3.0), torch.ones_like(gate.proj.bias)
        if trained is not None:
            rank = torch.arange(config.num_heads, device=mean.device) * len(layers) + number
            chosen = rank * len(means) // (config.num_heads * len(layers))
            mean, deviation = means[chosen].to(mean), deviations[chosen].to(mean)
        gate.proj.bias.copy_(mean)
        untrained = config.initializer_range * math.sqrt(config.hidden_size)
        gate.proj.weight.mul_((deviation / untrained)[:, None])


@torch.no_grad()
def pruned_share(module: Pretraining, tokens: Tensor) -> float:
    """Return the mean over the layers of the fraction of 128 x 128 tiles under the pruning threshold."""
    fractions = []
    for number, q, k, _, log_forget in projections(module.model, tokens):
        bound = module.model.model.layers[number].self_attn._logit_bound()
        fractions.append(pruned_fraction(log_forget, largest_logits(q, k) if bound is None else bound))
    return statistics.mean(fractions)


def train(module: Pretraining, micro_batch: int, length: int, device: torch.device) -> float:
    """Return the median seconds of a step."""
    optimizer = module.configure_optimizers()["optimizer"]
    batch = random_batch(module, micro_batch * length, length, device)
    clocks = [timestamp(device)]
    for _ in range(WARM + TIMED):
        with torch.autocast(device.type, torch.bfloat16):
            loss = module.training_step(batch, 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        module.micro_losses.clear()
        clocks.append(timestamp(device))
    refuse_divergence(loss)
    return statistics.median(elapsed(a, b) for a, b in zip(clocks[WARM:], clocks[WARM + 1 :], strict=False))


def measure(variant: Variant, size: str, length: int, micro_batch: int, trained: TrainedGates | None) -> Speed:
    """Build the variant and train it for a few steps; halve the micro-batch while memory is exceeded."""
    while True:
        torch.compiler.reset()
        free_memory()
        try:
            return attempt(variant, size, length, micro_batch, trained)
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
        micro_batch //= 2


def attempt(variant: Variant, size: str, length: int, micro_batch: int, trained: TrainedGates | None) -> Speed:
    """Run `measure` at one micro-batch size."""
    device = default_device()
    torch.manual_seed(0)
    module = build(variant, size, length, device)
    set_gates(module, trained)
    with attending(variant, length):
        seconds = train(module, micro_batch, length, device)
    rate, memory, share = micro_batch * length / seconds, peak_allocated(device) / 2**30, None
    if variant.pruned:
        with torch.autocast(device.type, torch.bfloat16):
            share = pruned_share(module, torch.randint(module.model.config.vocab_size, (1, length), device=device))
    return Speed(rate, utilization(rate, module.flops_per_token), micro_batch, memory, share)


@contextmanager
def attending(variant: Variant, length: int) -> Iterator[None]:
    """Use the variant's attention in the networks within the context."""
    if variant.backend is None:
        yield
        return
    ours = attention.forgetting_attention
    attention.forgetting_attention = functools.partial(sdpa_in_place_of_ours, length=length)
    try:
        with sdpa_kernel([variant.backend]):
            yield
    finally:
        attention.forgetting_attention = ours


def report(size: str, length: int, gates: str, results: dict[str, Speed | str]) -> str:
    """Return the Markdown page of one size."""
    rates = {name: speed.tokens_per_second for name, speed in results.items() if isinstance(speed, Speed)}
    base = max((rate for name, rate in rates.items() if "SDPA" in name), default=None)
    rows = []
    for name, speed in results.items():
        if isinstance(speed, str):
            rows.append([name, speed, "", "", "", "", ""])
            continue
        ratio = f"{speed.tokens_per_second / base:.2f}" if base else ""
        share = f"{speed.pruned:.2f}" if speed.pruned is not None else ""
        rate, memory = f"{speed.tokens_per_second:,.0f}", f"{speed.memory_gib:.0f}"
        rows.append([name, rate, ratio, shown(speed.mfu, ".1%"), share, speed.micro_batch, memory])
    how = "compiled blocks, fused AdamW" if torch.cuda.is_available() else "nothing compiled"
    header = ["", "tokens/s", "ratio", "MFU", "tiles pruned", "sequences", "GiB"]
    return page(
        f"Training speed, {size}",
        f"{measured_on('torch')}. Sequences of {length} tokens, bfloat16 autocast, {how}, no recomputation; medians of "
        f"{TIMED} steps. Gates of attention: {gates}. By `python -m benchmarks.pretraining.training_speed`.",
        table(header, rows),
        "Ratio: to the faster of the two Transformers with SDPA, which is this framework with its attention replaced. "
        "MFU counts no pruning. Tiles pruned: of 128 x 128, under the threshold at a lost mass of e^-10, the logits "
        "bounded by the QK-norm (Pro) or by the norms of untrained q and k (LLaMA).",
    )


def main() -> int:
    """Measure and write a page for each size; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["360m", "760m"], help="of the models in conf/model")
    parser.add_argument("--variants", nargs="+", default=[""], help="only those whose name contains one of these")
    parser.add_argument("--length", type=int, default=16384, help="tokens in a sequence")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--gates", type=Path, help="gates of a trained model, by benchmarks.attention.trained_gates")
    arguments = parser.parse_for_gpu()
    trained = None if arguments.gates is None else TrainedGates.load(arguments.gates, default_device())
    gates = "N(3, 1) in every head" if trained is None else f"as in a trained model ({arguments.gates.name})"
    began = time.perf_counter()
    for size in arguments.sizes:
        results: dict[str, Speed | str] = {}
        for variant in VARIANTS:
            if not any(part in variant.name for part in arguments.variants):
                continue
            try:
                results[variant.name] = measure(variant, size, arguments.length, arguments.micro_batch, trained)
            except Exception as error:  # still measure the others
                results[variant.name] = one_line(error)
            print(f"[{time.perf_counter() - began:5.0f} s] {size} {variant.name}: {results[variant.name]}", flush=True)
            text = report(size, arguments.length, gates, results)
            write_atomic(arguments.output / f"training_speed_{size}.md", text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
