"""Training steps that linearization_training.py times: model shapes, our step and the peer's."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.linearization.linearization_peers import WINDOW, Attention, peer, peer_loss, published_loss
from benchmarks.linearization.random_llama import random_llama
from benchmarks.measuring.timing import (
    allocated,
    clock,
    peak_allocated,
    refuse_divergence,
    relative_error,
    synchronize,
)
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX
from lit_modules.networks.linearized import linearize
from lit_modules.networks.linearized.lora import add_lora
from lit_modules.networks.linearized.settings import Linearization

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Shape:
    """A Llama, and an optimizer step's batch of sequences of `length` tokens."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    batch: int = 8
    length: int = 1024
    micro_batches: tuple[int, ...] = (1, 8)

    def __str__(self) -> str:
        return self.name

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )


SHAPES = {
    "1b": Shape("Llama-3.2-1B", 2048, 16, 32, 8, 8192, 128256, True),
    "8b": Shape("Llama-3-8B", 4096, 32, 32, 8, 14336, 128256, False, micro_batches=(1, 4)),
    "tiny": Shape("tiny", 64, 2, 4, 2, 128, 512, True, batch=4, length=128, micro_batches=(1, 4)),
    # Head width of Llama-3.2-1B; then head width and query heads per key head of Llama-3-8B.
    "check": Shape("check", 256, 3, 4, 2, 512, 1024, True, batch=2, length=256),
    "check of 8b": Shape("check of 8b", 512, 2, 4, 1, 1024, 1024, True, batch=2, length=256),
}


@dataclass
class Trained:
    """A model in training.

    loss: of tokens [B, T]. resident: bytes that stay on the device between steps. published: include the official
    trainer's extra work around a step.
    """

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    published: bool = False
    compiled: bool = False
    resident: int = 0

    def __post_init__(self) -> None:
        self.model.train()
        self.weights = lora_weights(self.model)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                raise ValueError(f"{name} is trained, LoRA alone should be")
        parameters = list(self.weights.values())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=parameters[0].is_cuda)
        if self.compiled:
            # The CPU only tests the flow; do not wait for a compiler.
            backend = "inductor" if parameters[0].is_cuda else "aot_eager"
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            for layer in base.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)

    def step(self, tokens: Tensor, micro_batch: int) -> Tensor:
        """Take an optimizer step on tokens [batch, T]; return the loss of its last micro-batch."""
        parts = tokens.split(micro_batch)
        for part in parts:
            loss = self.loss(self.model, part)
            with torch.autograd.set_detect_anomaly(True) if self.published else nullcontext():
                (loss / len(parts)).backward()
            if self.published:
                loss.item()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss_and_gradients(
        self, tokens: Tensor, passed: Callable[[str], None] = lambda passed: None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of tokens [B, T], and the gradients of all LoRA weights in one float64 vector on the CPU.

        passed: called with the name of each finished pass.
        """
        loss = self.loss(self.model, tokens)
        synchronize(tokens.device)
        passed("forward")
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        found = torch.cat([gradient.flatten() for gradient in gradients]).cpu().double()
        passed("backward")
        return loss.detach().cpu().double(), found


def lora_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the LoRA weights with names and an order common to all implementations."""
    pattern = re.compile(r"layers\.(\d+)\.self_attn\.(\w+)\.(lora_[AB])\.")
    found = {}
    for name, parameter in model.named_parameters():
        if match := pattern.search(name):
            layer, projection, factor = match.groups()
            found[f"{int(layer):03d} {projection} {factor}"] = parameter
    return dict(sorted(found.items()))


def stock_model(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Create Hugging Face's Llama; its weights are always the same, rounded to bfloat16 in any dtype."""
    torch.manual_seed(0)
    return random_llama(shape.config(), device, torch.bfloat16).to(dtype)


@torch.no_grad()
def draw_lora(model: nn.Module) -> nn.Module:
    """Set the LoRA weights to nonzero values, the same in each model."""
    for number, weight in enumerate(lora_weights(model).values()):
        generator = torch.Generator(weight.device).manual_seed(number)
        weight.copy_(torch.randn(weight.shape, generator=generator, device=weight.device) * 0.02)
    return model


def our_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute next-token cross-entropy without storing the logits."""
    targets = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)), 1)
    return model(input_ids=tokens, shift_labels=targets).loss


def ours(stock: LlamaForCausalLM) -> nn.Module:
    """Convert the same weights to the project's model."""
    return add_lora(linearize(stock, Linearization(window=WINDOW)), rank=8, alpha=8, targets=PROJECTIONS)


def peer_builders(attention: Attention) -> dict[str, Callable[[Shape, torch.device], Trained]]:
    """Return builders of their step's variants; the first is the reference for the others."""

    def build(
        shape: Shape, device: torch.device, name: str, dtype: torch.dtype, compiled: bool, published: bool
    ) -> Trained:
        model = draw_lora(peer(stock_model(shape, device), attention, dtype=dtype, pooled=published))
        return Trained(name, model, published_loss if published else peer_loss, published, compiled)

    forms = {
        "fla, float32 q, k, v": (torch.float32, False, False),
        "fla, float32 q, k, v, compiled": (torch.float32, True, False),
        "fla, bfloat16 q, k, v, compiled": (torch.bfloat16, True, False),
        "fla, with what the official trainer does": (torch.float32, False, True),
    }
    return {
        name: partial(build, name=name, dtype=dtype, compiled=compiled, published=published)
        for name, (dtype, compiled, published) in forms.items()
    }


def our_builders() -> dict[str, Callable[[Shape, torch.device], Trained]]:
    """Return builders of our step, compiled and not."""

    def build(shape: Shape, device: torch.device, name: str, compiled: bool) -> Trained:
        return Trained(name, draw_lora(ours(stock_model(shape, device))), our_loss, compiled=compiled)

    return {name: partial(build, name=name, compiled=name != "ours") for name in ("ours", "ours, compiled")}


def first_passes(shape: Shape, sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """Run ours forward and backward, with one layer and batches of these sizes, to launch its kernels."""
    stock = stock_model(dataclasses.replace(shape, layers=1), device, dtype)
    trained = Trained("one layer", draw_lora(ours(stock)), our_loss)
    for size in sizes:
        trained.loss_and_gradients(torch.zeros(size, shape.length, dtype=torch.int64, device=device))


def timed_step(trained: Trained, tokens: Tensor, micro_batch: int) -> tuple[float, int]:
    """Return the seconds of a step and its peak bytes."""
    device = tokens.device
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = clock(device)
    loss = trained.step(tokens, micro_batch)
    seconds = clock(device) - began
    refuse_divergence(loss)
    return seconds, trained.resident + peak_allocated(device) - before


def errors(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return relative errors of the loss and of the gradients."""
    return tuple(relative_error(a, b) for a, b in zip(found, exact, strict=True))


def refuse(found: tuple[float, float], allowed: tuple[float, float]) -> None:
    """Raise if an error exceeds its bound."""
    if not all(error <= most for error, most in zip(found, allowed, strict=True)):
        raise RuntimeError(f"not timed: relative errors of loss and gradients are {found[0]:.1e} and {found[1]:.1e}")
