"""Error checks of decoding with linearized models, run before timing, and the models of the benchmark."""

import copy
import itertools

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.linearization.random_llama import random_llama
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


def step_arguments(
    batch: int, heads: int, groups: int, dim: int, window: int, sinks: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | int]:
    """Return random arguments of `windowed_step` at the first token, with an empty state and ring."""
    normal = lambda *shape: torch.randn(batch, *shape, device=device)  # noqa: E731
    return {
        "q": normal(1, heads * groups, dim).to(dtype),
        "k": normal(1, heads, dim).to(dtype),
        "v": normal(1, heads, dim).to(dtype),
        "log_decay": logsigmoid(normal(1, heads, dim)) / 16,
        "state": torch.zeros(batch, heads, dim, dim, device=device),
        "q_window": normal(1, heads * groups, dim).to(dtype),
        "k_window": normal(1, heads, dim).to(dtype),
        "ring_keys": torch.zeros(batch, sinks + window, heads, dim, device=device, dtype=dtype),
        "ring_values": torch.zeros(batch, sinks + window, heads, dim, device=device, dtype=dtype),
        "tokens": torch.zeros(1, dtype=torch.int32, device=device),
        "state_weight": torch.full((heads * groups,), 0.5, device=device),
        "window_weight": torch.full((heads * groups,), 0.5, device=device),
        "sinks": sinks,
    }


def kernel_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of `windowed_step`, in outputs and states, against its plain float64 form."""
    held = step_arguments(3, 2, 4, 128, 64, 4, dtype, device)
    exact = {name: x.double() if isinstance(x, Tensor) and name != "tokens" else x for name, x in held.items()}
    kv_start = torch.tensor([0, 3, 70], dtype=torch.int32, device=device)
    worst = 0.0
    for _ in range(90):
        new = step_arguments(3, 2, 4, 128, 64, 4, dtype, device)
        for name in ("q", "k", "v", "log_decay", "q_window", "k_window"):
            held[name], exact[name] = new[name], new[name].double()
        out = windowed_step(**held, kv_start=kv_start)
        by_definition = plain_windowed_step(
            **exact, kv_start=kv_start, state_scale=1.0, window_scale=exact["q_window"].shape[-1] ** -0.5
        )
        worst = max(worst, relative_error(out, by_definition))
        held["tokens"] += 1
    return max(worst, relative_error(held["state"], exact["state"]))


def liger_arguments(
    batch: int,
    heads: int,
    groups: int,
    dim: int,
    window: int,
    sinks: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    late: bool = False,
) -> dict[str, Tensor | int]:
    """Return random arguments of `liger_step`, like those of `windowed_step`; q, k and v are views of one product.

    late: the state lags behind; rings are full, and their first tokens enter the state next.
    """
    taken = ("state", "ring_keys", "ring_values", "tokens", "state_weight", "window_weight", "sinks")
    given = step_arguments(batch, heads, groups, dim, window, sinks, dtype, device)
    widths = [heads * groups * dim, heads * dim, heads * dim]
    projected = torch.randn(batch, 1, sum(widths), device=device)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in projected.to(dtype).split(widths, dim=-1))
    angles = 6 * torch.randn(batch, 1, dim // 2, device=device).repeat(1, 1, 2)
    tables = {"cosine": angles.cos().to(dtype), "sine": angles.sin().to(dtype)}
    if late:
        tables["late_keys"] = torch.randn(batch, window + 1, heads, dim, device=device).to(dtype)
        given["ring_values"].normal_()
        given["tokens"] += window
    return {"q": q, "k": k, "v": v, **tables, **{name: given[name] for name in taken}}


def liger_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of `liger_step`, in outputs and states, against float64.

    Over 90 tokens, and in bfloat16 over a few with every gate (each compiles a kernel); with and without `late`.
    """
    worst, kv_start = 0.0, torch.tensor([0, 3, 70], dtype=torch.int32, device=device)
    gates = (*PER_CHANNEL, *PER_HEAD, *CONSTANT) if dtype == torch.bfloat16 else ("gla",)
    for gate, late in itertools.product(gates, (False, True)):
        held = liger_arguments(3, 2, 4, 128, 64, 4, dtype, device, late=late)
        exact = {name: x.double() if isinstance(x, Tensor) and name != "tokens" else x for name, x in held.items()}
        options = {"gate": gate, "temperature": 16.0 if gate == "gla" else 1.0, "kv_start": kv_start}
        for _ in range(90 if gate == "gla" else 10):
            new = liger_arguments(3, 2, 4, 128, 64, 4, dtype, device)
            for name in ("q", "k", "v", "cosine", "sine"):
                held[name], exact[name] = new[name], new[name].double()
            out, right = liger_step(**held, **options), liger_step(**exact, **options)
            worst = max(worst, relative_error(out, right))
            held["tokens"] += 1
        worst = max(worst, relative_error(held["state"], exact["state"]))
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
