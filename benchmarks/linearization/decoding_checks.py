"""Error checks of decoding with linearized models, run before timing, and the models of the benchmark."""

import copy
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.linearization.random_llama import random_llama
from benchmarks.linearization.step_arguments import liger_arguments, step_arguments
from benchmarks.measuring.timing import relative_error
from kernels.gated_recurrence import liger_step, windowed_step
from kernels.gated_recurrence.decode.windowed_step import plain_windowed_step
from kernels.gated_recurrence.forms import CONSTANT, PER_CHANNEL, PER_HEAD
from kernels.small_batch_linear import small_batch_linear
from lit_modules.generation.cuda_graphs import DecodingStep, Output, Replay
from lit_modules.networks.linearized import Linearization, linearize
from lit_modules.networks.positions import locate

SHAPES = {
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 5e5,
    },
    "small": {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 4096, "initializer_range": 0.04,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "initializer_range": 0.1,
    },
}  # fmt: skip
LIGER, HYBRID, SOFTMAX = "Liger-GLA", "Liger-GLA, every 8th softmax", "own attention"
BEST = "liger/best"  # with the same layers kept as the hybrid
OF_THE_TOKEN = {"q", "k", "v", "log_decay", "q_window", "k_window", "cosine", "sine"}  # arguments of a step
KERNEL_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def new_model(shape: str, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Create a Llama with random weights on the device."""
    config = LlamaConfig(max_position_embeddings=2**17, attn_implementation="sdpa", **SHAPES[shape])
    return random_llama(config, device, dtype).eval()


def settings_of(implementation: str, layers: int) -> Linearization:
    """Return which layers an implementation linearizes, and how."""
    kept = {LIGER: range(0), HYBRID: range(7, layers, 8), BEST: range(7, layers, 8), SOFTMAX: range(layers)}
    best = {"window": 124, "sinks": 4, "delayed": True, "learned_weights": "head"}
    return Linearization(softmax_layers=tuple(kept[implementation]), **best if implementation == BEST else {})


def error_over_tokens(
    step: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    draw: Callable[[], dict[str, Tensor | int]],
    tokens: int,
    **options: object,
) -> float:
    """Return the largest relative error of outputs and the last state, against the definition in float64.

    Args:
        draw: makes the arguments of the first token; of later ones, all but the state and the ring are new.
    """
    held, worst = draw(), 0.0
    exact = {name: x.double() if isinstance(x, Tensor) and name != "tokens" else x for name, x in held.items()}
    for _ in range(tokens):
        new = draw()
        for name in new.keys() & OF_THE_TOKEN:
            held[name], exact[name] = new[name], new[name].double()
        worst = max(worst, relative_error(step(**held, **options), definition(**exact, **options)))
        held["tokens"] += 1
    return max(worst, relative_error(held["state"], exact["state"]))


def kernel_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of `windowed_step` over 90 tokens, against its plain float64 form."""
    kv_start = torch.tensor([0, 3, 70], dtype=torch.int32, device=device)
    draw = partial(step_arguments, 3, 2, 4, 128, 64, 4, dtype, device)
    definition = partial(plain_windowed_step, state_scale=1.0, window_scale=128**-0.5)
    return error_over_tokens(windowed_step, definition, draw, 90, kv_start=kv_start)


def liger_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of `liger_step`, in outputs and states, against float64.

    Over 90 tokens, and in bfloat16 over a few with every gate (each compiles a kernel); with and without `late`.
    """
    worst, kv_start = 0.0, torch.tensor([0, 3, 70], dtype=torch.int32, device=device)
    gates = (*PER_CHANNEL, *PER_HEAD, *CONSTANT) if dtype == torch.bfloat16 else ("gla",)
    for gate, late in itertools.product(gates, (False, True)):
        draw = partial(liger_arguments, 3, 2, 4, 128, 64, 4, dtype, device, late=late)
        options = {"gate": gate, "temperature": 16.0 if gate == "gla" else 1.0, "kv_start": kv_start}
        tokens = 90 if gate == "gla" else 10
        worst = max(worst, error_over_tokens(liger_step, liger_step, draw, tokens, **options))
    return worst


def product_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of `small_batch_linear` against its float64 reference.

    It takes odd sizes, and in bfloat16 the products of a layer.
    """
    # Rows, outputs, inputs; after a norm, with a residual, gated.
    cases = [(5, 1037, 1083, True, True, False), (17, 2048, 1024, True, False, True)]
    if dtype == torch.bfloat16:
        cases += [(rows, 28672, 4096, True, False, True) for rows in (16, 64)]
        cases += [(16, 6144, 4096, True, False, False)]
        cases += [(16, 4096, inputs, False, True, False) for inputs in (4096, 14336)]
    worst = 0.0
    for rows, outputs, inputs, normalized, added, gated in cases:
        if device.type != "cuda":
            outputs, inputs = outputs // 64 * 2, inputs // 64
        normal = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
        x, weight, norm = 3 * normal(rows, inputs), normal(outputs, inputs) * inputs**-0.5, 1 + normal(inputs) / 8
        residual = normal(rows, outputs // (1 + gated))
        options = {"norm_weight": norm} if normalized else {}
        options |= {"residual": residual} if added else {}
        found = small_batch_linear(x, weight, gated=gated, **options)
        wide = {name: t.double() for name, t in options.items()}
        exact = small_batch_linear(x.double(), weight.double(), gated=gated, **wide)
        worst = max(worst, relative_error(found, exact))
    return worst


@torch.no_grad()
def decoding_errors(
    implementation: str, shape: str, device: torch.device, *, fused: bool, compiled: bool
) -> tuple[float, float]:
    """Return relative errors of bfloat16 logits against the float32 parallel pass.

    The errors are those of decoding by replays and of the parallel pass. Rows are left-padded; the tokens are
    teacher-forced.
    """
    model = linearize(new_model(shape, device, torch.bfloat16), settings_of(implementation, 8))
    batch, length = 3, 200  # longer than the longest window
    tokens = torch.randint(SHAPES[shape]["vocab_size"], (batch, length), device=device)
    mask = (torch.arange(length, device=device) >= torch.tensor([0, 2, 5], device=device)[:, None]).long()
    prompt = 10
    output = Output(batch, length - prompt, (), 0, device)
    logits = torch.zeros(length - prompt, batch, SHAPES[shape]["vocab_size"], device=device)

    def given(found: Tensor) -> Tensor:
        logits.index_copy_(0, output.count, found[None])
        return tokens[:, prompt:].index_select(1, output.count)[:, 0]

    cache = model.new_cache(length)
    first = model(tokens[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache, logits_to_keep=1).logits
    positions = locate(batch, prompt, 0, device, mask[:, :prompt])
    step = DecodingStep(model, cache, positions, given, output, fused=fused, compile=compiled)
    step.take(given(first[:, -1].float()))
    replay = Replay(step)
    for _ in range(length - prompt - 1):
        replay()
    parallel = model(tokens, attention_mask=mask, use_cache=False).logits[:, prompt - 1 : -1]
    exact = copy.deepcopy(model).float()(tokens, attention_mask=mask, use_cache=False).logits[:, prompt - 1 : -1]
    return relative_error(logits.transpose(0, 1), exact.double()), relative_error(parallel, exact.double())
