"""The head's loss, forward and backward: `python -m benchmarks.linearization.linear_losses`.

The loss as the project has it, against the plain form that it had before (the head as it is, a float32 copy of the
logits), and against all logits at once. Both are first held against float64; then milliseconds, TFLOP/s of the three
products alone, and peak memory beside the inputs. Distillation, with a teacher of the same size, follows.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.comparison_run import line_or_reason
from benchmarks.measuring.tables import table
from benchmarks.measuring.timing import default_device, peak_bytes, relative_error, timed
from lit_modules.networks.linear_cross_entropy import LOGITS_AT_ONCE, linear_cross_entropy
from lit_modules.networks.linear_kl_divergence import (
    linear_cross_entropy_and_kl,
    linear_kl_divergence,
    linear_top_k_kl,
    top_k_log_probabilities,
)

TOKENS, WIDTHS, VOCAB = 16384, (768, 1024, 1536), 50257


@dataclass
class Head:
    """Hidden states and heads of a student and a teacher, in bfloat16 and, as autocast has it, float32."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor

    @classmethod
    def random(cls, tokens: int, width: int, vocab: int, device: torch.device) -> "Head":
        generator = torch.Generator(device).manual_seed(width)

        def draw(rows: int, scale: float, dtype: torch.dtype) -> Tensor:
            return (scale * torch.randn(rows, width, generator=generator, device=device)).to(dtype)

        hidden, teacher_hidden = (draw(tokens, 1.0, torch.bfloat16) for _ in range(2))
        weight, teacher_weight = (draw(vocab, width**-0.5, torch.float32) for _ in range(2))
        targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
        targets[::7] = -100
        return cls(hidden.requires_grad_(), weight.requires_grad_(), targets, teacher_hidden, teacher_weight)

    def losses(self) -> dict[str, Callable[[], Tensor]]:
        """Return the compared losses as calls."""
        student, teacher = (self.hidden, self.weight), (self.teacher_hidden, self.teacher_weight)
        vocab, few = self.weight.shape[0], min(64, self.weight.shape[0] - 1)
        with autocast(self.hidden.device):
            log_probabilities, indices = top_k_log_probabilities(*teacher, few)
        return {
            "plain form": lambda: plain_form(*student, self.targets, max(1, LOGITS_AT_ONCE // vocab)),
            "ours": lambda: linear_cross_entropy(*student, self.targets),
            "all logits": lambda: F.cross_entropy(F.linear(*student).float(), self.targets),
            "KL": lambda: linear_kl_divergence(*student, *teacher),
            "cross-entropy and KL": lambda: linear_cross_entropy_and_kl(*student, self.targets, *teacher)[0],
            f"KL of the {few} likeliest": lambda: linear_top_k_kl(*student, indices, log_probabilities),
        }

    def step(self, loss: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        with autocast(self.hidden.device):
            value = loss()
        return value.detach(), *torch.autograd.grad(value, (self.hidden, self.weight))


def autocast(device: torch.device) -> torch.autocast:
    # Autocast caches copies of weights; each call must make its own.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


class _PlainForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        low_weight = weight.to(torch.bfloat16)
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            with torch.autocast(hidden.device.type, enabled=False):
                logits = (hidden[part] @ low_weight.T).float()
                logits -= logits.logsumexp(-1, keepdim=True)
                ignored = targets[part] == -100
                index = targets[part].masked_fill(ignored, 0)[:, None]
                total -= logits.gather(-1, index)[:, 0].masked_fill(ignored, 0).sum()
                slope = logits.exp_().scatter_add_(-1, index, -torch.ones_like(logits[:, :1]))
                slope = slope.masked_fill_(ignored[:, None], 0).to(torch.bfloat16)
                grad_hidden[part] = slope @ low_weight
                grad_weight += slope.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (grad_hidden * grad_total).to(grad_hidden.dtype), grad_weight * grad_total, None, None


def plain_form(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """Compute the mean cross-entropy in the earlier form: without padding, operation by operation."""
    return _PlainForm.apply(hidden, weight, targets, chunk_size) / (targets != -100).sum().clamp(min=1)


def exact_errors(head: Head) -> dict[str, list[float]]:
    """Return relative errors of the cross-entropy losses, and of their gradients of hidden and weight, to float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (head.hidden, head.weight))
    loss = F.cross_entropy(F.linear(hidden, weight), head.targets)
    exact = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    found = {name: head.step(head.losses()[name]) for name in ("plain form", "ours")}
    return {name: [relative_error(*pair) for pair in zip(step, exact, strict=True)] for name, step in found.items()}


def costs(step: Callable[[], object], work: float, device: torch.device) -> list[str]:
    """Return a step's milliseconds, TFLOP/s of its `work` in GFLOP, and peak memory on a GPU."""
    time_ms = timed(step, device)[0]
    peak = [f"{peak_bytes(step, device) / 2**20:.0f}"] if device.type == "cuda" else []
    return [f"{time_ms:.2f}", f"{work / time_ms:.0f}", *peak]


def main() -> None:
    """Check, measure, print."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    device = default_device()  # a run without a GPU has small sizes, to try it
    on_gpu = device.type == "cuda"
    tokens, widths, vocab = (TOKENS, WIDTHS, VOCAB) if on_gpu else (300, (32, 48), 517)

    errors = exact_errors(Head.random(tokens // 16, widths[0], vocab, device))
    print(table(["relative error to float64", "loss", "d hidden", "d weight"], [
        [name, *(f"{error:.1e}" for error in found)] for name, found in errors.items()
    ]))  # fmt: skip
    for plain, ours in zip(*errors.values(), strict=True):
        if ours > 2 * plain + 1e-6:
            raise SystemExit(f"ours has an error of {ours:.1e}, the plain form one of {plain:.1e}")

    rows = []
    for width in widths:
        head = Head.random(tokens, width, vocab, device)
        for name, loss in head.losses().items():
            products = 8 if "KL" in name and "likeliest" not in name else 6
            work = products * tokens * width * vocab / 1e9
            rows.append(line_or_reason(f"{name}, {width} wide", partial(costs, partial(head.step, loss), work, device)))
    print(table([f"{tokens} tokens, vocabulary {vocab}", "ms", "TFLOP/s", "peak MiB"], rows))


if __name__ == "__main__":
    main()
